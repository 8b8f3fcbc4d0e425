"""What kernels get out of a TPU, from the cycles that XLA:TPU estimates for single matmuls and elementwise kernels.

    python -m experiments.validation.cycles v5e:2x4 v5p:2x2x2 v6e:2x4 v4-cores:2x2x1    # with the extra tpu-aot, no TPU

These are where the efficiencies of `unity_jax/machine/presets.py` come from; both are printed side by side. What
gathers and scatters rows has no estimate: its schedules count instead (`unity_jax/aot/bundles.py`). A second
table has what XLA:TPU counts for elementwise kernels and copies, in cycles per 1024 elements, beside what
`unity_jax/cost` expects: the traffic, one pass over float32 values where a kernel rounds to less or reduces, and what a
kernel of one instruction takes besides.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from unity_jax.aot.bundles import empty, schedules, written
from unity_jax.aot.cycles import CLOCKS, estimated_cycles
from unity_jax.aot.hlo import parse
from unity_jax.aot.topologies import topology
from unity_jax.cost.program import kernel_seconds
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.search.rule_cache import RuleCache
from unity_jax.xla.fusion import kernels

BIG = 8192
F32, BF16 = jnp.float32, jnp.bfloat16


def cycles(fn: Callable[..., Any], device: jax.Device, *args: Any, dtype: Any = jnp.bfloat16) -> int:
    """The cycles of a function of arrays (shapes of one dtype, or with a dtype each), compiled for one device."""
    args = [a if isinstance(a, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(a, dtype) for a in args]
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=SingleDeviceSharding(device)) for a in args]
    module = parse(jax.jit(fn).lower(*args).compile().as_text())
    return sum(op.cycles or 0 for op in module.computations[module.entry].values())


def accumulated(device: jax.Device) -> float:
    """The cycles of adding a product to an array that stays on the chip, as a loop does."""

    def add(total: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + pair[0].T @ pair[1], None

    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.scan(add, jnp.zeros((1024, 4096), x.dtype), (x, y))[0]

    on = SingleDeviceSharding(device)
    args = [jax.ShapeDtypeStruct((64, 16, n), jnp.bfloat16, sharding=on) for n in (1024, 4096)]
    return estimated_cycles(parse(jax.jit(run).lower(*args).compile().as_text())).total / 64


def rates(device: jax.Device, clock: float) -> Iterator[tuple[str, float]]:
    """Each constant of a `Device`, as the compiler sees it."""

    def per_second(amount: float, fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> float:
        return amount / cycles(fn, device, *shapes, dtype=dtype) * clock

    yield "matmul_flops", per_second(2.0 * 2048 * BIG * BIG, jnp.matmul, (2048, BIG), (BIG, BIG))
    yield "memory_bandwidth", per_second(8.0 * BIG * BIG, lambda x: x + 1, (BIG, BIG), dtype=jnp.float32)
    yield "results_per_second", per_second(1.0 * BIG * BIG, jnp.matmul, (BIG, 64), (64, BIG))
    yield "fast_results_per_second", 1024 * 4096 / accumulated(device) * clock
    fused, alone = (cycles(f, device, (BIG, BIG), dtype=jnp.float32) for f in (lambda x: 2 * jnp.exp(x), jnp.exp))
    yield "unfused_per_second", BIG * BIG / (alone - fused) * clock
    yield "kernel_overhead", cycles(lambda x: x + 1, device, (8, 128), dtype=jnp.float32) / clock


ROWS, TABLE = 32768, (250_000, 128)


def row_rates(device: jax.Device, clock: float) -> Iterator[tuple[str, float]]:
    """How many rows of a table in memory kernels read, and add to zeros, besides their traffic."""
    on = SingleDeviceSharding(device)
    table, updates = (jax.ShapeDtypeStruct(shape, F32, sharding=on) for shape in (TABLE, (ROWS, TABLE[1])))
    ids = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=on)

    def per_second(fn: Callable[..., jax.Array], *args: jax.ShapeDtypeStruct) -> float:
        empty()
        module = parse(jax.jit(fn).lower(*args).compile().as_text())
        return ROWS / sum(schedules(module).values()) * clock

    yield "gathered_rows_per_second", per_second(lambda t, i: t[i], table, ids)
    yield "scattered_rows_per_second", per_second(lambda i, u: jnp.zeros(TABLE, F32).at[i].add(u), ids, updates)


def six(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """A function applied so often that it takes longer than the memory."""
    return functools.reduce(lambda x, _: fn(x), range(6), x)


KERNELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add a constant": (lambda x: x + 1, (F32,)),
    "multiply and add": (lambda x, y: x * y + x, (F32, F32)),
    "add": (lambda x, y: x + y, (F32, F32)),
    "exp": (jnp.exp, (F32,)),
    "sum of squares": (lambda x: jnp.sum(x * x, -1), (F32,)),
    "sum": (lambda x: jnp.sum(x, -1), (F32,)),
    "multiply and add, bfloat16": (lambda x, y: x * y + x, (BF16, BF16)),
    "sum of squares, bfloat16": (lambda x: jnp.sum(jnp.square(x.astype(F32)), -1), (BF16,)),
    "round": (lambda x: (x * 2).astype(BF16), (F32,)),
    "widen": (lambda x: x.astype(F32) * 2, (BF16,)),
    "fill": (lambda x: (jnp.zeros((BIG, BIG), F32), x[0, 0]), (F32,)),
    **{f"{fn.__name__}, six times": (functools.partial(six, fn), (F32,)) for fn in (lax.erf, lax.erf_inv, lax.erfc)},
}


def expected(fn: Callable[..., Any], machine: Machine, *args: jax.ShapeDtypeStruct) -> float:
    """The seconds that the cost model expects of a function of these arrays, on one device."""
    graph = trace(fn, args, {}).graph
    rules, mesh = RuleCache(), MeshAxes(("x",), (1,))
    found = 0.0
    for kernel in kernels(graph, machine.device.compiler):
        for op in kernel.ops:
            op.shard = rules.shard(op, mesh, (-1,))
        found += kernel_seconds(kernel, machine.device)
    return found


def main() -> None:
    with written():
        show(sys.argv[1:] or ["v5e:2x4"])


def show(topologies: Sequence[str]) -> None:
    table = Table("chip", "constant", "compiler", "preset", "of the peak")
    second = Table("chip", "kernel", "compiler", "expected", "ratio")
    for name in topologies:
        spec = Machine.preset(name).device
        device = topology(name.replace("-cores", ""))[0]
        peaks = {"matmul_flops": spec.flops_per_second("bfloat16"), "memory_bandwidth": spec.memory_bandwidth}
        presets = {
            "matmul_flops": peaks["matmul_flops"] * spec.matmul_efficiency,
            "memory_bandwidth": peaks["memory_bandwidth"] * spec.memory_efficiency,
            "results_per_second": spec.results_per_second,
            "fast_results_per_second": spec.fast_results_per_second,
            "unfused_per_second": spec.unfused_per_second,
            "gathered_rows_per_second": spec.gathered_rows_per_second,
            "scattered_rows_per_second": spec.scattered_rows_per_second,
            "kernel_overhead": spec.kernel_overhead,
        }
        clock = CLOCKS[name.split(":")[0].removesuffix("-cores")]
        for constant, found in (*rates(device, clock), *row_rates(device, clock)):
            part = f"{found / peaks[constant]:.2f}" if constant in peaks else ""
            table.add_row(name, constant, f"{found:.3g}", f"{presets[constant]:.3g}", part)
        for kernel, (fn, dtypes) in KERNELS.items():
            args = [jax.ShapeDtypeStruct((BIG, BIG), dtype) for dtype in dtypes]
            per = 1024 / BIG**2
            found, wanted = cycles(fn, device, *args) * per, expected(fn, Machine.preset(name), *args) * clock * per
            second.add_row(name, kernel, f"{found:.1f}", f"{wanted:.1f}", f"{wanted / found:.2f}")
    console = Console(width=110)
    console.print(table)
    console.print(second)


if __name__ == "__main__":
    main()
