"""What kernels get out of a TPU, from the cycles that XLA:TPU estimates for single matmuls and elementwise kernels.

    python experiments/cycles.py v5e:2x4 v5p:2x2x2 v6e:2x4 v4-cores:2x2x1     # needs the extra tpu-aot, no TPU

These are where the efficiencies of `unity_jax/machine/presets.py` come from; both are printed side by side.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from unity_jax.machine.machine import Machine
from unity_jax.report.aot import topology
from unity_jax.report.cycles import CLOCKS
from unity_jax.report.hlo import parse

BIG = 8192


def cycles(fn: Callable[..., Any], device: jax.Device, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> int:
    """The cycles of a function of arrays of these shapes, compiled for one device."""
    args = [jax.ShapeDtypeStruct(s, dtype, sharding=SingleDeviceSharding(device)) for s in shapes]
    module = parse(jax.jit(fn).lower(*args).compile().as_text())
    return sum(op.cycles or 0 for op in module.computations[module.entry].values())


def rates(device: jax.Device, clock: float) -> Iterator[tuple[str, float]]:
    """Each constant of a `Device`, as the compiler sees it."""

    def per_second(amount: float, fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> float:
        return amount / cycles(fn, device, *shapes, dtype=dtype) * clock

    yield "matmul_flops", per_second(2.0 * 2048 * BIG * BIG, jnp.matmul, (2048, BIG), (BIG, BIG))
    yield "memory_bandwidth", per_second(8.0 * BIG * BIG, lambda x: x + 1, (BIG, BIG), dtype=jnp.float32)
    yield "results_per_second", per_second(1.0 * BIG * BIG, jnp.matmul, (BIG, 64), (64, BIG))
    yield "kernel_overhead", cycles(lambda x: x + 1, device, (8, 128), dtype=jnp.float32) / clock


def main() -> None:
    table = Table("chip", "constant", "compiler", "preset", "of the peak")
    for name in sys.argv[1:] or ["v5e:2x4"]:
        spec = Machine.preset(name).device
        device = topology(name.replace("-cores", ""))[0]
        peaks = {"matmul_flops": spec.flops_per_second("bfloat16"), "memory_bandwidth": spec.memory_bandwidth}
        presets = {
            "matmul_flops": peaks["matmul_flops"] * spec.matmul_efficiency,
            "memory_bandwidth": peaks["memory_bandwidth"] * spec.memory_efficiency,
            "results_per_second": spec.results_per_second,
            "kernel_overhead": spec.kernel_overhead,
        }
        for constant, found in rates(device, CLOCKS[name.split(":")[0].removesuffix("-cores")]):
            part = f"{found / peaks[constant]:.2f}" if constant in peaks else ""
            table.add_row(name, constant, f"{found:.3g}", f"{presets[constant]:.3g}", part)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
