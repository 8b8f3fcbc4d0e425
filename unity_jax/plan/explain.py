"""Why a plan is as it is: for a leaf the layouts that were rejected and by how much, for an op its rule and moves.

    print(plan.explain("['w1']"))
    [0]['w1']: f32[8,16@x], 64 B per device
      read by dot_general at step.py:21:19 (mlp_loss)
      instead f32[8@x,16]: 1.24x the time (116 us), peak 7 KiB
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator

from unity_jax.cost.program import local_bytes
from unity_jax.network.reshard import Resharder
from unity_jax.ops.rule import REDUCTIONS, Shard
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.parallel import Shift
from unity_jax.plan.value import Leaf, PlanValue
from unity_jax.residuals.record import Recompute, Saving
from unity_jax.rewrite.library import searched
from unity_jax.rewrite.record import Rewrite
from unity_jax.search.candidate import Pins
from unity_jax.search.packing import pinned
from unity_jax.search.planner import Planner
from unity_jax.search.sample import storable
from unity_jax.text import seconds, short_source, size

ALTERNATIVES = 6  # other layouts tried per leaf, each by a search of its own
LEAVES = 3  # leaves whose alternatives are tried
OPS = 20
READERS = 3


def explain(plan: PlanValue, pattern: str) -> str:
    """Text about every argument leaf whose path matches, every rewrite whose rule or `file:line` does, every saving of
    memory whose name or `file:line` does, and every op whose scope, primitive or `file:line` does.

    **Raises:** `ValueError` if nothing matches, `PlanError` for a loaded plan that has not met its function.
    """
    plan.bound()
    leaves = [i for i, leaf in enumerate(plan.inputs) if _matches(leaf.path, pattern)]
    lines: list[str] = []
    for n, i in enumerate(leaves):
        lines += _leaf(plan, i)
        if n < LEAVES:
            lines += _alternatives(plan, i)
    if len(leaves) > LEAVES:
        lines.append(
            f"(alternatives are tried for {LEAVES} leaves at a time: narrow the pattern for those of the others)"
        )
    lines += [str(done) for done in plan.implementations if _matches(f"{done.name} {done.where}", pattern)]
    for done in plan.rewrites:
        if _matches(done.rule, pattern) or _matches(done.where, pattern):
            lines += _rewrite(done)
    lines += [_saving(how) for how in plan.saving if _matches(f"{how.name} {how.where}", pattern)]
    lines += _ops(plan.pcg, pattern)
    if not lines:
        raise ValueError(
            f"no argument and no op of {plan.function} matches {pattern!r}; paths look like {_some(plan.inputs)}"
        )
    return "\n".join(lines) + "\n"


def _some(leaves: Iterable[Leaf]) -> str:
    return ", ".join(leaf.path for leaf, _ in zip(leaves, range(3), strict=False)) or "(no arguments)"


# Leaves


def _leaf(plan: PlanValue, index: int) -> Iterator[str]:
    leaf, tensor = plan.inputs[index], plan.bound().graph.inputs[index]
    yield f"{leaf.path}: {leaf}, {size(leaf.bytes)} per device" + (", pinned" if tensor in plan.pins.tensors else "")
    for (packing, places), layout in plan.wholes:
        if index in places:
            others = ", ".join(plan.inputs[i].path for i in places if i != index)
            yield f"  held from step to step with {others} as one {layout.typeof(packing.shape, leaf.dtype)}"
    readers = [op for op in plan.bound().graph.walk() if tensor in op.inputs]
    for op in readers[:READERS]:
        yield f"  read by {op.label} at {short_source(op.source)}"
    if len(readers) > READERS:
        yield f"  and by {len(readers) - READERS} more"


def _alternatives(plan: PlanValue, index: int) -> Iterator[str]:
    """The best plan with the leaf in each other layout, against this plan."""
    program, pins, machine = plan.bound(), plan.pins, plan.priced_on
    leaf, tensor, axes = plan.inputs[index], program.graph.inputs[index], plan.axes
    assert machine is not None and plan.stored is not None
    if plan.packed and not any(index in p.inputs for p in plan.packed):  # what is pinned is not packed
        program, pins = plan.stored, pinned(pins, plan.stored, [layout for _, layout in plan.wholes])
    if tensor in plan.pins.tensors:
        return
    resharder = Resharder(machine, axes)

    def guess(layout: Layout) -> float:
        return float(resharder.table(tensor.shape, tensor.dtype, (layout, leaf.layout))[0, -1])

    others = sorted((x for x in storable(tensor, axes) if x != leaf.layout), key=guess)
    if not others:
        yield "  no other layout: its dimensions do not divide"
    for layout in others[:ALTERNATIVES]:
        wanted = Pins({**pins.tensors, tensor: layout}, pins.outputs)
        found = Planner(program, machine, plan.within, wanted).plan([axes])
        verdict = _verdict(plan, found.seconds, found.memory.peak_bytes)
        yield f"  instead {layout.typeof(tensor.shape, tensor.dtype)}: {verdict}"
    if len(others) > ALTERNATIVES:
        yield f"  and {len(others) - ALTERNATIVES} more layouts, not tried"


def _verdict(plan: PlanValue, step: float, peak: int) -> str:
    """`1.24x the time (116 us), DOES NOT FIT (3 GiB)`"""
    mine = plan.predicted.step_seconds
    ratio = step / mine if mine else 1.0
    words = "as fast" if abs(ratio - 1) < 5e-3 else f"{ratio:.3g}x the time" if ratio > 1 else f"{1 - ratio:.1%} faster"
    memory = f"peak {size(peak)}" if peak <= plan.within else f"DOES NOT FIT ({size(peak)})"
    return f"{words} ({seconds(step)}), {memory}"


# Rewrites


def _rewrite(done: Rewrite) -> Iterator[str]:
    """The rule as two programs, and everything that followed from it."""
    yield f"rewritten: {done}"
    rules = {rule.name: rule for rule in searched()}
    if done.rule in rules:
        yield from (f"  {line}" for line in str(rules[done.rule]).split("\n"))
    if len(done.steps) > 1:
        yield "  then " + ", ".join(f"{step.rule} x{len(step.spots)}" for _, step in done.steps[1:])


def _saving(how: Saving) -> str:
    """What it gives, and what it takes."""
    takes = f", which takes {seconds(how.seconds)}" if isinstance(how, Recompute) else ""
    return f"{how.effect}: {how}{takes}"


# Ops


def _ops(graph: Graph, pattern: str) -> Iterator[str]:
    found: dict[tuple[str, ...], int] = {}
    for op, around in _with_moves(graph):
        if op.shard is None or _is_of_ring(op):
            continue
        if any(_matches(text, pattern) for text in (op.scope, op.name, op.source)):
            entry = tuple(_op(op, op.shard, around))
            found[entry] = found.get(entry, 0) + 1
    for entry, count in list(found.items())[:OPS]:
        yield entry[0] + (f"  ({count} times)" if count > 1 else "")
        yield from entry[1:]
    if len(found) > OPS:
        yield f"and {len(found) - OPS} more ops: narrow the pattern"


def _with_moves(graph: Graph) -> Iterator[tuple[Op, list[tuple[str, Op]]]]:
    """Every op with the collectives that bring its operands and take its results."""
    for op in graph.ops:
        for body in op.bodies:
            yield from _with_moves(body)
        before = [("before", m) for t in op.inputs for m in reversed(list(_chain(t, graph)))]
        after = [("after", m) for t in op.outputs for m in _movers(t, graph)]
        yield op, [(when, m) for when, m in before + after if m.move and m.move.collective]


def _is_of_ring(op: Op) -> bool:
    """Whether it puts together what the partial contractions of a ring make."""
    return op.shard is not None and op.traced is None


def _movers(tensor: Tensor, graph: Graph) -> Iterator[Op]:
    """The moves that read a tensor, or what a ring makes of it."""
    for op in graph.readers.get(tensor, ()):
        if op.move is not None:
            yield op
        elif op.name == "optimization_barrier":
            yield from _movers(op.outputs[op.inputs.index(tensor)], graph)
        elif _is_of_ring(op):
            yield from _movers(op.outputs[0], graph)


def _chain(tensor: Tensor, graph: Graph) -> Iterator[Op]:
    """The moves that made a tensor, last first; of the passes of a ring the last."""
    maker = graph.producer.get(tensor)
    if maker is not None and maker.name == "optimization_barrier":
        yield from _chain(maker.inputs[maker.outputs.index(tensor)], graph)
    elif maker is not None and maker.move is not None:
        yield maker
        if not isinstance(maker.move, Shift):
            yield from _chain(maker.inputs[0], graph)


def _op(op: Op, shard: Shard, around: list[tuple[str, Op]]) -> Iterator[str]:
    yield f"{op.label} at {short_source(op.source)}"
    yield f"  rule {shard.rule}" + ("; replicated, for want of a rule" if shard.rule.fallback else "")
    yield f"  {_strategy(shard)}"
    yield "  " + ", ".join(map(str, op.inputs)) + " -> " + ", ".join(map(str, op.outputs))
    for when, by in around:
        assert by.move is not None
        kind, axes = by.move.collective, ",".join(by.move.axes)
        nbytes = max(local_bytes(t, shard.mesh) for t in (*by.inputs, *by.outputs))
        of = f" of a decomposed {by.move.of}" if isinstance(by.move, Shift) else ""
        yield f"  {when}: {kind} over {axes}{of}, {size(nbytes)}: {by.inputs[0]} -> {by.outputs[0]}"
    if shard.rule.inner is not None:
        for c in shard.rule.inner(shard):
            yield f"  inside: {c.kind} over {','.join(c.axes)}, {size(c.bytes)}"


def _strategy(shard: Shard) -> str:
    """`x splits i (8 of 64 elements), y splits k and leaves partial sums`"""
    if shard.rule.fixed is not None:
        return "laid out as the user's code says"
    words = []
    factors = shard.rule.factors
    for axis, choice, ways in zip(shard.mesh.names, shard.strategy, shard.mesh.sizes, strict=True):
        if ways == 1:
            continue
        if choice < 0:
            words.append(f"{axis} computes copies")
        elif choice >= len(factors):
            words.append(f"{axis} carries partial sums through")
        else:
            f = factors[choice]
            left = f" and leaves partial {f.kind}s" if f.kind in REDUCTIONS else ""
            left = " and exchanges borders" if f.kind == "halo" else left
            words.append(f"{axis} splits {f.label} ({shard.local_size(choice)} of {f.size}){left}")
    return ", ".join(words) or "on one device"


def _matches(text: str, pattern: str) -> bool:
    """Whether a pattern is part of a text; `*` and `?` as in a shell."""
    if any(c in pattern for c in "*?"):
        return fnmatch.fnmatchcase(text, pattern) or fnmatch.fnmatchcase(text, f"*{pattern}*")
    return pattern in text
