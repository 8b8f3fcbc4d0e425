"""What tensors of a program are that depend on none of its arguments: masks, and the numbers of random draws."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan

LARGEST = 2**26
"""Elements of the largest array that is computed; dimensions along which it is broadcast are left out."""


class Constants:
    """The constants of a program. Those of a loop are known in its body, and what `jax.checkpoint` hands on behind its
    barrier is what it is ahead of that."""

    def __init__(self, graph: Graph) -> None:
        self._maker = {t: op for op in graph.walk() for t in op.outputs}
        self._outer: dict[Tensor, Tensor] = {}
        for op in graph.walk():
            if op.name == "scan":
                role = Scan.of(op.params).constants
                self._outer.update(zip(op.bodies[0].inputs[role], op.inputs[role], strict=True))
            elif op.name == "optimization_barrier":
                self._outer.update(zip(op.outputs, op.inputs, strict=True))
        self._known: dict[Tensor, bool] = {}
        self.value = functools.cache(self._value)

    def _value(self, t: Tensor) -> np.ndarray | None:
        """A constant; None for what depends on arguments, is too large, or is computed by an op not known here."""
        t = self._outside(t)
        if t.literal is not None:
            return np.asarray(t.literal) if isinstance(t.literal, np.ndarray | np.generic | int | float) else None
        if not self._is_constant(t):
            return None
        op = self._maker[t]
        values = [v for v in map(self.value, op.inputs) if v is not None]
        if len(values) < len(op.inputs):
            return None
        if op.name in _ELEMENTWISE:
            values = _narrow(values, t.shape)
        elif op.name not in _VIEWS and math.prod(t.shape) > LARGEST:
            return None
        if max((v.size for v in values), default=0) > LARGEST and op.name not in _VIEWS:
            return None
        return np.broadcast_to(_EVERY[op.name](op, *values), t.shape)

    def scalar(self, t: Tensor) -> float | None:
        """The number that all elements of a constant are; None where they differ."""
        value = self.value(t)
        if value is None or not value.size:
            return None
        first = value.flat[0]
        different = value[tuple(slice(None if stride else 1) for stride in value.strides)]
        return float(first) if (different == first).all() else None

    def _outside(self, t: Tensor) -> Tensor:
        """What a constant of a loop is outside of it, and one behind a barrier ahead of that."""
        while t in self._outer:
            t = self._outer[t]
        return t

    def _is_constant(self, t: Tensor) -> bool:
        waiting = [t]
        while waiting:
            now = waiting[-1]
            op = self._maker.get(now)
            if op is None or op.name not in _EVERY:
                self._known[now] = False
            reads = [x for x in map(self._outside, op.inputs) if x.literal is None] if op is not None else []
            unknown = next((x for x in reads if x not in self._known), None)
            if now not in self._known and unknown is not None:
                waiting.append(unknown)
                continue
            self._known.setdefault(now, all(self._known.get(x, False) for x in reads))
            waiting.pop()
        return self._known[t]


def _narrow(values: Sequence[np.ndarray], shape: tuple[int, ...]) -> list[np.ndarray]:
    """Operands of an elementwise op, one long where all of them are broadcast."""
    whole = [v for v in values if v.ndim == len(shape)]
    cut = tuple([slice(None if any(v.shape[d] > 1 and v.strides[d] for v in whole) else 1) for d in range(len(shape))])
    return [v[cut] if v.ndim == len(shape) else v for v in values]


def elementwise(op: Op, *values: Any) -> np.ndarray:
    """An elementwise op of arrays of any one shape, or that broadcast. Raises `KeyError` for others."""
    return np.asarray(_ELEMENTWISE[op.name](op, *values))


def _same(of: Callable[..., Any]) -> Callable[..., Any]:
    return lambda op, *values: of(*values)


def _cast(op: Op, x: Any) -> Any:
    return np.asarray(x).astype(op.outputs[0].dtype)


_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": _same(np.add),
    "sub": _same(np.subtract),
    "mul": _same(np.multiply),
    "neg": _same(np.negative),
    "max": _same(np.maximum),
    "min": _same(np.minimum),
    "ge": _same(np.greater_equal),
    "gt": _same(np.greater),
    "le": _same(np.less_equal),
    "lt": _same(np.less),
    "eq": _same(np.equal),
    "ne": _same(np.not_equal),
    "and": _same(np.bitwise_and),
    "or": _same(np.bitwise_or),
    "not": _same(np.invert),
    "shift_right_logical": _same(np.right_shift),
    "bitcast_convert_type": lambda op, x: np.asarray(x).view(op.outputs[0].dtype),
    "convert_element_type": _cast,
    "select_n": lambda op, which, *cases: np.where(which, *reversed(cases)) if len(cases) == 2 else cases[0],
    "copy": _same(np.asarray),
    "stop_gradient": _same(np.asarray),
}
"""Of numpy; a logical shift is of unsigned numbers."""


def _iota(op: Op) -> np.ndarray:
    (made,), along = op.outputs, op.params["dimension"]
    row = np.arange(made.shape[along], dtype=made.dtype)
    return np.broadcast_to(row.reshape([-1 if d == along else 1 for d in range(made.rank)]), made.shape)


def _broadcast(op: Op, x: np.ndarray) -> np.ndarray:
    (made,), at = op.outputs, op.params["broadcast_dimensions"]
    shape = [1] * made.rank
    for d, n in zip(at, np.shape(x), strict=True):
        shape[d] = n
    return np.broadcast_to(np.reshape(x, shape), made.shape)


def _slices(params: Mapping[str, Any]) -> tuple[slice, ...]:
    starts, limits = params["start_indices"], params["limit_indices"]
    return tuple(map(slice, starts, limits, params["strides"] or (1,) * len(starts)))


def _shaped(op: Op, x: np.ndarray) -> np.ndarray:
    return np.reshape(x, op.outputs[0].shape)


_VIEWS = ("broadcast_in_dim", "iota", "transpose")
"""Of any size: what they make takes no memory of its own."""
_EVERY: Mapping[str, Callable[..., Any]] = {
    **_ELEMENTWISE,
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _shaped),
    "transpose": lambda op, x: np.transpose(x, op.params["permutation"]),
    "slice": lambda op, x: x[_slices(op.params)],
}
