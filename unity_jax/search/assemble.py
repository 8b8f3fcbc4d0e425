"""From decisions to the planned graph: every op split as decided, every change of layout an op of its own.

    inputs w: f32[8,16@model], x: f32[32@data,8]
    y: f32[32@data,16@model] = dot_general x w
    z: f32[32@data]{sum:model} = reduce_sum y
    z': f32[32@data] = reduce[model] z
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unity_jax import _compat
from unity_jax.cost.reshard import Resharder, collective_kind
from unity_jax.ops.rule import Rule, Shard, Strategy, rule_of, strategies
from unity_jax.pcg.graph import Graph, Op, Tensor, with_layout
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes


@dataclass
class Decisions:
    """What the search chooses.

    **Fields:** `strategies`: one per op without bodies; `layouts`: one per graph input, body input (constants, carries and
    slices of a loop) and result of a `scan` or `cond` that is not a carry, and for those op results that are held in another
    layout than they are made in; `outputs`: one per graph output; `keep`: whether the backward pass reuses what the forward
    pass gathered (faster) or gathers again (smaller).
    """

    strategies: dict[Op, Strategy] = field(default_factory=dict)
    layouts: dict[Tensor, Layout] = field(default_factory=dict)
    outputs: tuple[Layout, ...] = ()
    keep: bool = True


class RuleCache:
    """The rules and strategies of a program's ops, shared between ops of equal signature."""

    def __init__(self) -> None:
        self._rules: dict[object, Rule] = {}
        self._strategies: dict[object, list[Strategy]] = {}

    def __call__(self, op: Op) -> Rule:
        if op.signature not in self._rules:
            self._rules[op.signature] = rule_of(op)
        return self._rules[op.signature]

    def strategies(self, op: Op, mesh: MeshAxes) -> list[Strategy]:
        key = (op.signature, mesh)
        if key not in self._strategies:
            self._strategies[key] = strategies(self(op), mesh)
        return self._strategies[key]


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


def assemble(graph: Graph, decisions: Decisions, resharder: Resharder, rules: RuleCache) -> Graph:
    """The planned graph of `graph` under `decisions`."""
    inputs = [decisions.layouts[t] for t in graph.inputs]
    return _Assembler(decisions, resharder, rules).run(graph, inputs, decisions.outputs)


@dataclass
class _Copy:
    tensor: Tensor
    backward: bool  # made for the backward pass
    original: bool  # as its producer holds it


class _Assembler:
    """Walks one graph in program order, remembering in which layouts each tensor already exists."""

    def __init__(self, decisions: Decisions, resharder: Resharder, rules: RuleCache) -> None:
        self.decisions, self.resharder, self.rules = decisions, resharder, rules
        self.copies: dict[Tensor, list[_Copy]] = {}
        self.free: dict[Tensor, Op] = {}
        self.late: set[Tensor] = set()  # made by the backward pass
        self.ops: list[Op] = []

    def run(self, graph: Graph, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Graph:
        planned = tuple(self._define(t, lay) for t, lay in zip(graph.inputs, inputs, strict=True))
        for op in graph.ops:
            if is_free(op):
                self.free.update((t, op) for t in op.outputs)
            elif passes_layouts(op):
                operands = [self._home(t) for t in op.inputs]
                self._append(op, operands, [self._define(t, h.layout) for t, h in zip(op.outputs, operands, strict=True)])
            elif op.bodies:
                _CONTROL[op.name](self, op)
            else:
                self._compute(op)
            if op.backward:
                self.late.update(op.outputs)
        backward = bool(self.late)
        results = tuple(self._fetch(t, lay, backward) for t, lay in zip(graph.outputs, outputs, strict=True))
        return Graph(planned, results, self.ops)

    def body(self, graph: Graph, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Graph:
        """The planned graph of a loop body or branch."""
        return _Assembler(self.decisions, self.resharder, self.rules).run(graph, inputs, outputs)

    def _define(self, tensor: Tensor, layout: Layout | None) -> Tensor:
        assert layout is not None
        planned = with_layout(tensor, layout)
        self.copies[tensor] = [_Copy(planned, False, True)]
        return planned

    def _append(
        self, op: Op, operands: Sequence[Tensor], outs: Sequence[Tensor], bodies: tuple[Graph, ...] = (), shard: Shard | None = None
    ) -> None:
        planned = Op(op.name, tuple(operands), tuple(outs), op.params, bodies, op.eqn, op.callers, op.backward, shard)
        planned.copy_caches(op)
        self.ops.append(planned)

    def _compute(self, op: Op) -> None:
        shard = Shard(op, self.rules(op), self.resharder.mesh, self.decisions.strategies[op])
        operands = self.operands(op, shard.operand_layouts)
        outs = [self._define(t, lay) for t, lay in zip(op.outputs, shard.result_layouts, strict=True)]
        self._append(op, operands, outs, shard=shard)
        for t in op.outputs:
            held = self.decisions.layouts.get(t)
            if held is not None and held != self.copies[t][0].tensor.layout:
                self.copies[t] = [_Copy(self._fetch(t, held, op.backward), False, True)]

    def _home(self, tensor: Tensor) -> Tensor:
        if tensor in self.copies:
            return self.copies[tensor][0].tensor
        return self._fetch(tensor, Layout.replicated(tensor.rank), False)

    def operands(self, op: Op, layouts: Sequence[Layout]) -> list[Tensor]:
        """The op's operands in the layouts it needs."""
        return [self._fetch(t, lay, op.backward, op.inputs) for t, lay in zip(op.inputs, layouts, strict=True)]

    def _fetch(self, tensor: Tensor, layout: Layout, backward: bool, beside: Sequence[Tensor] = ()) -> Tensor:
        """`tensor` in `layout`: an existing copy, or the cheapest path from one, made for this pass."""
        if tensor in self.free and (made := self._make_free(self.free[tensor], layout)) is not None:
            return made
        if tensor not in self.copies:
            replicated = Layout.replicated(tensor.rank)
            made = with_layout(tensor, replicated) if tensor.literal is not None else self._make_free(self.free[tensor], replicated)
            assert made is not None
            self.copies[tensor] = [_Copy(made, False, True)]
        copies = self.copies[tensor]
        usable = [c for c in copies if c.original or self.decisions.keep or c.backward == backward]
        best = min(usable, key=lambda c: self._seconds(c.tensor, layout))
        source = best.tensor
        if source.layout == layout:
            return source
        moves = self.resharder.path(tensor.shape, tensor.dtype, source.layout, layout)
        if best.original and backward and not self.decisions.keep and any(collective_kind(m) for m in moves):
            source = self._repeat_behind_barrier(tensor, source, layout, beside)
        for move in moves:
            moved = with_layout(tensor, move.after)
            moved.literal = None
            self.ops.append(Op(move.kind, (source,), (moved,), {"move": move}, backward=backward))
            copies.append(_Copy(moved, backward, False))
            source = moved
        return source

    def _repeat_behind_barrier(
        self, tensor: Tensor, source: Tensor, layout: Layout, beside: Sequence[Tensor]
    ) -> Tensor:
        """Hold back a collective that repeats one of the forward pass until the backward pass has reached its consumer.

        XLA merges equal collectives, which would keep the gathered value alive through the whole step; a barrier that also
        takes a value of the backward pass (the cotangent) prevents it.
        """
        repeated = any(c.tensor.layout == layout and not c.backward for c in self.copies[tensor])
        ties = [t for t in beside if t in self.late and t is not tensor]
        if tensor in self.late or not repeated or not ties:
            return source
        tie = self.copies[ties[0]][0].tensor
        held = with_layout(tensor, source.layout)  # type: ignore[arg-type]
        self.ops.append(
            Op("optimization_barrier", (source, tie), (held, with_layout(ties[0], tie.layout)), backward=True)  # type: ignore[arg-type]
        )
        self.copies[tensor].append(_Copy(held, True, False))
        return held

    def _seconds(self, source: Tensor, layout: Layout) -> float:
        if source.layout == layout:
            return 0.0
        pair = (source.layout, layout)
        return float(self.resharder.table(source.shape, source.dtype, pair)[0, -1])

    def _make_free(self, op: Op, layout: Layout) -> Tensor | None:
        """A new instance of a constant, directly in `layout`; None where its op cannot make it so."""
        rule = self.rules(op)
        factor = {d: factors[0] for d, factors in enumerate(rule.results[0]) if factors}
        where = layout.axis_dim
        strategy = tuple(factor.get(where.get(a, -1), -1) for a in self.resharder.mesh.names)
        if layout.partial or strategy not in self.rules.strategies(op, self.resharder.mesh):
            return None
        shard = Shard(op, rule, self.resharder.mesh, strategy)
        if shard.result_layouts[0] != layout:
            return None
        made = with_layout(op.outputs[0], layout)
        self._append(op, self.operands(op, shard.operand_layouts), [made], shard=shard)
        return made


def _scan(a: _Assembler, op: Op) -> None:
    consts, carries = _compat.scan_arity(op.params)
    (body,) = op.bodies
    inner = [a.decisions.layouts[t] for t in body.inputs]
    fixed, stacked = inner[: consts + carries], inner[consts + carries :]
    ys = [a.decisions.layouts[t] for t in op.outputs[carries:]]
    operands = a.operands(op, [*fixed, *map(lift, stacked)])
    planned = a.body(body, inner, [*fixed[consts:], *map(unlift, ys)])
    outs = [a._define(t, lay) for t, lay in zip(op.outputs, [*fixed[consts:], *ys], strict=True)]
    a._append(op, operands, outs, (planned,))


def _while(a: _Assembler, op: Op) -> None:
    cond, body = op.bodies
    n_cond, n_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    inner = [a.decisions.layouts[t] for t in body.inputs]
    cond_consts = [a.decisions.layouts[t] for t in cond.inputs[:n_cond]]
    carry = inner[n_body:]
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
