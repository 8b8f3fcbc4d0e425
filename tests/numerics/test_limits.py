"""Random programs are planned within memory limits that some of them cannot keep: nothing but the plan says so."""

from __future__ import annotations

import contextlib
import random

import jax
import pytest

from experiments.baselines import joint
from tests.numerics.programs import draw, trained
from tests.numerics.programs.drawer import Skip
from unity_jax.machine.machine import Machine
from unity_jax.program import trace

pytestmark = pytest.mark.slow  # the same numbers on every JAX version

MOST = 4
"""Applications in a program."""


@pytest.mark.parametrize("machine", ["h100:8", "v5e:2x4"])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_are_planned_within_limits(seed: int, machine: str) -> None:
    rng, on = random.Random(seed), Machine.preset(machine)
    with jax.enable_x64(True):
        program = draw(rng, MOST)
        with contextlib.suppress(Skip):
            program = trained(program, rng)
        traced = trace(program.fn, program.args, {}, donate_argnums=program.donate)
        free = joint(traced, on)
        for part in (0.7, 0.3):
            limit = max(part * free.memory.peak_bytes, 1.0)
            found = joint(traced, on, limit)
            assert found.fits(limit) or found.memory.peak_bytes <= free.memory.peak_bytes
