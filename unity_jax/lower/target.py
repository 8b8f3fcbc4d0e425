"""What a compiler needs of a lowered program that others do not: one row per platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from dataclasses import dataclass

from unity_jax.lower.fills import filled_late
from unity_jax.ops.bags import SCATTER
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan
from unity_jax.xla.op_classes import is_zero


@dataclass(frozen=True)
class Target:
    """**Fields:** `ordered`: collectives wait for each other by data (`lower.order`); `row_major`: primitives whose
    operands and results lie with the last dimension innermost (`in_rows`); `separate`: primitives whose results no
    kernel takes in together with what they were computed from (`separated`); `hoists`: what a loop broadcasts of its
    constants stands before it (`hoisted`); `fills`: loops fill what they write into when they begin (`lower.fills`)."""

    ordered: bool = False
    hoists: bool = False
    fills: bool = False
    row_major: frozenset[str] = frozenset()
    separate: frozenset[str] = frozenset()

    def suited(self, graph: Graph) -> Graph:
        """The same program as this platform's compiler should get it."""
        graph = in_rows(separated(unmasked(graph), self.separate), self.row_major)
        graph = hoisted(graph) if self.hoists else graph
        return filled_late(graph) if self.fills else graph


TARGETS = {
    # XLA:CPU gives an fft any layout that its readers would like (an all-gather, one with the gathered dimension
    # outermost), and then fails on it when it runs: a RET_CHECK in fft_thunk.cc, in JAX 0.10 to 0.12.
    "cpu": Target(ordered=True, row_major=frozenset({"fft"})),
    "gpu": Target(fills=True),
    # XLA:TPU makes one kernel of `exp(x - max(x))` over a row, a softmax: the maximum becomes a window as long as two
    # rows, `x` and the exponentials are kept in float32. Apart, the maximum is an output of the kernel that makes `x`,
    # which is kept in its own precision, and its readers compute the exponentials themselves. Attention over 4,096
    # positions in bfloat16 on v5e: 8.9 ms and 0.79 GiB of temporaries, 12.1 ms and 1.07 GiB as one kernel; over 512
    # positions 1.36 ms, not 1.43 (the compiler's estimates; `experiments/validation/against_jit.py`).
    # Of a causal mask in a loop XLA:TPU makes no array, whether it is broadcast in it or before it, but inside it may
    # give another layout to what is computed of it, and copy that: a state-space model with chunks of 128 positions on
    # v5e takes 47.4 ms with masks broadcast inside, 42.5 ms with masks from before, and as much memory.
    "tpu": Target(separate=frozenset({"reduce_max"}), hoists=True),
}
"""Other platforms need nothing."""


def target(platform: str) -> Target:
    return TARGETS.get(platform, Target())


def separated(graph: Graph, names: Set[str]) -> Graph:
    """The same program, with an `optimization_barrier` behind every result of primitives of these names."""

    def apart(op: Op) -> list[Op]:
        raw = tuple(dataclasses.replace(t) for t in op.outputs)
        return [dataclasses.replace(op, outputs=raw), _passing("optimization_barrier", raw, op.outputs, op)]

    return _rewritten(graph, names, apart)


def in_rows(graph: Graph, names: Set[str]) -> Graph:
    """The same program, with a `layout_constraint` on every operand and result of primitives of these names."""

    def constrained(op: Op) -> list[Op]:
        ins, outs = (tuple(dataclasses.replace(t) for t in tensors) for tensors in (op.inputs, op.outputs))
        fixed = dataclasses.replace(op, inputs=ins, outputs=outs)
        before = _passing("layout_constraint", op.inputs, ins, op)
        return [before, fixed, _passing("layout_constraint", outs, op.outputs, op)]

    return _rewritten(graph, names, constrained)


def unmasked(graph: Graph) -> Graph:
    """The same program, with zeros that scatters add to as they are on every device.

    What is shared out as terms of a sum is added to its operand on one device, and to zeros on the others. Where the
    operand is zeros too, masks only hide that from XLA, which adds what is scattered into zeros and then added to an
    array to that array at once.
    """
    zeros: set[Tensor] = set()
    for op in graph.walk():
        if is_zero(op) or (op.move is not None and zeros.issuperset(op.inputs)):
            zeros.update(op.outputs)

    def bare(op: Op) -> list[Op]:
        shard = op.shard
        if shard is not None and op.inputs[0] in zeros:
            op = dataclasses.replace(op, shard=dataclasses.replace(shard, onto_zeros=True))
        return [op]

    return _rewritten(graph, {"scatter-add", "scatter-sub", SCATTER}, bare)


def _passing(name: str, values: tuple[Tensor, ...], passed: tuple[Tensor, ...], of: Op) -> Op:
    """What passes values on unchanged, for the sake of an op."""
    return Op(name, values, passed, eqn=of.eqn, callers=of.callers, backward=of.backward)


def _rewritten(graph: Graph, names: Set[str], rewrite: Callable[[Op], list[Op]]) -> Graph:
    """The program with every op of these names rewritten, those of loops and branches too."""
    if not any(op.name in names for op in graph.walk()):
        return graph
    ops: list[Op] = []
    for op in graph.ops:
        op = dataclasses.replace(op, bodies=tuple(_rewritten(body, names, rewrite) for body in op.bodies))
        ops += rewrite(op) if op.name in names else [op]
    return Graph(graph.inputs, graph.outputs, ops)


def hoisted(graph: Graph) -> Graph:
    """The same program, with every broadcast of a constant of a `scan` before it. That undoes
    `pcg.simplify.sink_broadcasts`, for which the compilers keep none of these arrays in memory, as indeed they do."""
    ops: list[Op] = []
    for op in graph.ops:
        op = dataclasses.replace(op, bodies=tuple(map(hoisted, op.bodies)))
        before, op = _hoisted(op) if op.name == "scan" else ([], op)
        ops += [*before, op]
    return Graph(graph.inputs, graph.outputs, ops)


def _hoisted(scan: Op) -> tuple[list[Op], Op]:
    """The broadcasts that a scan need not do, and the scan without them."""
    roles, (body,) = Scan.of(scan.params), scan.bodies
    outer = dict(zip(body.inputs[roles.constants], scan.inputs[roles.constants], strict=True))
    lifted = {op for op in body.ops if op.name == "broadcast_in_dim" and set(op.inputs) <= outer.keys()}
    if not lifted:
        return [], scan
    left = [op for op in body.ops if op not in lifted]
    read = {t for op in left for t in op.inputs}.union(body.outputs)
    consts = {t: made for t, made in outer.items() if t in read}
    before: list[Op] = []
    for op in body.ops:
        if op in lifted:
            made: Tensor = dataclasses.replace(op.outputs[0])
            before.append(dataclasses.replace(op, inputs=tuple(outer[t] for t in op.inputs), outputs=(made,)))
            consts[op.outputs[0]] = made
    changing = slice(roles.carried.start, None)
    inner = Graph((*consts, *body.inputs[changing]), body.outputs, left)
    params = roles.with_constants(scan.params, len(consts))
    inputs = (*consts.values(), *scan.inputs[changing])
    return before, dataclasses.replace(scan, inputs=inputs, params=params, bodies=(inner,))
