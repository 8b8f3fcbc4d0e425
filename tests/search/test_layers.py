"""Within a limit that lies between what all layers need with more and with less computed again, as few layers do so as
it takes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import models
import unity_jax as unity
from tests.residuals import steps
from tests.residuals.test_pair import mlp, stack
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.residuals.ranges import START
from unity_jax.residuals.record import Keep, Microbatch, Recompute
from unity_jax.search import recomputing as recomputing_module
from unity_jax.search.candidate import sparing
from unity_jax.search.following import followed
from unity_jax.search.in_layers import TOLD, by_layers, in_layers
from unity_jax.search.planner import Planner
from unity_jax.search.recomputing import keeping, recomputable
from unity_jax.search.saving import microbatches

OPTIONS = unity.Options(cache=None)
X = MeshAxes(("x",), (8,))


def candidate(needs, seconds, count):
    """What a search for layers asks of a plan."""
    return SimpleNamespace(
        seconds=seconds,
        memory=SimpleNamespace(peak_bytes=needs),
        fits=lambda limit: needs <= limit,
        program=SimpleNamespace(parts=SimpleNamespace(count=count), savings=()),
    )


@given(st.integers(2, 96), st.floats(0.01, 0.99), st.floats(0.3, 3.0), st.floats(0.0, 0.2))
def test_the_fewest_layers_are_found_in_few_tries(count, share, bend, jump):
    """Whatever they need, as long as it is less and less: not quite linear, and more when the first is apart."""
    ends = [(100.0, 1.0), (40.0, 2.0)]

    def needs(k):
        return 40 + 60 * ((count - k) / count) ** bend + 60 * jump * (0 < k < count)

    limit = 40 + 60 * share
    start, most = (candidate(*end, count) for end in ends)
    tried = {}

    def make(_, __, layers):
        tried[layers.first] = candidate(needs(layers.first), 1 + layers.first / count, count)
        return tried[layers.first]

    list(by_layers(start, [{1}], {-1: start, 0: most}, make, limit, math.inf))
    fits = [k for k in range(1, count) if needs(k) <= limit]
    assert min((k for k in tried if k in fits), default=count) == min(fits, default=count)
    assert len(tried) <= 1 + TOLD + math.log2(count)


def test_less_is_what_saves_most_for_its_bytes():
    """Of two ways that compute less and do not fit, the one whose line to what fits is below at the limit."""
    least, steep, flat = candidate(60.0, 2.0, 24), candidate(200.0, 0.5, 24), candidate(90.0, 1.9, 24)
    tried = []

    def make(less, more, layers):
        tried.append((less, more))
        part = layers.first / 24
        return candidate(60 + 140 * (1 - part), 0.5 + 1.5 * part, 24)

    list(by_layers(least, [{1}, {1, 2}, {1, 2, 3}], {0: steep, 1: flat, 2: least}, make, 75.0, 2.0))
    assert set(tried) == {(0, 2)}


def test_nothing_is_tried_that_cannot_be_the_fastest():
    start, most = candidate(100.0, 1.0, 24), candidate(40.0, 2.0, 24)
    assert not list(by_layers(start, [{1}], {-1: start, 0: most}, None, 70.0, fastest=1.4))


def offline(step, *args, limit=None):
    return unity.plan(step, *args, machine="h100:8", memory_limit=limit, donate_argnums=0, options=OPTIONS)


@pytest.fixture
def in_one(monkeypatch):
    """Neither by microbatches nor by chunks."""
    monkeypatch.setattr("unity_jax.search.saving._batch", lambda *_: None)
    monkeypatch.setattr("unity_jax.search.chunking._chunked", lambda *_: ())


@pytest.mark.usefixtures("in_one")
def test_as_few_unrolled_layers_compute_again_as_it_takes(tmp_path):
    """It is planned folded, with the first layers apart; in the whole the others keep more."""
    step, args = steps.sgd(steps.mlp), (steps.parameters(8, 64, 512), steps.batch(4096, 64))
    limit = 0.9 * offline(step, *args).predicted.peak_bytes
    tried = (offline(step, *args, limit=f * limit) for f in (0.7, 0.65, 0.6, 0.55, 0.5, 0.45))
    found = next(now for now in tried if now.saving[0].layers)
    (how,) = found.saving
    assert isinstance(how, Recompute) and found.fits
    assert 0 < how.layers.first < how.layers.of == 8 and f"more in {how.layers}" in str(found)
    found.save(tmp_path / "plan.json")
    again = unity.Plan.load(tmp_path / "plan.json")
    assert again.saving == found.saving


def start_of(step, *args):
    of = trace(step, args, {}, donate_argnums=0)
    planner = Planner(of, Machine.preset("h100:8"))
    return planner, planner.sketch([X])[0]


def test_of_a_scan_ever_more_layers_need_ever_less():
    params, x = steps.parameters(6, 1024, 4096), jax.ShapeDtypeStruct((32768, 1024), np.float32)
    planner, start = start_of(steps.sgd(mlp), stack(params), x)
    (*_, most) = recomputable(start)
    all_of_them = followed(start, [most], planner.following)
    limit = (start.memory.peak_bytes + all_of_them.memory.peak_bytes) / 2
    slower = all_of_them.noting()
    slower.__dict__["timeline"] = start.timeline  # as if computing again took time: here stacking takes more
    made = list(in_layers(start, [most], {0: slower}, planner.following, limit, math.inf))
    assert not made  # what is not slower is done in all layers
    slower.__dict__["timeline"] = SimpleNamespace(step_seconds=2 * start.seconds)

    def follow(*form):
        now = planner.following(*form)
        part = now.program.savings[0].layers.first / 6
        now.__dict__["timeline"] = SimpleNamespace(step_seconds=(1 + part) * start.seconds)
        return now

    made = list(in_layers(start, [most], {0: slower}, follow, limit, math.inf))
    firsts = [now.program.savings[0].layers.first for now in made]
    assert made and all(0 < k < 6 for k in firsts)
    needs = [now.memory.peak_bytes for _, now in sorted(zip(firsts, made, strict=True), key=lambda found: found[0])]
    assert needs == sorted(needs, reverse=True)
    fits = [k for k, now in zip(firsts, made, strict=True) if now.fits(limit)]
    assert fits and min(fits) - 1 in (*firsts, 0)
    for k, now in zip(firsts, made, strict=True):  # a loop of one layer would be none
        assert sum(START in op.params for op in now.graph.ops) == (4 if 1 < k < 5 else 0)


@pytest.fixture(scope="module")
def gpt():
    """A model with checkpoints, whose arithmetic takes longer than what is around it: as it is planned for its mesh."""
    model = models.get("gpt", "tiny", layers=6, hidden=1024, heads=8, length=512, batch_size=64)
    return start_of(model.train_step, model.abstract_state(), model.abstract_batch())


def test_the_last_layers_keep_what_checkpoints_would_compute_again(gpt):
    planner, start = gpt
    limit = 1.09 * start.memory.peak_bytes
    found = keeping(start, limit, planner.following)
    assert found.fits(limit) and found.seconds < start.seconds
    (how,) = found.program.savings
    assert isinstance(how, Keep) and how.layers is not None and 0 < how.layers.first < how.layers.of == 6


def test_what_is_kept_rather_leaves_memory_for_the_compiler(gpt, monkeypatch):
    planner, start = gpt
    limit, spare, made = 1.2 * start.memory.peak_bytes, 0.1 * start.memory.peak_bytes, []
    within = recomputing_module._within
    monkeypatch.setattr(recomputing_module, "_within", lambda *a: made.append(within(*a)) or made[-1])
    less = keeping(start, limit, planner.following, spare=spare)
    full, same = made
    assert not full.fits(limit - spare) and less is same and less.fits(limit - spare)
    assert full.seconds < less.seconds < start.seconds


def test_memory_is_left_unless_that_takes_too_much_time():
    fast, near, slow = candidate(10, 1.0, 1), candidate(8, 1.05, 1), candidate(6, 1.2, 1)
    assert sparing([fast, near, slow], 10, 2) is near
    assert sparing([fast, near, slow], 10, 3) is fast  # the only one that leaves it takes too long
    assert sparing([fast, near, slow], 10, 5) is fast  # none leaves it
    assert sparing([fast, near, slow], 5, 1) is slow  # none fits: the one that needs the least


def test_each_microbatch_keeps_what_there_is_memory_for(gpt):
    planner, start = gpt
    few = followed(start, [next(iter(microbatches(start)))], planner.following)
    limit = 1.2 * few.memory.peak_bytes
    found = keeping(few, limit, planner.following, microbatches)
    assert found.fits(limit) and found.seconds < few.seconds
    assert [type(how) for how in found.program.savings] == [Microbatch, Keep]
