"""How the arrays of attention are cut into blocks, one for each program of a kernel's grid.

    sizes = Sizes.of(spec, x, "tpu", Blocks(512, 512))
    sizes.call(kernel, spec, "q", given, results)     # a program for every block of queries of a head

Which blocks a program computes is a task mapping; a kernel is given the first of its tasks (`Sizes.mapping`).
Whole blocks are made of arrays by padding, unless there is one block alone.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from unity_jax.kernels.spec import AXES, WORD, Operands, Spec
from unity_jax.kernels.task_mapping import Task, TaskMapping, repeat, spatial
from unity_jax.kernels.tiles import LANES, POSITIONS, VMEM, padded, whole

Platform = Literal["tpu", "gpu", "cpu"]
"""For what kernels are compiled; on CPUs they are interpreted."""


class Blocks(NamedTuple):
    """How many queries and keys a step of a kernel takes."""

    queries: int
    keys: int


BLOCKS: Mapping[Platform, Blocks] = {"gpu": Blocks(POSITIONS, POSITIONS), "cpu": Blocks(128, 128)}
"""Of all kernels; for TPUs they are tuned."""

TUNED = Path(__file__).with_name("blocks.csv")
"""The best blocks of each kernel on TPUs, as `unity kernels tune` finds them."""


def best(spec: Spec, kernel: str, platform: Platform) -> Blocks:
    """The blocks of a kernel, of which arrays have one where they are shorter."""
    form = ("causal" if spec.causal else "all keys") + ("" if spec.keep == 1 else ", dropout")
    return BLOCKS[platform] if platform in BLOCKS else _tuned()[kernel, form]


@functools.cache
def _tuned() -> dict[tuple[str, str], Blocks]:
    with TUNED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["kernel"], row["form"]): Blocks(int(row["queries"]), int(row["keys"])) for row in rows}


ALONG = {"q": "q", "k": "kw"}
"""What is cut into blocks where queries are, and where keys are."""


class Sizes(NamedTuple):
    """**Fields:** `heads`: how many share keys; `queries`, `keys`: of a head; `blocks`: at most all of them."""

    heads: int
    queries: int
    keys: int
    blocks: Blocks
    platform: Platform

    @staticmethod
    def of(spec: Spec, x: Operands, platform: Platform, most: Blocks) -> Sizes:
        """Of arrays. What is no longer than a block is one, as long as it is: XLA:TPU takes as long to pad arrays as
        the kernel takes (197 positions of ViT), but there are whole words of what dropout keeps, and Triton has powers
        of two."""
        queries, keys = x.q.shape[2], x.k.shape[2]
        part = LANES if platform == "gpu" or spec.keep < 1 else 1
        least = Blocks(min(most.queries, whole(queries, part)), min(most.keys, whole(keys, part)))
        return Sizes(x.q.shape[1] // x.k.shape[1], queries, keys, least, platform)

    def whole(self, axis: str) -> int:
        """Queries, keys, or words of keys, in whole blocks."""
        if axis == "q":
            return whole(self.queries, self.blocks.queries)
        return whole(self.keys, self.blocks.keys) // (WORD if axis == "w" else 1)

    def call(
        self,
        kernel: Callable[..., None],
        spec: Spec,
        along: str,
        given: Mapping[str, jax.Array],
        results: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, jax.Array]:
        """Run a kernel on every block of queries or keys (`along`): its results, as large as asked for."""
        padded = {of: t if of == "seeds" else self._padded(of, t) for of, t in given.items()}
        shapes = {of: jax.ShapeDtypeStruct(self._shape(of, t), t.dtype) for of, t in results.items()}
        mapping = self.mapping(along, given["k"])

        def attention(*refs: Any) -> None:
            kernel(spec, self, mapping.first(_program(mapping)), *refs)

        with jax.named_scope(f"attention{kernel.__name__}" + "_causal" * spec.causal):  # profiles show it
            found = pl.pallas_call(
                attention,
                grid=mapping.grid,
                in_specs=[{of: self._block(of, t, along, mapping) for of, t in padded.items()}],
                out_specs={of: self._block(of, t, along, mapping) for of, t in shapes.items()},
                out_shape=shapes,
                interpret=self.platform == "cpu",
                compiler_params=self._parameters(padded | shapes, along, len(mapping.grid)),
            )(padded)
        return {of: found[of][tuple(map(slice, t.shape))] for of, t in results.items()}

    def mapping(self, along: str, k: jax.Array) -> TaskMapping:
        """Which scores each program computes: the tasks are, of each example and head, a block of queries and one of
        keys. A program has a block of queries and all keys, or a block of keys and all queries of its heads."""
        batch, groups = k.shape[:2]
        queries, keys = self.whole("q") // self.blocks.queries, self.whole("k") // self.blocks.keys
        if along == "q":
            return spatial(batch, groups * self.heads, queries, 1) * repeat(1, 1, 1, keys)
        return spatial(batch, groups, 1, keys) * repeat(1, self.heads, queries, 1)

    def _parameters(self, arrays: Mapping[str, Any], along: str, axes: int) -> Any:
        """What compilers are told: on TPUs what is read and written is on the chip, and what the next program reads."""
        if self.platform != "tpu":
            return plgpu.CompilerParams(num_warps=4, num_stages=2) if self.platform == "gpu" else None
        blocks = [(self._part(of, t, along), t.dtype.itemsize) for of, t in arrays.items() if of in AXES]
        held = sum(itemsize * math.prod(s[:-1]) * whole(s[-1], LANES) for s, itemsize in blocks)
        parallel: Literal["parallel"] = "parallel"
        return pltpu.CompilerParams(dimension_semantics=(parallel,) * axes, vmem_limit_bytes=VMEM + 2 * held)

    def _shape(self, of: str, t: Any) -> tuple[int, ...]:
        shared = "bhq" if of in ("bias", "mask") else ""  # by all, where there is one
        axes = zip(AXES[of], t.shape, strict=True)
        return tuple(n if n == 1 and axis in shared else self._size(axis, n) for axis, n in axes)

    def _size(self, axis: str, n: int) -> int:
        """How many there are with padding."""
        if axis == "f":
            return padded(n, self.platform)
        return self.whole(axis) if axis in "qkw" else n

    def _padded(self, of: str, t: jax.Array) -> jax.Array:
        by = [(0, n - m) for n, m in zip(self._shape(of, t), t.shape, strict=True)]
        return jnp.pad(t, by, constant_values=int(of == "sums"))  # what is divided by

    def _block(self, of: str, t: Any, along: str, mapping: TaskMapping) -> pl.BlockSpec:
        """What a program reads or writes of an array."""
        if of == "seeds":
            return pl.BlockSpec(memory_space=None if self.platform == "gpu" else pltpu.SMEM)

        def index(*program: Any) -> tuple[Any, ...]:
            b, h, i, j = mapping.first(program)
            group = h // self.heads
            at = {"b": b, "h": h if along == "q" else group, "g": group, "q": i, **dict.fromkeys("kw", j)}
            at = {axis: at[axis] for axis in ("b", "h", "g", *ALONG[along])}
            return tuple(at.get(axis, 0) if n > 1 else 0 for axis, n in zip(AXES[of], t.shape, strict=True))

        return pl.BlockSpec(self._part(of, t, along), index)

    def _part(self, of: str, t: Any, along: str) -> tuple[int, ...]:
        """The shape of what a program reads or writes of an array."""
        group = 1 if along == "q" else self.heads
        size = {"b": 1, "h": group, "g": 1, **{axis: self.whole(axis) for axis in "qkw"}}
        size |= {"q": self.blocks.queries} if along == "q" else {"k": self.blocks.keys, "w": self.blocks.keys // WORD}
        return tuple(min(size.get(axis, n), n) for axis, n in zip(AXES[of], t.shape, strict=True))


def _program(mapping: TaskMapping) -> Task:
    """Which program of the grid runs."""
    return tuple(pl.program_id(axis) for axis in range(len(mapping.grid)))
