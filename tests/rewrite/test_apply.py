"""Rewritten graphs compute the same, at every place, for every rule of the library; steps can be done again."""

import random

import jax
import numpy as np
import pytest

from tests.numerics.harness import errors
from tests.rewrite.steps import STEPS
from unity_jax import _compat
from unity_jax.pcg.graph import nested
from unity_jax.pcg.loops import Scan
from unity_jax.program import trace
from unity_jax.rewrite.estimate import Seconds
from unity_jax.rewrite.library import applicable
from unity_jax.rewrite.record import Rewrite, replay, with_graph
from unity_jax.rewrite.sites import Finder, fingerprint, rewrite

RULES = applicable()


def evaluate(graph, arrays):
    """The results of a graph, op by op."""
    env = dict(zip(graph.inputs, arrays, strict=True))

    def read(t):
        return np.asarray(t.literal, t.dtype) if t.literal is not None else env[t]

    for op in graph.ops:
        operands = [read(t) for t in op.inputs]
        found = _scan(op, operands) if op.name == "scan" else _compat.bind(op.eqn, operands, op.params)
        env.update(zip(op.outputs, found, strict=True))
    return [read(t) for t in graph.outputs]


def _scan(op, operands):
    roles, (body,) = Scan.of(op.params), op.bodies
    consts, carry, stacks = operands[roles.constants], operands[roles.carried], operands[roles.sliced]

    def step(carry, slices):
        out = evaluate(body, [*consts, *carry, *slices])
        return out[roles.last], out[roles.stacked]

    carry, ys = jax.lax.scan(step, list(carry), list(stacks), op.params["length"], op.params["reverse"])
    return [*carry, *ys]


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def program_of(name):
    step, arguments = STEPS[name]
    args = arguments()
    return trace(step, args, {}), jax.tree.leaves(args), jax.tree.leaves(step(*args))


@pytest.mark.parametrize("name", STEPS)
def test_every_place(name):
    program, arrays, want = program_of(name)
    fired = set()
    for path, graph, _ in nested(program.graph):
        finder = Finder(graph, lambda graph: Seconds(1.0))
        for place in finder.places(RULES):
            made = rewrite(finder, place)
            if made is None:
                continue
            got = evaluate(with_graph(program.graph, path, made[0]), arrays)
            bad = [e for e in errors(program.out_paths, want, got) if not e.error < 1e-10]
            assert not bad, f"{place.rule}\n{bad}\n{graph}\n{made[0]}"
            fired.add(place.rule.name)
    assert fired


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("seed", range(3))
def test_many_steps_one_after_the_other_and_again(name, seed):
    program, arrays, want = program_of(name)
    rng, graph, done = random.Random(seed), program.graph, []
    for _ in range(6):
        path, inner, _ = rng.choice(list(nested(graph)))
        finder = Finder(inner, lambda graph: Seconds(1.0))
        places = list(finder.places(RULES))
        made = rewrite(finder, rng.choice(places)) if places else None
        if made is not None:
            graph = with_graph(graph, path, made[0])
            done.append((path, made[2]))
    bad = [e for e in errors(program.out_paths, want, evaluate(graph, arrays)) if not e.error < 1e-9]
    assert not bad, f"{done}\n{bad}\n{graph}"
    record = Rewrite("several", "", len(done), 0.0, "", tuple(done))
    assert Rewrite.from_json(record.to_json()) == record
    again, known = replay(program_of(name)[0].graph, [record], RULES), {}
    assert fingerprint(again, known) == fingerprint(graph, known)


@pytest.mark.parametrize("name", STEPS)
def test_what_was_in_vain_before_is_so_again(name):
    """With what was tried in vain in the graphs before, the places that save ops are those without it."""

    def count(graph):
        return Seconds(float(len(graph.ops)))

    rng, graph, vain = random.Random(0), program_of(name)[0].graph, {}
    for _ in range(4):
        found = [p.spots for p in Finder(graph, count).places(RULES, least=0.0, vain=vain)]
        assert found == [p.spots for p in Finder(graph, count).places(RULES, least=0.0, vain={})]
        finder = Finder(graph, count)
        places = list(finder.places(RULES))
        made = rewrite(finder, rng.choice(places)) if places else None
        graph = graph if made is None else made[0]
