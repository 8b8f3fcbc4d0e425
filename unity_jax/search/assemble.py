"""From decisions to the planned graph: every op split as decided, every change of layout an op of its own.

inputs w: f32[8,16@model], x: f32[32@data,8]
y: f32[32@data,16@model] = dot_general x w
z: f32[32@data]{sum:model} = reduce_sum y
z': f32[32@data] = reduce[model] z
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from unity_jax.network.reshard import Resharder
from unity_jax.ops.rule import Shard, Strategy
from unity_jax.ops.rules import is_pointwise
from unity_jax.ops.strategies import making
from unity_jax.pcg.graph import Graph, Op, Tensor, barrier, with_layout
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.loops import Scan, While
from unity_jax.pcg.parallel import SPILLED, Move
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.sums import reduced_once
from unity_jax.xla.targets import target_of


@dataclass
class Decisions:
    """What the search chooses.

    **Fields:** `strategies`: one per op without bodies; `layouts`: one per graph input, body input (constants, carries
    and slices of a loop) and result of a `scan` or `cond` that is not a carry, and for those op results that are held
    in another layout than they are made in; `outputs`: one per graph output; `keep`: whether the backward pass reuses
    what the forward pass gathered (faster) or gathers again (smaller); `rings`: the collectives that `decompose` takes
    apart, by the contraction beside each.
    """

    strategies: dict[Op, Strategy] = field(default_factory=dict)
    layouts: dict[Tensor, Layout] = field(default_factory=dict)
    outputs: tuple[Layout, ...] = ()
    keep: bool = True
    rings: frozenset[tuple[Op, int]] = frozenset()


def is_free(op: Op) -> bool:
    """Whether an op makes a tensor from nothing, so that it can be made anew in any layout (constants, iota)."""
    return op.name in ("iota", "broadcast_in_dim") and all(t.rank == 0 for t in op.inputs)


def passes_layouts(op: Op) -> bool:
    """Whether an op's results are its operands, in whatever layout they come."""
    return op.name == "optimization_barrier"


def lift(layout: Layout) -> Layout:
    """The layout of stacked values, from that of one of them."""
    return Layout(((), *layout.dims), layout.partial)


def unlift(layout: Layout) -> Layout:
    """The layout of one of the values stacked along dimension 0."""
    return Layout(layout.dims[1:], layout.partial)


def assemble(
    graph: Graph,
    decisions: Decisions,
    resharder: Resharder,
    rules: RuleCache,
    hosted: Mapping[Tensor, Sequence[int]] | None = None,
    spilled: Set[Tensor] = frozenset(),
) -> Graph:
    """The planned graph of `graph` under `decisions`.

    **Arguments:** `hosted`: the inputs in the memory of the host, each with the results that go there in its place;
    `spilled`: the stacks of scans that go there, and come back part by part.
    """
    inputs = [decisions.layouts[t] for t in graph.inputs]
    hosted = hosted or {}
    back = {i for results in hosted.values() for i in results}
    return _Assembler(decisions, resharder, rules, {*hosted}, back, spilled).run(graph, inputs, decisions.outputs)


@dataclass
class _Copy:
    tensor: Tensor
    backward: bool  # made for the backward pass
    original: bool  # as its producer holds it, or the sum of the terms that its producer holds


class _Assembler:
    """Walks one graph in program order, remembering in which layouts each tensor already exists."""

    def __init__(
        self,
        decisions: Decisions,
        resharder: Resharder,
        rules: RuleCache,
        away: set[Tensor],
        back: set[int],
        spilled: Set[Tensor],
    ) -> None:
        self.decisions, self.resharder, self.rules = decisions, resharder, rules
        self.away, self.back = away, back  # what is on the host, and nothing has read yet; results that go there
        self.spilled = spilled  # stacks, and parts of them
        self.sent: dict[Tensor, Layout] = {}  # these results
        self.copies: dict[Tensor, list[_Copy]] = {}
        self.free: dict[Tensor, Op] = {}
        self.both: set[Tensor] = set()  # read by both passes
        self.left: dict[int, Layout] = {}  # how what leaves a layer of a folded program is made
        self.between: dict[Tensor, Tensor] = {}  # what enters one, as it does all but the first; or leaves the last
        self.ops: list[Op] = []

    def run(self, graph: Graph, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Graph:
        planned = tuple(self._define(t, lay) for t, lay in zip(graph.inputs, inputs, strict=True))
        for t in self.away:
            self._home(t).on_host = True
        self.sent = {graph.outputs[i]: outputs[i] for i in self.back}
        read = [{t for op in graph.ops if op.backward == late for t in op.inputs} for late in (False, True)]
        self.both = read[0] & read[1]
        backward = bool(read[1])
        leaving = (t for op in graph.ops if op.times > 1 for t in op.outputs if t.leaves)
        self.left = {t.leaves: lay for t in leaving if (lay := self._made(graph, t)) is not None}
        for op in graph.ops:
            if self.away and op.name != "scan":
                self._bring(op.inputs, op.backward)
            if is_free(op):
                self.free.update((t, op) for t in op.outputs)
            elif passes_layouts(op):
                operands = [self._home(t) for t in self._inputs(op)]
                self._append(
                    op, operands, [self._define(t, h.layout) for t, h in zip(op.outputs, operands, strict=True)]
                )
            elif op.bodies:
                _CONTROL[op.name](self, op)
            else:
                self._compute(op)
        self._bring([t for i, t in enumerate(graph.outputs) if i not in self.back], backward)
        results = [self._fetch(t, lay, backward) for t, lay in zip(graph.outputs, outputs, strict=True)]
        for i in sorted(self.back):
            if not results[i].on_host:  # as it came, or from a loop
                results[i] = self._copied("to_host", results[i], backward)
        return reduced_once(Graph(planned, tuple(results), self.ops), self.rules, self.resharder.mesh)

    def _bring(self, tensors: Sequence[Tensor], backward: bool) -> None:
        """Copy what is still on the host to the device."""
        for t in dict.fromkeys(t for t in tensors if t in self.away):
            self.away.remove(t)
            self.copies[t] = [_Copy(self._copied("from_host", self._home(t), backward, t in self.spilled), False, True)]

    def _copied(self, kind: str, t: Tensor, backward: bool, spilled: bool = False) -> Tensor:
        """A tensor from the host or on it. **Arguments:** `spilled`: it is part of a stack that the step made."""
        assert t.layout is not None
        made, move = with_layout(t, t.layout), Move.host(kind, t.layout)
        made.on_host = kind == "to_host"
        params = {SPILLED: not target_of(self.resharder.machine.device).pipelines_copies} if spilled else {}
        self.ops.append(Op(kind, (t,), (made,), params, backward=backward, move=move))
        return made

    def body(
        self,
        graph: Graph,
        inputs: Sequence[Layout],
        outputs: Sequence[Layout],
        away: Iterable[Tensor] = (),
        back: Iterable[int] = (),
        spilled: Iterable[Tensor] = (),
    ) -> Graph:
        """The planned graph of a loop body or branch.

        **Arguments:** `away`: what is on the host; `back`: the results that go there; `spilled`: parts of stacks.
        """
        inner = _Assembler(
            self.decisions, self.resharder, self.rules, {*away}, {*back}, self.spilled | {*spilled}
        )
        return inner.run(graph, inputs, outputs)

    def _define(self, tensor: Tensor, layout: Layout | None) -> Tensor:
        assert layout is not None
        planned = with_layout(tensor, layout)
        self.copies[tensor] = [_Copy(planned, False, True)]
        return planned

    def _append(
        self,
        op: Op,
        operands: Sequence[Tensor],
        outs: Sequence[Tensor],
        bodies: tuple[Graph, ...] = (),
        shard: Shard | None = None,
    ) -> None:
        self.ops.append(
            Op(op.name, tuple(operands), tuple(outs), op.params, bodies, op.eqn, op.callers, op.backward, shard, op)
        )

    def _compute(self, op: Op) -> None:
        shard = self.rules.shard(op, self.resharder.mesh, self.decisions.strategies[op])
        operands = self.operands(op, shard.operand_layouts, self._inputs(op, shard.operand_layouts))
        outs = [self._define(t, lay) for t, lay in zip(op.outputs, shard.result_layouts, strict=True)]
        self._append(op, operands, outs, shard=shard)
        for t in op.outputs:
            held = self.decisions.layouts.get(t)
            if held is not None and held != self.copies[t][0].tensor.layout:
                self.copies[t] = [_Copy(self._fetch(t, held, op.backward), False, True)]

    def _made(self, graph: Graph, t: Tensor) -> Layout | None:
        """How a tensor is made, or held; None where no strategy says it."""
        held, op = self.decisions.layouts.get(t), graph.producer.get(t)
        if held is not None or op is None:
            return held
        if passes_layouts(op):
            return self._made(graph, op.inputs[op.outputs.index(t)])
        strategy = self.decisions.strategies.get(op)
        if strategy is None:
            return None
        return self.rules.shard(op, self.resharder.mesh, strategy).result_layouts[op.outputs.index(t)]

    def _inputs(self, op: Op, layouts: Sequence[Layout] | None = None) -> Sequence[Tensor]:
        """The operands of an op of a folded program, those in the place of others that it moves as often as it runs.

        What enters the first of the layers that one stands for is in its place in the others, too; these read what
        leaves the layer before, as that lies. What is behind the last layer reads of that alone.

        **Arguments:** `layouts`: that the op needs; None if it takes whatever comes.
        """
        if not self.left:
            return op.inputs
        found = list[Tensor]()
        for i, t in enumerate(op.inputs):
            lies = self.left.get(t.enters if op.times > 1 else t.leaves)
            is_as_needed = lies == self._home(t).layout == (lies if layouts is None else layouts[i])
            if lies is None or t.times == op.times or is_as_needed:
                found.append(t)
                continue
            if t not in self.between:
                other = self.between[t] = dataclasses.replace(t, times=op.times)
                if t in self.both:
                    self.both.add(other)
                self.ops.append(Op("copy", (self._home(t),), (self._define(other, lies),), backward=op.backward))
            found.append(self.between[t])
        return found

    def _home(self, tensor: Tensor) -> Tensor:
        if tensor in self.copies:
            return self.copies[tensor][0].tensor
        return self._fetch(tensor, Layout.replicated(tensor.rank), False)

    def operands(self, op: Op, layouts: Sequence[Layout], inputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The op's operands, or what is in their place, in the layouts it needs."""
        inputs = op.inputs if inputs is None else inputs
        if self.decisions.keep:
            return [self._fetch(t, lay, op.backward) for t, lay in zip(inputs, layouts, strict=True)]
        found: dict[int, Tensor] = {}
        tied = [
            i for i, (t, lay) in enumerate(zip(inputs, layouts, strict=True)) if self._is_repeated(t, lay, op.backward)
        ]
        for i in tied:
            beside = [j for j, t in enumerate(inputs) if j not in tied and t.rank > 0 and t.literal is None]
            if beside:
                j = max(beside, key=lambda j: inputs[j].nbytes)
                if is_pointwise(op) and inputs[i].nbytes < inputs[j].nbytes:
                    continue  # a scale or a bias; behind a barrier, the other operand would have to be in memory
                value = found.get(j) or self._fetch(inputs[j], layouts[j], op.backward)
                found[j] = self._hold_back(inputs[i], value, layouts[i], op.backward)
        for i, (t, lay) in enumerate(zip(inputs, layouts, strict=True)):
            if i not in found:
                found[i] = self._fetch(t, lay, op.backward)
        return [found[i] for i in range(len(inputs))]

    def _is_repeated(self, tensor: Tensor, layout: Layout, backward: bool) -> bool:
        """Whether this pass gathers a tensor that the other pass gathers too."""
        if tensor not in self.both or tensor not in self.copies:
            return False
        source = self._nearest(tensor, layout, backward)
        return source.original and any(m.collective for m in self._path(source.tensor, layout))

    def _hold_back(self, tensor: Tensor, value: Tensor, layout: Layout, backward: bool) -> Tensor:
        """Let a gather start only when `value`, what its consumer reads beside it, exists; returns `value` behind the
        barrier.

        XLA merges equal gathers of the two passes, and starts all forward gathers at once; both would keep every
        gathered weight alive together. A barrier over the shard and the consumer's other operand prevents it, provided
        that the consumer reads both of the barrier's results.
        """
        source = self._nearest(tensor, layout, backward).tensor
        self.ops.append(barrier((source, value), backward))
        held, passed = self.ops[-1].outputs
        self.copies[tensor].append(_Copy(held, backward, False))
        self._fetch(tensor, layout, backward, held)
        return passed

    def _nearest(self, tensor: Tensor, layout: Layout, backward: bool) -> _Copy:
        """The copy, among those that this pass may use, from which `layout` is cheapest to reach."""
        copies = self.copies[tensor]
        if copies[0].tensor.layout == layout:
            return copies[0]
        usable = [c for c in copies if c.original or self.decisions.keep or c.backward == backward]
        return usable[0] if len(usable) == 1 else min(usable, key=lambda c: self._seconds(c.tensor, layout))

    def _fetch(self, tensor: Tensor, layout: Layout, backward: bool, source: Tensor | None = None) -> Tensor:
        """`tensor` in `layout`: an existing copy, or the cheapest path from one (from `source`, if given)."""
        if tensor in self.free and (made := self._make_free(self.free[tensor], layout)) is not None:
            return made
        if tensor not in self.copies:
            replicated = Layout.replicated(tensor.rank)
            made = (
                with_layout(tensor, replicated)
                if tensor.literal is not None
                else self._make_free(self.free[tensor], replicated)
            )
            assert made is not None
            self.copies[tensor] = [_Copy(made, False, True)]
        source = source or self._nearest(tensor, layout, backward).tensor
        for move in self._path(source, layout):
            moved = with_layout(tensor, move.after)
            moved.literal = None
            self.ops.append(Op(move.kind, (source,), (moved,), backward=backward, move=move))
            # A finished sum serves both passes: two reductions in different orders could differ in their last bit,
            # and a maximum would no longer be equal to the element that it is.
            whole = self.copies[tensor][0].tensor.layout
            finished = whole is not None and bool(whole.partial) and not move.after.partial
            self.copies[tensor].append(_Copy(moved, backward, finished and bool(move.before.partial)))
            source = moved
        return source

    def _path(self, source: Tensor, layout: Layout) -> tuple[Move, ...]:
        if source.layout == layout:
            return ()
        assert source.layout is not None
        return self.resharder.path(source.shape, source.dtype, source.layout, layout)

    def _seconds(self, source: Tensor, layout: Layout) -> float:
        if source.layout == layout:
            return 0.0
        pair = (source.layout, layout)
        return float(self.resharder.table(source.shape, source.dtype, pair)[0, -1])

    def _make_free(self, op: Op, layout: Layout) -> Tensor | None:
        """A new instance of a constant, directly in `layout`; None where its op cannot make it so."""
        strategy = making(self.rules(op), self.resharder.mesh, layout)
        if layout.partial or strategy not in self.rules.strategies(op, self.resharder.mesh):
            return None
        shard = self.rules.shard(op, self.resharder.mesh, strategy)
        if shard.result_layouts[0] != layout:
            return None
        made = with_layout(op.outputs[0], layout)
        self._append(op, self.operands(op, shard.operand_layouts), [made], shard=shard)
        return made


def _scan(a: _Assembler, op: Op) -> None:
    roles, (body,) = Scan.of(op.params), op.bodies
    inner = [a.decisions.layouts[t] for t in body.inputs]
    carried = inner[roles.carried]
    ys = [a.decisions.layouts[t] for t in op.outputs[roles.stacked]]
    lie = [*inner[roles.constants], *carried, *map(lift, inner[roles.sliced])]
    # What is on the host comes part by part where it is sliced as it lies, and goes back so where it is stacked so.
    parts = list(zip(op.inputs, body.inputs, lie, strict=True))
    away = {x: t for t, x, lay in parts[roles.sliced] if t in a.away and a._home(t).layout == lay}
    a._bring([t for t, x, _ in parts if x not in away], op.backward)
    stacks = enumerate(zip(op.outputs[roles.stacked], ys, strict=True), len(carried))
    back = [i for i, (t, lay) in stacks if a.sent.get(t) == lay or t in a.spilled]
    operands = a.operands(op, lie)
    spilled = [x for x, t in away.items() if t in a.spilled]
    planned = a.body(body, inner, [*carried, *map(unlift, ys)], away, back, spilled)
    outs = [a._define(t, lay) for t, lay in zip(op.outputs, [*carried, *ys], strict=True)]
    for i in back:
        outs[i].on_host = True
    a.away.update(op.outputs[i] for i in back if op.outputs[i] in a.spilled)
    a._append(op, operands, outs, (planned,))


def _while(a: _Assembler, op: Op) -> None:
    cond, body = op.bodies
    roles = While.of(op.params)
    inner = [a.decisions.layouts[t] for t in body.inputs]
    cond_consts = [a.decisions.layouts[t] for t in cond.inputs[roles.condition]]
    carry = inner[roles.before]
    operands = a.operands(op, [*cond_consts, *inner])
    planned = (
        a.body(cond, [*cond_consts, *carry], [Layout(())]),
        a.body(body, inner, carry),
    )
    a._append(op, operands, [a._define(t, lay) for t, lay in zip(op.outputs, carry, strict=True)], planned)


def _cond(a: _Assembler, op: Op) -> None:
    inner = [a.decisions.layouts[t] for t in op.bodies[0].inputs]
    outs = [a.decisions.layouts[t] for t in op.outputs]
    operands = a.operands(op, [Layout(()), *inner])
    planned = tuple(a.body(branch, inner, outs) for branch in op.bodies)
    a._append(op, operands, [a._define(t, lay) for t, lay in zip(op.outputs, outs, strict=True)], planned)


_CONTROL: dict[str, Callable[[_Assembler, Op], None]] = {"scan": _scan, "while": _while, "cond": _cond}
