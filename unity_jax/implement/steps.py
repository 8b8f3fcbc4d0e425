"""Values of a loop's body of all steps at once: each of them, or their sum.

    dx = dot_general(dg, W)             each: dot_general(dgs, W)             [35, 20, 1536], by JAX's rule of batching
    dW = dW + convert(h^T dg)           sum:  dW + dot_general(hs, dgs)       over steps and rows
    db = db + reduce_sum(dg)            sum:  db + reduce_sum(dgs)            over steps and rows

A sum goes through what is linear down to a product of two values that differ from step to step, which contracts the
steps too, or to a value that is reduced over them. It is of 32 bits at least, whatever was rounded in each step.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity_jax import _compat
from unity_jax.implement.stages import BARRIER, LINEAR, Stages, Sum
from unity_jax.pcg.graph import Op, Tensor, trips
from unity_jax.residuals.loop import computed, wide
from unity_jax.xla.op_classes import is_zero


class Steps:
    """Writes what values of the body of a loop are over all steps.

    **Fields:** `outer`: of values of the body those of all steps, stacked, or if they are the same in all of them the
    value; `ops`: those written so far.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages, self.ops = stages, list[Op]()
        self._totals: dict[tuple[Tensor, Any], Tensor] = {}
        roles, given, scan = stages.roles, stages.graph.inputs, stages.scan
        self.outer = dict(zip(given[roles.constants], scan.inputs[roles.constants], strict=True))
        self.outer |= zip(given[roles.sliced], scan.inputs[roles.sliced], strict=True)
        self.outer |= {given[roles.carried][i]: scan.inputs[roles.carried][i] for i in stages.handed_on}

    def compute(self, wanted: Iterable[Tensor]) -> None:
        """Write some values of all steps, and what they are made of."""
        needed, ops = {t for t in wanted if t not in self.outer}, list[Op]()
        for op in reversed(self.stages.graph.ops):
            if not needed.isdisjoint(op.outputs):
                ops.append(op)
                needed.update(t for t in op.inputs if t not in self.outer)
        for op in reversed(ops):
            results = self._batched(op)
            self.outer.update((t, x) for t, x in zip(op.outputs, results, strict=True) if t not in self.outer)

    def _batched(self, op: Op) -> Sequence[Tensor]:
        operands = [self.outer.get(t, t) for t in op.inputs]
        if op.name == BARRIER or self.stages.fixed.issuperset(op.outputs):
            results = [Tensor(t.shape, t.dtype) for t in (operands if op.name == BARRIER else op.outputs)]
            self.ops.append(dataclasses.replace(op, inputs=tuple(operands), outputs=tuple(results)))
            return results
        axes = [None if self.stages.is_fixed(t) else 0 for t in op.inputs]
        return self._written(jax.vmap(lambda *xs: _compat.bind(op.eqn, xs, op.params), in_axes=axes), operands, op)

    def _written(self, fn: Callable[..., Any], operands: Sequence[Tensor], source: Op) -> list[Tensor]:
        """The results of a JAX function, whose ops are added, in place of some op."""
        ops, results = computed(fn, operands, source)
        self.ops += ops
        return results

    def added_up(self, start: Tensor, steps: Sum, makers: Mapping[Tensor, Op]) -> Tensor:
        """What a carried value that starts so is at the end. **Arguments:** `makers`: of what is outside the loop."""
        dtype, last = wide(start.dtype), steps.adds[-1]
        totals = [self._total(t, dtype, last) for t in steps.terms]
        signs = [-1 if op.name == "sub" else 1 for op in steps.adds]
        if not _is_zero(start, makers.get(start)):
            totals, signs = [start, *totals], [1, *signs]

        def add(*xs: Any) -> list[Any]:
            signed = (x.astype(dtype) if sign > 0 else -x.astype(dtype) for sign, x in zip(signs, xs, strict=True))
            return [functools.reduce(operator.add, signed).astype(start.dtype)]

        return self._written(add, totals, last)[0]

    def _total(self, t: Tensor, dtype: Any, reader: Op) -> Tensor:
        """The sum over all steps of a value, of some type. **Arguments:** `reader`: an op that reads it."""
        key = t, dtype
        if key not in self._totals:
            op, length = self.stages.graph.producer.get(t), trips(self.stages.scan)
            source = op or reader
            if self.stages.is_fixed(t):
                self.compute([] if t.literal is not None else [t])
                fixed, zero = [self.outer.get(t, t)], _is_zero(t, op)
                self._totals[key] = self._written(
                    lambda x: [x.astype(dtype) if zero else length * x.astype(dtype)], fixed, source
                )[0]
            elif op is None or not self._goes_on(t):
                self._totals[key] = self._reduced(t, (), dtype, source)[0]
            elif self.stages.contracts(op):
                self._totals[key] = self._contraction(op, dtype)
            else:
                self._totals.update(((o, dtype), x) for o, x in zip(op.outputs, self._linear(op, dtype), strict=True))
        return self._totals[key]

    def _reduced(self, t: Tensor, dims: Sequence[int], dtype: Any, source: Op) -> list[Tensor]:
        """The sum of a value over all steps and some of its dimensions."""
        self.compute([t])
        over = (0, *(d + 1 for d in dims))
        return self._written(lambda x: [x.astype(dtype).sum(over)], [self.outer[t]], source)

    def _linear(self, op: Op, dtype: Any) -> list[Tensor]:
        """The sums of the results of an op that is linear: what it makes of sums."""
        if op.name == "convert_element_type":
            return [self._total(op.inputs[0], dtype, op)]
        if op.name == "reduce_sum" and not self.stages.is_fixed(op.inputs[0]) and not self._goes_on(op.inputs[0]):
            return self._reduced(op.inputs[0], op.params["axes"], dtype, op)
        joint, fixed = op.name in LINEAR, [t for t in op.inputs if self.stages.is_fixed(t)]
        self.compute([] if joint else [t for t in fixed if t.literal is None])
        operands = [self.outer.get(t, t) if t in fixed and not joint else self._total(t, dtype, op) for t in op.inputs]
        params = _with_type(op.params, dtype)
        return self._written(lambda *xs: _compat.bind(op.eqn, [x.astype(dtype) for x in xs], params), operands, op)

    def _goes_on(self, t: Tensor) -> bool:
        """Whether the sum of a value that differs from step to step is written by others than those."""
        op = self.stages.graph.producer.get(t)
        return op is not None and t not in self.outer and (self.stages.contracts(op) or self.stages.is_linear(op))

    def _contraction(self, op: Op, dtype: Any) -> Tensor:
        """The sum of what an op makes, by one that adds over the steps too."""
        self.compute(t for t in op.inputs if t not in self.stages.fixed)
        fixed = map(self.stages.is_fixed, op.inputs)
        operands = [
            self._total(t, dtype, op) if same else self.outer[t] for t, same in zip(op.inputs, fixed, strict=True)
        ]
        params = _with_type(op.params, dtype)
        return self._written(lambda *xs: [_OVER_STEPS[op.name](op, params, *xs).astype(dtype)], operands, op)[0]


def _is_zero(t: Tensor, maker: Op | None) -> bool:
    """Whether a value is known to be zero. **Arguments:** `maker`: the op that makes it, if one does."""
    return not np.any(t.literal) if t.literal is not None else maker is not None and is_zero(maker)


def _with_type(params: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The parameters of an op whose result has this type; a `DotAlgorithm` says its own."""
    chosen = "preferred_element_type" in params and (params["precision"] is None or type(params["precision"]) is tuple)
    return {**params, "preferred_element_type": dtype} if chosen else dict(params)


def _dot(op: Op, params: Mapping[str, Any], x: Any, y: Any) -> Any:
    contracted, batch = params["dimension_numbers"]
    over = tuple((0, *(d + 1 for d in dims)) for dims in contracted)
    within = tuple(tuple(d + 1 for d in dims) for dims in batch)
    return _compat.bind(op.eqn, (x, y), {**params, "dimension_numbers": (over, within)})[0]


def _convolution(op: Op, params: Mapping[str, Any], x: Any, y: Any) -> Any:
    """A convolution adds over the features of both: those of all steps."""
    numbers = params["dimension_numbers"]
    both = [_merged(x, numbers.lhs_spec[1]), _merged(y, numbers.rhs_spec[1])]
    return _compat.bind(op.eqn, both, dict(params))[0]


def _scatter(op: Op, params: Mapping[str, Any], into: Any, indices: Any, updates: Any) -> Any:
    numbers = params["dimension_numbers"]
    windows = tuple(d + 1 for d in numbers.update_window_dims)
    numbers = numbers._replace(update_window_dims=windows)
    return jax.lax.scatter_add(into, indices, updates.astype(into.dtype), numbers, mode=params["mode"])


_OVER_STEPS: Mapping[str, Callable[..., Any]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "scatter-add": _scatter,
}
"""Ops that add over the steps too."""


def _merged(x: Any, dim: int) -> Any:
    """An array whose first dimension is part of another one."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
