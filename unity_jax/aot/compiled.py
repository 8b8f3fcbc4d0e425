"""What a compiler made of a program: its memory, its collectives beside the planned ones, and how long it computes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from unity_jax.aot.account import Account, account
from unity_jax.aot.bundles import schedules, with_schedules
from unity_jax.aot.collectives import Collective, bytes_difference
from unity_jax.aot.cycles import Cycles, estimated_cycles
from unity_jax.aot.hlo import parse
from unity_jax.aot.sites import module_collectives
from unity_jax.pcg.mesh import MeshAxes


@dataclass(frozen=True)
class CompiledMemory:
    """The compiler's own account, bytes per device.

    **Fields:** `argument`, `output`, `temp`, and `alias`, the results that reuse arguments (counted in both); `peak`:
    all that must fit, which is their sum, or for a TPU the compiler's peak, what lies on the chip included
    (`aot.allocated`); `host`: what is kept there.
    """

    argument: int
    output: int
    temp: int
    alias: int
    host: int
    peak: int

    @staticmethod
    def of(program: jax.stages.Compiled) -> CompiledMemory:
        memory: Any = program.memory_analysis()
        kinds = ("argument", "output", "temp", "alias")
        here, there = ({of: getattr(memory, f"{on}{of}_size_in_bytes") for of in kinds} for on in ("", "host_"))
        whole, host = (sum(of.values()) - 2 * of["alias"] for of in (here, there))
        peak = memory.peak_memory_in_bytes if _platform(program) == "tpu" else whole
        return CompiledMemory(**here, host=host, peak=peak)


def _platform(program: jax.stages.Compiled) -> str:
    shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
    return next((device.platform for s in shardings for device in s.device_set), "")


_USED = re.compile(r"Used ([0-9.]+)([KMGT]?) of")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def peak_of(compile: Callable[[], jax.stages.Compiled]) -> float:
    """Bytes per device that a program needs, as compiled; infinity for more than the compiler has, if it does not say
    how much."""
    try:
        return CompiledMemory.of(compile()).peak
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return used(error)


def used(error: jax.errors.JaxRuntimeError) -> float:
    """Bytes that a program needs, where it was refused for that, else infinity.

    XLA:TPU says "Ran out of memory in memory space hbm. Used 21.43G of 15.75G hbm".
    """
    found = _USED.search(str(error))
    return float(found[1]) * _UNITS[found[2]] if found else math.inf


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of the program.

    **Fields:** `collectives`; `differences`: one line for each kind and axes whose total bytes are not the planned
    ones; `account`: the rewrites that make up the difference, and what none of them explains; `memory`; `cycles` of
    compute and `seconds` they take, by XLA:TPU's own estimate (None on other platforms).
    """

    collectives: tuple[Collective, ...]
    differences: tuple[str, ...]
    account: Account
    memory: CompiledMemory
    cycles: Cycles | None
    seconds: float | None

    @staticmethod
    def of(
        program: jax.stages.Compiled,
        planned: Sequence[tuple[Collective, int]],
        axes: MeshAxes,
        repeated: Sequence[Collective],
        clock: float | None,
    ) -> Compiled:
        """Read a compiled program.

        **Arguments:** `planned`: the collectives of the plan, each with how often it runs in a step; `repeated`: those
        that compute what another one computes (`duplicates`); `clock`: cycles per second of a TPU.
        """
        module = parse(program.as_text() or "")
        found = tuple(module_collectives(module, axes))
        cycles = estimated_cycles(with_schedules(module, schedules(module))) if clock else None
        return Compiled(
            collectives=found,
            differences=tuple(bytes_difference([c for c, _ in planned], found)),
            account=account(planned, module, axes, repeated),
            memory=CompiledMemory.of(program),
            cycles=cycles,
            seconds=cycles.total / clock if cycles and clock else None,
        )
