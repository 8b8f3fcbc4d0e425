"""Trace: a jit-able function to a Parallel Computation Graph.

`build(jaxpr)` inlines calls, keeps `scan`, `while` and `cond` as ops with sub-graphs, drops dead code and remembers
for each op the user's line. Loops that never run and contractions over nothing are replaced by what they give.
`remat2` is inlined too: its inputs pass an `optimization_barrier`, exactly as JAX lowers
it, so XLA cannot merge the recomputation with the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from unity_jax import _compat
from unity_jax.errors import PinError, UnsupportedError
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan, While
from unity_jax.pcg.simplify import fold_transposes, sink_broadcasts
from unity_jax.specs import layout_of

_CALLS = {  # call-like primitives and the parameter that holds their jaxpr
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_lin": "jaxpr",
    "custom_vmap_call": "call",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
_CONTROL = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
_REMAT = ("remat2", "checkpoint")
_CONSTRAINTS = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
_ONCE = ("debug_callback", "debug_print", "io_callback")  # `ops.effects` runs these once
_REFS = ("get", "swap", "addupdate", "new_ref", "empty_ref", "free_ref", "freeze", "ref", "mutable_array")
_SAME = ("mesh_cast", "pvary", "pcast", "name")  # types that layouts replace; what a `jax.checkpoint` may have kept


@dataclass(eq=False)
class _Scope:
    """One graph under construction: what its variables stand for, its ops, and the arrays its code has captured.

    An inner `jit` or loop body keeps captured arrays as constants of its own jaxpr. They become inputs of the graph,
    one per array, so that they are laid out like any other input and not copied into the program.
    """

    env: dict[Any, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    captured: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)  # by identity of the array

    def read(self, atom: Any) -> Tensor:
        if _compat.is_literal(atom):
            return _literal(atom.val, atom.aval.dtype)
        return self.env[atom]

    def constant(self, value: Any, dtype: Any) -> Tensor:
        if np.ndim(value) == 0 and not _compat.is_key(dtype):
            return _literal(value, dtype)
        if id(value) not in self.captured:
            self.captured[id(value)] = (Tensor(tuple(np.shape(value)), dtype), value)
        return self.captured[id(value)][0]

    @property
    def captures(self) -> tuple[Tensor, ...]:
        return tuple(t for t, _ in self.captured.values())


def build(jaxpr: Any, names: Sequence[str] = (), captured: list[Any] | None = None) -> Graph:
    """The graph of a closed jaxpr. Arrays that its code captured are its first inputs (`const0`, ...).

    **Arguments:** `names`: a name for every input of the jaxpr (argument paths); `captured`: receives the captured
    arrays.
    **Raises:** `UnsupportedError` for `Ref` state and for effects that cannot run once on many devices, with the
    user's line.
    """
    opened, consts = _compat.open_jaxpr(jaxpr)
    scope = _Scope()
    inputs = [_tensor(v.aval, name) for v, name in zip(opened.invars, names or [""] * len(opened.invars), strict=True)]
    scope.env.update(zip(opened.invars, inputs, strict=True))
    _inline(opened, consts, scope, ())
    for i, t in enumerate(scope.captures):
        t.name = f"const{i}"
    graph = Graph((*scope.captures, *inputs), tuple(scope.read(a) for a in opened.outvars), scope.ops)
    if captured is not None:
        captured += [value for _, value in scope.captured.values()]
    return _mark_backward(simplified(graph))


def _tensor(aval: Any, name: str = "") -> Tensor:
    if not hasattr(aval, "shape"):
        raise UnsupportedError(
            f"{name or 'a value'} has type {aval}, which is not an array. `jax.Ref` state cannot be sharded: pass the "
            "state as arrays and return the updated arrays."
        )
    return Tensor(tuple(int(n) for n in aval.shape), aval.dtype, name)


def _literal(value: Any, dtype: Any) -> Tensor:
    array = value if _compat.is_key(dtype) else np.asarray(value, dtype)  # from 0.11 literals may be typed scalars
    return Tensor(tuple(np.shape(value)), dtype, literal=array)


def _inline(jaxpr: Any, consts: Sequence[Any], scope: _Scope, callers: tuple[Any, ...]) -> None:
    """Add the equations of a jaxpr whose inputs `scope` knows; calls are entered."""
    scope.env.update((v, scope.constant(c, v.aval.dtype)) for v, c in zip(jaxpr.constvars, consts, strict=True))
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands = tuple(scope.read(a) for a in eqn.invars)
        if (called := _called(eqn, operands)) is not None:
            inner, operands = called
            opened, inner_consts = _compat.open_jaxpr(inner)
            if name in _REMAT and eqn.params.get("differentiated", True) and eqn.params["prevent_cse"]:
                operands = _barrier(eqn, operands, scope.ops)
            call = _Scope(dict(zip(opened.invars, operands, strict=True)), scope.ops, scope.captured)
            _inline(opened, inner_consts, call, (*callers, eqn))
            scope.env.update((v, call.read(a)) for v, a in zip(eqn.outvars, opened.outvars, strict=True))
        elif (
            name in _SAME
            or (name == "reshard" and (_is_transposed(eqn) or operands[0].rank == 0))
            or (name == "convert_element_type" and operands[0].dtype == eqn.outvars[0].aval.dtype)
        ):
            scope.env.update(
                zip(eqn.outvars, operands, strict=True)
            )  # only types that layouts replace, or weak types, change
        elif name in _CONSTRAINTS:
            scope.env[eqn.outvars[0]] = _constrain(eqn, eqn.params[_CONSTRAINTS[name]], operands[0], scope.ops, callers)
        else:
            scope.env.update(zip(eqn.outvars, _op(eqn, operands, scope, callers), strict=True))


def _called(eqn: Any, operands: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]] | None:
    """The jaxpr that a call enters and what it passes; None for an equation that is no call."""
    name = eqn.primitive.name
    if name == "custom_linear_solve":  # its other parts say how to differentiate it, which has been done
        counts = eqn.params["const_lengths"]
        first = counts.matvec + counts.vecmat
        return eqn.params["jaxprs"].solve, (*operands[first : first + counts.solve], *operands[sum(counts) :])
    if name == "call_hi_primitive":
        return _compat.expanded(eqn), operands
    inner = eqn.params.get(_CALLS[name]) if name in _CALLS else None
    return None if inner is None else (inner, operands)


def _computed(
    fn: Callable[..., Any], operands: Sequence[Tensor], scope: _Scope, callers: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """The results of a JAX function of some tensors, whose ops are added; `callers`: whose line they have."""
    jaxpr = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in operands))
    opened, consts = _compat.open_jaxpr(jaxpr)
    inner = _Scope(dict(zip(opened.invars, operands, strict=True)), scope.ops, scope.captured)
    _inline(opened, consts, inner, callers)
    return tuple(inner.read(a) for a in opened.outvars)


def _op(eqn: Any, operands: tuple[Tensor, ...], scope: _Scope, callers: tuple[Any, ...]) -> tuple[Tensor, ...]:
    name = eqn.primitive.name
    outputs = tuple(_tensor(v.aval) for v in eqn.outvars)
    params, bodies = eqn.params, ()
    if name == "scan" and not params["length"]:
        roles = Scan.of(params)
        return (*operands[roles.carried], *_zeros(outputs[roles.stacked], scope, (*callers, eqn)))
    if name == "dot_general" and _contracts_nothing(params, operands[0]):
        return _zeros(outputs, scope, (*callers, eqn))
    if name in _CONTROL:
        operands, params, bodies = _control(eqn, operands, scope)
    op = Op(name, operands, outputs, params, bodies, eqn, callers)
    _check_effects(op)
    scope.ops.append(op)
    if _is_out_sharding(eqn):
        return (_constrain(eqn, params["out_sharding"], outputs[0], scope.ops, callers),)
    return outputs


def _is_out_sharding(eqn: Any) -> bool:
    """Whether the user wrote `out_sharding=` here. JAX fills it in by itself under Auto meshes and when it
    transposes."""
    asked = eqn.params.get("out_sharding")
    if not isinstance(asked, NamedSharding) or not _compat.has_explicit_axes(asked.mesh) or _is_transposed(eqn):
        return False
    return any(asked.spec)


def _is_transposed(eqn: Any) -> bool:
    return "transpose(" in _compat.name_stack(eqn)


def _constrain(eqn: Any, sharding: Any, operand: Tensor, ops: list[Op], callers: tuple[Any, ...]) -> Tensor:
    """`operand` with the layout that the user's code asks for here."""
    out = Tensor(operand.shape, operand.dtype)
    op = Op("sharding_constraint", (operand,), (out,), {"sharding": sharding}, (), eqn, callers)
    where = f"{op.source}: sharding constraint"
    if not isinstance(sharding, NamedSharding):
        raise PinError(f"{where}: a NamedSharding or PartitionSpec is needed, not {type(sharding).__name__}")
    op.params["layout"] = layout_of(sharding.spec, sharding.mesh.shape, operand.shape, where)
    ops.append(op)
    return out


def _contracts_nothing(params: dict[str, Any], lhs: Tensor) -> bool:
    (contracted, _), _ = params["dimension_numbers"]
    return any(lhs.shape[d] == 0 for d in contracted)


def _zeros(tensors: Sequence[Tensor], scope: _Scope, callers: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Zeros of the shapes and types of some tensors."""
    return _computed(lambda: [jnp.zeros(t.shape, t.dtype) for t in tensors], (), scope, callers)


def _control(
    eqn: Any, operands: tuple[Tensor, ...], scope: _Scope
) -> tuple[tuple[Tensor, ...], dict[str, Any], tuple[Graph, ...]]:
    """The operands, parameters and bodies of a loop or branch; arrays that bodies capture are operands of it."""
    name, params = eqn.primitive.name, eqn.params
    if name == "while" and _compat.open_jaxpr(params["cond_jaxpr"])[0].outvars[0].aval.shape:
        return _while_any(eqn, operands, scope)
    built = [_body(j) for key in _CONTROL[name] for j in _as_tuple(params[key])]
    outer = [tuple(scope.constant(value, t.dtype) for t, value in inner.captured.values()) for _, inner in built]
    if name == "scan":
        roles = Scan.of(params)
        operands = (*outer[0], *operands)
        params = roles.with_constants(params, len(outer[0]) + roles.constants.stop)
    elif name == "while":
        loop = While.of(params)
        kept = (operands[loop.condition], operands[loop.constants], operands[loop.carried])
        operands = (*outer[0], *kept[0], *outer[1], *kept[1], *kept[2])
        params = loop.with_constants(params, len(outer[0]) + len(kept[0]), len(outer[1]) + len(kept[1]))
    else:
        every = {t: None for ts in outer for t in ts}
        operands = (operands[0], *every, *operands[1:])
        graphs = []
        for graph, inner in built:
            inside = dict(
                zip((scope.constant(v, t.dtype) for t, v in inner.captured.values()), inner.captures, strict=True)
            )
            first = tuple(inside.get(t) or Tensor(t.shape, t.dtype) for t in every)
            graphs.append(Graph((*first, *graph.inputs[len(inside) :]), graph.outputs, graph.ops))
        return operands, params, tuple(graphs)
    return operands, params, tuple(graph for graph, _ in built)


def _while_any(
    eqn: Any, operands: tuple[Tensor, ...], scope: _Scope
) -> tuple[tuple[Tensor, ...], dict[str, Any], tuple[Graph, ...]]:
    """A `while` with a predicate for each example, as `vmap` makes it, with one for all: the loop runs while any
    example goes on, on every device as often, and an example that has stopped keeps its values."""
    roles = While.of(eqn.params)
    cond, body = (_compat.open_jaxpr(eqn.params[key]) for key in _CONTROL["while"])

    def inputs() -> tuple[tuple[Tensor, ...], _Scope]:
        return tuple(Tensor(t.shape, t.dtype) for t in operands), _Scope()

    def enter(jaxpr: tuple[Any, Any], args: Sequence[Tensor], inner: _Scope) -> tuple[Tensor, ...]:
        opened, consts = jaxpr
        call = _Scope(dict(zip(opened.invars, args, strict=True)), inner.ops, inner.captured)
        _inline(opened, consts, call, ())
        return tuple(call.read(a) for a in opened.outvars)

    def going(args: tuple[Tensor, ...], inner: _Scope) -> Tensor:
        return enter(cond, (*args[roles.condition], *args[roles.carried]), inner)[0]

    def keep(goes: Any, *values: Any) -> list[Any]:
        old, new = values[: len(values) // 2], values[len(values) // 2 :]
        which = [lax.broadcast_in_dim(goes, x.shape, range(goes.ndim)) for x in old]
        return [lax.select(w, y, x) for w, x, y in zip(which, old, new, strict=True)]

    args, first = inputs()
    goes = going(args, first)
    outputs = _computed(lambda p: lax.reduce_or(p, tuple(range(p.ndim))), (goes,), first, (eqn,))
    stop = simplified(Graph((*first.captures, *args[roles.condition], *args[roles.carried]), outputs, first.ops))
    args, second = inputs()
    goes = going(args, second)
    new = enter(body, (*args[roles.constants], *args[roles.carried]), second)
    outputs = _computed(keep, (goes, *args[roles.carried], *new), second, (eqn,))
    step = simplified(Graph((*second.captures, *args), outputs, second.ops))
    outer = [[scope.constant(value, t.dtype) for t, value in of.captured.values()] for of in (first, second)]
    found = (*outer[0], *operands[roles.condition], *outer[1], *operands)
    counts = len(outer[0]) + roles.condition.stop, len(outer[1]) + roles.constants.stop
    return found, roles.with_constants(eqn.params, *counts), (stop, step)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _body(jaxpr: Any) -> tuple[Graph, _Scope]:
    """The graph of a loop body or branch, whose first inputs are the arrays it captured."""
    opened, consts = _compat.open_jaxpr(jaxpr)
    scope = _Scope()
    inputs = tuple(_tensor(v.aval) for v in opened.invars)
    scope.env.update(zip(opened.invars, inputs, strict=True))
    _inline(opened, consts, scope, ())
    graph = Graph((*scope.captures, *inputs), tuple(scope.read(a) for a in opened.outvars), scope.ops)
    return simplified(graph), scope


def _barrier(eqn: Any, operands: tuple[Tensor, ...], ops: list[Op]) -> tuple[Tensor, ...]:
    held = [t for t in operands if t.literal is None]
    fresh = {t: Tensor(t.shape, t.dtype, t.name) for t in held}
    ops.append(Op("optimization_barrier", tuple(fresh), tuple(fresh.values()), {}, (), eqn))
    return tuple(fresh.get(t, t) for t in operands)


def simplified(graph: Graph) -> Graph:
    """Without what nobody needs, and without what only stands in the planner's way."""
    return fold_transposes(without_dead_code(sink_broadcasts(graph)))


def without_dead_code(graph: Graph) -> Graph:
    live = set(graph.outputs)
    kept = []
    for op in reversed(graph.ops):
        if op.name == "optimization_barrier":
            pairs = [(i, o) for i, o in zip(op.inputs, op.outputs, strict=True) if o in live]
            op = replace(op, inputs=tuple(i for i, _ in pairs), outputs=tuple(o for _, o in pairs))
        if not live.isdisjoint(op.outputs) or has_effects(op):
            live.update(op.inputs)
            kept.append(op)
    return Graph(graph.inputs, graph.outputs, kept[::-1])


def has_effects(op: Op) -> bool:
    """Whether the op does more than compute its outputs (prints, callbacks, host I/O)."""
    return op.eqn is not None and op.name != "optimization_barrier" and bool(op.eqn.effects)


def _mark_backward(graph: Graph, inside: bool = False) -> Graph:
    """Mark the ops of the second half of a step: those made by transposition or rematerialization, what follows them,
    and what only that needs (the optimizer's own arithmetic). A function without a backward pass has no second half.
    """
    late = {op for op in graph.ops if op.eqn is not None and _is_backward(op)}
    needed = {t for op in late for t in op.inputs}
    early: set[Op] = set()
    for op in reversed(graph.ops):
        if op not in late and any(t in needed for t in op.outputs):
            early.add(op)
            needed.update(op.inputs)
    after = {t for op in late for t in op.outputs}
    for op in graph.ops:
        op.backward = inside or op in late or any(t in after for t in op.inputs) or (bool(late) and op not in early)
        if op.backward:
            after.update(op.outputs)
        for body in op.bodies:
            _mark_backward(body, op.backward)
    return graph


def _is_backward(op: Op) -> bool:
    return "transpose(" in op.scope or is_rematerialized(op)


def is_rematerialized(op: Op) -> bool:
    """Whether `jax.checkpoint` has the op compute again what the forward pass did not keep."""
    return "rematted_computation" in op.scope


def _check_effects(op: Op) -> None:
    """Refuse effects that a program on several devices cannot have, naming the line."""
    if op.name in _REFS:
        raise UnsupportedError(
            f"{op.source}: `{op.name}` reads or writes a `jax.Ref`. Mutable state cannot be sharded: pass it as "
            f"arrays and "
            "return the updated arrays."
        )
    if op.bodies or not has_effects(op):
        return
    if op.params.get("ordered"):
        raise UnsupportedError(
            f"{op.source}: `{op.name}` with ordered=True. Devices run side by side, so the order of host calls "
            f"cannot be "
            "kept: use ordered=False, or pass what must be ordered through the results of the step."
        )
    if op.name not in _ONCE and op.name not in ("shard_map", "pallas_call"):
        effects = ", ".join(sorted(str(e) for e in op.eqn.effects))
        raise UnsupportedError(
            f"{op.source}: `{op.name}` has side effects ({effects}) and no rule says how to run them once on many "
            f"devices"
        )
