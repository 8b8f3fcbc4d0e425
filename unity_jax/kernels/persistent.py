"""A loop as one Pallas kernel for TPUs, whose constants stay on the chip for all of its steps.

    for each of 35 steps: h = cell(x, h @ V)        V is read 35 times   ->   once

XLA:TPU runs a loop kernel by kernel: in each step they read the weights again and write for each other what they make.
One kernel reads the weights before the first step, keeps what is carried on the chip, and reads and writes what a step
has of its own while the next one or the one before is computed (Diamos et al., Persistent RNNs, ICML 2016,
https://proceedings.mlr.press/v48/diamos16.html; there the weights are in registers). Rows that do not fit together
run one block after the other. On other devices it is a scan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from unity_jax.kernels.tiles import VMEM, nbytes

Step = Callable[[Sequence[Any]], Sequence[Any]]
"""What a step makes of constants, what is carried and what it slices: what is carried, and what it stacks."""


class Persistent(NamedTuple):
    """A loop on one device.

    **Fields:** `constants`, `carried`: how many operands are, those after them are sliced; `rows`: of each operand and
    result, the dimension of an iteration's part that has the rows, or None; `results`: shape and type of what a step
    makes, of all rows; `blocks`: how many blocks rows are cut into, 0 where they cannot be.
    """

    constants: int
    carried: int
    length: int
    reverse: bool
    rows: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    results: tuple[jax.ShapeDtypeStruct, ...]
    blocks: int

    def run(self, step: Step, whole_step: Step, operands: Sequence[Any]) -> list[Any]:
        """The results of the loop: by a kernel on TPUs, elsewhere as a scan, and of rows that make no blocks.

        **Arguments:** `step`: of one block of rows, in operations that a kernel has; `whole_step`: of all rows.
        """
        by_kernel, by_xla = functools.partial(self.kernel, step), functools.partial(self.scan, whole_step)
        if not self.blocks or any(x.dtype.itemsize > 4 for x in operands):  # no TPU has 64 bits
            return by_xla(*operands)
        return list(jax.lax.platform_dependent(*operands, tpu=by_kernel, default=by_xla))

    def scan(self, step: Step, *operands: Any) -> list[Any]:
        """The loop as JAX has it."""
        constants, init, xs = self._parts(list(operands))

        def body(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            made = list(step([*constants, *carry, *xs]))
            return made[: self.carried], made[self.carried :]

        carry, ys = jax.lax.scan(body, init, xs, length=self.length, reverse=self.reverse)
        return [*carry, *ys]

    def kernel(self, step: Step, *operands: Any, interpret: bool = False) -> list[Any]:
        """The loop as one kernel. Truth values are bytes in memory."""
        given = [x.astype(jnp.int8) if x.dtype == jnp.bool_ else x for x in map(_as_array, operands)]
        carried = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._parts(given)[1]]
        stacked = [
            jax.ShapeDtypeStruct((self.length, *t.shape), jnp.int8 if t.dtype == jnp.bool_ else t.dtype)
            for t in self.results[self.carried :]
        ]
        shapes, types = (
            [*carried, *stacked],
            [t.dtype for t in (*self._parts(operands)[1], *self.results[self.carried :])],
        )
        sliced = range(self.constants + self.carried, len(given))
        in_specs = [
            self._block(t, self.rows[0][i], i in sliced) if x.ndim else pl.BlockSpec(memory_space=pltpu.SMEM)
            for i, (t, x) in enumerate(zip(given, operands, strict=True))
        ]
        out_specs = [self._block(t, self.rows[1][i], i >= len(carried)) for i, t in enumerate(shapes)]
        kept = [pltpu.VMEM(self._part(t.shape, self.rows[1][i]), t.dtype) for i, t in enumerate(carried)]

        def loop(*refs: Any) -> None:
            inputs, made = self._parts(refs[: len(given)]), refs[len(given) : len(given) + len(shapes)]
            state, now = refs[len(given) + len(shapes) :], pl.program_id(1)

            @pl.when(now == 0)
            def _() -> None:
                for to, start in zip(state, inputs[1], strict=True):
                    to[...] = start[...]

            values = [ref[...] if x.ndim else ref[0, 0] for ref, x in zip(inputs[0], operands, strict=False)]
            values += [*(ref[...] for ref in state), *(ref[0] for ref in inputs[2])]
            found = step([v != 0 if x.dtype == jnp.bool_ else v for v, x in zip(values, operands, strict=True)])
            for to, value in zip(state, found[: self.carried], strict=True):
                to[...] = value.astype(to.dtype)
            for to, value in zip(made[self.carried :], found[self.carried :], strict=True):
                to[0] = value.astype(to.dtype)

            @pl.when(now == self.length - 1)
            def _() -> None:
                for to, last in zip(made, state, strict=False):
                    to[...] = last[...]

        parts = [(t.shape[1:] if i in sliced else t.shape, self.rows[0][i], t.dtype) for i, t in enumerate(given)]
        parts += [(t.shape[i >= len(carried) :], self.rows[1][i], t.dtype) for i, t in enumerate(shapes)]
        held = sum(2 * nbytes(self._part(shape, rows), dtype) for shape, rows, dtype in parts)
        with jax.named_scope("persistent_scan"):  # profiles show it
            results = pl.pallas_call(
                loop,
                grid=(self.blocks, self.length),
                in_specs=in_specs,
                out_specs=out_specs,
                out_shape=shapes,
                scratch_shapes=kept,
                interpret=interpret,
                compiler_params=None
                if interpret
                else pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM + held),
            )(*given)
        return [x.astype(dtype) for x, dtype in zip(results, types, strict=True)]

    def _parts(self, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """What is constant, carried and sliced."""
        first = self.constants + self.carried
        return values[: self.constants], values[self.constants : first], values[first:]

    def _part(self, shape: Sequence[int], rows: int | None) -> tuple[int, ...]:
        """The shape of a block of rows."""
        return tuple(n // self.blocks if d == rows else n for d, n in enumerate(shape))

    def _block(self, t: Any, rows: int | None, by_step: bool) -> pl.BlockSpec:
        """What a step of a block reads or writes of an array. What all read is fetched once, into one place."""

        def index(block: Any, now: Any) -> tuple[Any, ...]:
            at = tuple(block if d == rows else 0 for d in range(t.ndim - by_step))
            return (self.length - 1 - now if self.reverse else now, *at) if by_step else at

        if by_step:
            return pl.BlockSpec((1, *self._part(t.shape[1:], rows)), index)
        if rows is None:
            return pl.BlockSpec(t.shape, index, pipeline_mode=pl.Buffered(1))
        return pl.BlockSpec(self._part(t.shape, rows), index)


def _as_array(x: Any) -> Any:
    """A number as an array of 32 bits: what the memory for scalars has."""
    if x.ndim:
        return x
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32).reshape(1, 1)
