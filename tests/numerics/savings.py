"""What may make a program need less memory, drawn at random: each way alone, and one upon another.

    case = saved(Case.of(step, args, donate=(0,)), random.Random(0))
    case.program.savings                    # such as: recomputes 3 values; 4 microbatches

Any values of the forward pass may be computed again, any array may be the one that a loss is chunked around, any
dimensions of arguments may be rows, in any number of parts, and any state, or what layers stack, may be on the host:
what a `Saving` cannot do it refuses. What a plan file holds of each is read back before it is done.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable

from tests.numerics.harness import Case
from unity_jax.pcg.graph import Graph, trips
from unity_jax.program import Program
from unity_jax.residuals.change import positions
from unity_jax.residuals.choice import Choice
from unity_jax.residuals.pair import pairs, stacked
from unity_jax.residuals.ranges import Layers, cut
from unity_jax.residuals.recompute import can_repeat
from unity_jax.residuals.record import Chunk, Microbatch, Offload, Recompute, Saving, Spill, from_json, to_json
from unity_jax.search.batch import batch_dims
from unity_jax.search.rule_cache import RuleCache

COMPILERS = ("gpu", "tpu", "cpu")
FEW = 4
"""Scans over fewer layers are not cut."""

TRIES = 12
"""How many arrays or dimensions are tried until one may be cut."""


def saved(case: Case, rng: random.Random) -> Case:
    """The same function, by a program with random savings: as a rule in the order in which the planner makes them."""
    program = case.program
    ways = [way for way in WAYS if rng.random() < 0.6] or list(WAYS)
    if rng.random() < 0.3:
        rng.shuffle(ways)
    for way in ways:
        program = way(program, rng) or program
    if not program.savings:
        program = next((made for way in WAYS if (made := way(program, rng)) is not None), program)
    return Case(program, case.flat, case.want)


def recomputing(program: Program, rng: random.Random) -> Program | None:
    """Some of the values that the backward pass reads, and of those between them, computed again; those of layers that
    a scan stacks, too; of all layers, or of the first ones other values than of the rest."""
    layers, graph = _apart(program, rng)
    inside = [op for pair in pairs(graph) for op in pair.forward.bodies[0].ops]
    values = [t for op in (*graph.ops, *inside) if not op.backward and can_repeat(op) for t in op.outputs]
    read = {t for op in graph.ops if op.backward for t in op.inputs}
    read |= {t for pair in pairs(graph) for t in pair.same.values()}
    share = rng.choice((0.1, 0.4, 0.8, 1.0))
    freed = frozenset(t for t in values if rng.random() < share)
    if freed.isdisjoint(read):
        return None
    how = Recompute.of(graph, Choice(dict.fromkeys(freed, 1), freed, 0.0, 0.0), rng.choice(COMPILERS), 0.0)
    return _done(program, dataclasses.replace(how, layers=layers))


def chunking(program: Program, rng: random.Random) -> Program | None:
    """The ops around an array, within a loop too, or around all that are alike, by chunks of one of its dimensions."""
    graph = program.graph
    seeds = [t for op in graph.walk() for t in op.outputs if any(n > 1 for n in t.shape)]
    seeds.sort(key=lambda t: -t.nbytes)

    def drawn() -> Saving:
        seed = seeds[int(len(seeds) * rng.random() ** 3)]  # rather a large one
        dim = rng.randrange(seed.rank)
        alike = [t for t in seeds if t.shape == seed.shape and t.dtype == seed.dtype]
        places = positions(graph, alike if rng.random() < 0.5 else [seed])
        return Chunk(places, dim, _parts(rng, seed.shape[dim]), "", 0)

    return _first(program, drawn) if seeds else None


def microbatching(program: Program, rng: random.Random) -> Program | None:
    """Forward and backward by microbatches: of the rows of the batch, or of dimensions of some arguments."""
    graph = program.graph
    found = batch_dims(program, RuleCache(), 8)
    rows = [(i, d) for i, t in enumerate(graph.inputs) for d in range(t.rank) if found.get((t, d)) == 1]
    others = [(i, d) for i, t in enumerate(graph.inputs) for d in range(t.rank) if t.shape[d] > 1]

    def drawn() -> Saving:
        arguments = rows
        if not rows or rng.random() < 0.3:
            size = _size(graph, rng.choice(others))
            arguments = [at for at in others if _size(graph, at) == size]
            arguments = rng.sample(arguments, rng.randint(1, min(3, len(arguments))))
            arguments = sorted({i: (i, d) for i, d in arguments}.values())
        size = _size(graph, arguments[0])
        return Microbatch(tuple(arguments), _parts(rng, size), size)

    return _first(program, drawn) if others else None


def hosting(program: Program, rng: random.Random) -> Program | None:
    """Some state on the host from step to step, as it is or updated layer by layer."""
    hosted = tuple(i for i in sorted({*program.ties.values()} - program.hosted) if rng.random() < 0.3)
    how = Offload(hosted, rng.random() < 0.5, len(hosted), 0, 0.0, 0.0)
    return _done(program, how) if hosted else None


def spilling(program: Program, rng: random.Random) -> Program | None:
    """Some of what layers stack for the backward pass on the host until that."""
    layers, graph = _apart(program, rng)
    found = [t for t in stacked(graph) if t not in program.spilled and rng.random() < 0.7]
    how = Spill(positions(graph, found), "", len(found), 0, 0.0, exposed=0.0, layers=layers)
    return _done(program, how) if found else None


WAYS = (chunking, recomputing, microbatching, hosting, spilling)


def _apart(program: Program, rng: random.Random) -> tuple[Layers | None, Graph]:
    """The graph of a program, or that with the first layers of its scans apart."""
    counts = [trips(pair.forward) for pair in pairs(program.graph)]
    if max(counts, default=0) < FEW or rng.random() < 0.5:
        return None, program.graph
    layers = Layers(rng.randint(1, max(counts) - 1), max(counts))
    return layers, cut(program.graph, layers).graph


def _size(graph: Graph, at: tuple[int, int]) -> int:
    i, d = at
    return graph.inputs[i].shape[d]


def _parts(rng: random.Random, size: int) -> int:
    """A number of parts that divides, or now and then one that may not."""
    divides = [n for n in range(2, size + 1) if size % n == 0]
    return rng.choice(divides or [2]) if rng.random() < 0.9 else rng.randint(2, 5)


def _first(program: Program, drawn: Callable[[], Saving]) -> Program | None:
    tried = (_done(program, drawn()) for _ in range(TRIES))
    return next((made for made in tried if made is not None), None)


def _done(program: Program, how: Saving) -> Program | None:
    """The program so changed, from what a plan file says of it; None where it is refused."""
    how = from_json(json.loads(json.dumps(to_json(how))))
    try:
        return program.saving(how.applied(program.graph), how)
    except LookupError:
        return None
