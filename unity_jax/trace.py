"""Trace: a jit-able function to a Parallel Computation Graph.

`build(jaxpr)` inlines calls, keeps `scan`, `while` and `cond` as ops with sub-graphs, drops dead code and remembers for each
op the user's line. `remat2` is inlined too: its inputs pass an `optimization_barrier`, exactly as JAX lowers it, so XLA
cannot merge the recomputation with the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from unity_jax import _compat
from unity_jax.errors import UnsupportedError
from unity_jax.pcg.graph import Graph, Op, Tensor

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


def build(jaxpr: Any, names: Sequence[str] = ()) -> Graph:
    """The graph of a closed jaxpr; its constants become extra inputs, first.

    **Arguments:** `names`: a name for every input of the jaxpr (argument paths); constants are called `const0`, ...
    **Raises:** `UnsupportedError` for `Ref` state, with the user's line.
    """
    opened, consts = _compat.open_jaxpr(jaxpr)
    env: dict[Any, Tensor] = {}
    inputs = []
    for i, var in enumerate((*opened.constvars, *opened.invars)):
        j = i - len(opened.constvars)
        tensor = _tensor(var.aval, (names[j] if j < len(names) else "") if j >= 0 else f"const{i}")
        env[var] = tensor
        inputs.append(tensor)
    if len(consts) != len(opened.constvars):
        raise ValueError("a closed jaxpr is needed")
    ops: list[Op] = []
    _inline(opened, env, ops, ())
    graph = Graph(tuple(inputs), tuple(_read(env, a) for a in opened.outvars), ops)
    return _mark_backward(_without_dead_code(graph))


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


def _read(env: dict[Any, Tensor], atom: Any) -> Tensor:
    if _compat.is_literal(atom):
        return _literal(atom.val, atom.aval.dtype)
    return env[atom]


def _inline(jaxpr: Any, env: dict[Any, Tensor], ops: list[Op], callers: tuple[Any, ...]) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands = tuple(_read(env, a) for a in eqn.invars)
        if name in _CALLS and (inner := eqn.params.get(_CALLS[name])) is not None:
            opened, consts = _compat.open_jaxpr(inner)
            if name in _REMAT and eqn.params.get("differentiated", True) and eqn.params["prevent_cse"]:
                operands = _barrier(eqn, operands, ops)
            inner_env = dict(zip(opened.invars, operands, strict=True))
            for var, value in zip(opened.constvars, consts, strict=True):
                inner_env[var] = _literal(value, var.aval.dtype)
            _inline(opened, inner_env, ops, (*callers, eqn))
            env.update((v, _read(inner_env, a)) for v, a in zip(eqn.outvars, opened.outvars, strict=True))
            continue
        outputs = tuple(_tensor(v.aval) for v in eqn.outvars)
        bodies = tuple(_body(j) for key in _CONTROL.get(name, ()) for j in _as_tuple(eqn.params[key]))
        ops.append(Op(name, operands, outputs, eqn.params, bodies, eqn, callers))
        env.update(zip(eqn.outvars, outputs, strict=True))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _body(jaxpr: Any) -> Graph:
    opened, consts = _compat.open_jaxpr(jaxpr)
    env = {var: _tensor(var.aval) for var in opened.invars}
    inputs = tuple(env[v] for v in opened.invars)
    for var, value in zip(opened.constvars, consts, strict=True):
        env[var] = _literal(value, var.aval.dtype)
    ops: list[Op] = []
    _inline(opened, env, ops, ())
    return _without_dead_code(Graph(inputs, tuple(_read(env, a) for a in opened.outvars), ops))


def _barrier(eqn: Any, operands: tuple[Tensor, ...], ops: list[Op]) -> tuple[Tensor, ...]:
    held = [t for t in operands if t.literal is None]
    fresh = {t: Tensor(t.shape, t.dtype, t.name) for t in held}
    ops.append(Op("optimization_barrier", tuple(fresh), tuple(fresh.values()), {}, (), eqn))
    return tuple(fresh.get(t, t) for t in operands)


def _without_dead_code(graph: Graph) -> Graph:
    live = set(graph.outputs)
    kept = []
    for op in reversed(graph.ops):
        if op.name == "optimization_barrier":
            pairs = [(i, o) for i, o in zip(op.inputs, op.outputs, strict=True) if o in live]
            op.inputs, op.outputs = tuple(i for i, _ in pairs), tuple(o for _, o in pairs)
        if any(t in live for t in op.outputs) or has_effects(op):
            live.update(op.inputs)
            kept.append(op)
    return Graph(graph.inputs, graph.outputs, kept[::-1])


def has_effects(op: Op) -> bool:
    """Whether the op does more than compute its outputs (prints, callbacks, host I/O)."""
    return op.eqn is not None and op.name != "optimization_barrier" and bool(op.eqn.effects)


def _mark_backward(graph: Graph, inside: bool = False) -> Graph:
    """Mark the ops of the second half of a step: those made by transposition or rematerialization, what follows them, and
    what only that needs (the optimizer's own arithmetic). A function without a backward pass has no second half.
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
    return "transpose(" in op.scope or "rematted_computation" in op.scope


def check_no_refs(jaxpr: Any) -> None:
    """Refuse programs that read or write `jax.Ref`s, naming the line."""
    opened, _ = _compat.open_jaxpr(jaxpr)
    for eqn in opened.eqns:
        if eqn.primitive.name in ("get", "swap", "addupdate", "new_ref", "freeze", "ref", "mutable_array"):
            raise UnsupportedError(
                f"{_compat.source_line(eqn)}: `{eqn.primitive.name}` reads or writes a `jax.Ref`. Mutable state cannot be "
                "sharded: pass it as arrays and return the updated arrays."
            )
        for sub in core.jaxprs_in_params(eqn.params):
            check_no_refs(sub)
