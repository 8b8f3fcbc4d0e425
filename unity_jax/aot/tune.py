"""Which blocks kernels of attention take on TPUs: those with the shortest schedules that libtpu writes.

    for row in tuned(["v5e:2x4", "v6e:2x4"], track): ...    # no TPU is needed, but the extra tpu-aot

The space is of what the hardware takes and not of shapes (Hidet, Ding et al., ASPLOS 2023, section 5): a few sides of
blocks, each as good for every number of positions, whose last block may be padded. Each pass is compiled for every
device with each of them, at one length; it takes those with which it is fastest over all devices (the geometric mean).
What a kernel waits for memory is in no schedule: it reads and writes next to nothing. Shorter arrays have one block.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unity_jax.aot.bundles import empty, schedules, written
from unity_jax.aot.cycles import CLOCKS
from unity_jax.aot.hlo import Module, parse
from unity_jax.aot.topologies import topology
from unity_jax.kernels import flash
from unity_jax.kernels.grid import TUNED as TUNED
from unity_jax.kernels.grid import Blocks, Sizes, best
from unity_jax.kernels.spec import Operands, Spec

KERNELS = ("forward", "backward_queries", "backward_keys")
SIDES = (256, 512, 1024)
HEADS, LENGTH, FEATURES, KEEP = 8, 4096, 128, 0.9
FORMS = {f"{'causal' if c else 'all keys'}{'' if k == 1 else ', dropout'}": (c, k) for k in (1.0, KEEP) for c in (0, 1)}


class Tuned(NamedTuple):
    """A row of the table. **Fields:** `milliseconds`: of 8 heads of 4,096 positions and 128 features in bfloat16, by
    device; `default`: the same with blocks of 512."""

    kernel: str
    form: str
    blocks: Blocks
    milliseconds: dict[str, float]
    default: dict[str, float]


def tuned(on: Sequence[str], track: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> list[Tuned]:
    """The best blocks of each pass. Raises `ImportError` without the extra `tpu-aot`."""
    space = [Blocks(*sides) for sides in itertools.product(SIDES, SIDES)]
    wanted = [(form, name, blocks) for form in FORMS for name in on for blocks in space]
    with written():
        found = {(form, name, blocks): milliseconds(form, name, blocks) for form, name, blocks in track(wanted)}
    rows = []
    for form, kernel in itertools.product(FORMS, KERNELS):

        def of(blocks: Blocks, form: str = form, kernel: str = kernel) -> dict[str, float]:
            return {name.partition(":")[0]: found[form, name, blocks][kernel] for name in on}

        best = min(space, key=lambda blocks: math.prod(of(blocks).values()))
        rows.append(Tuned(kernel, form, best, of(best), of(Blocks(512, 512))))
    return rows


def milliseconds(form: str, on: str, blocks: Blocks) -> dict[str, float]:
    """Of each pass on a device, with these blocks."""
    causal, keep = FORMS[form]
    spec = Spec(FEATURES**-0.5, bool(causal), keep)
    found = cycles(parse(_compiled(spec, on, blocks).as_text() or ""), spec, LENGTH, blocks)
    return {kernel: 1e3 * n / CLOCKS[on.partition(":")[0]] for kernel, (_, n) in found.items()}


def cycles(module: Module, spec: Spec, length: int, blocks: Blocks | None = None) -> dict[str, tuple[str, int]]:
    """Of each pass, the instruction that is its kernel, and the cycles of its schedule; of the module compiled last.

    **Arguments:** `length`: how many queries and keys there are; `blocks`: those that the table says, by default.
    """
    found = {}
    for kernel in KERNELS:
        sizes = Sizes(1, length, length, blocks or best(spec, kernel, "tpu"), "tpu")
        for name, n in schedules(module, _trips(spec, sizes, "k" if kernel == "backward_keys" else "q")).items():
            if re.fullmatch(rf"%attention_{kernel}(_causal)?(\.\d+)?", name):
                found[kernel] = name, n
    return found


def _trips(spec: Spec, sizes: Sizes, along: str) -> tuple[float, ...]:
    """How often the loops of a kernel run whose number of steps depends on the program: on average."""
    if not spec.causal:
        return ()
    ranges = [
        flash.blocks_of_keys(spec, sizes, (0, 0, i, 0)) if along == "q" else flash.blocks_of_queries(spec, sizes, i)
        for i in range(sizes.whole(along) // (sizes.blocks.queries if along == "q" else sizes.blocks.keys))
    ]
    return tuple(float(np.mean([stop - first for first, stop in loop])) for loop in zip(*ranges, strict=True))


def _compiled(spec: Spec, on: str, blocks: Blocks) -> jax.stages.Compiled:
    """Both passes, on every device of a topology for itself."""
    mesh, everywhere = Mesh(np.array(topology(on)), ("x",)), PartitionSpec()

    def shape(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, everywhere))

    def both(q: Any, k: Any, v: Any, cotangent: Any, seeds: Any) -> Any:
        x = Operands(q, k, v, seeds=seeds if spec.keep < 1 else None)
        found = flash.forward(spec, x, "tpu", blocks)
        return found.output, flash.backward(spec, x, found, cotangent, "tpu", blocks)

    each = jax.shard_map(both, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    empty()
    q = shape(jnp.bfloat16, 1, HEADS, LENGTH, FEATURES)
    return jax.jit(each).lower(q, q, q, q, shape(jnp.uint32, 1, HEADS, 4)).compile()


def as_text(rows: Sequence[Tuned]) -> str:
    """The table as it ships, `blocks.csv`."""
    devices = list(rows[0].milliseconds)
    head = ["kernel", "form", "queries", "keys", *(f"{of} ms{by}" for by in ("", " by 512") for of in devices)]
    lines = [",".join(head)]
    for row in rows:
        times = (f"{n:.4g}" for found in (row.milliseconds, row.default) for n in found.values())
        lines.append(",".join([row.kernel, f'"{row.form}"', *map(str, row.blocks), *times]))
    return "".join(f"{line}\n" for line in lines)
