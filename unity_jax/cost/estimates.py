"""What kernels and collectives take in the eyes of the compilers that order them, in microseconds.

XLA:GPU has an estimate for each on Hopper: the traffic of a kernel, and tables of products and of the collectives of a
node that were measured on an H100 (`SolLatencyEstimator` and `default_matmul_perf_table.txtpb` in
https://github.com/openxla/xla/tree/main/xla/service/gpu/model). Ours are lines through these tables. XLA:TPU counts the
traffic of fusions and loops, more than they take for matmuls and collectives, and a cycle for all else: single ops,
copies, gathers, scatters, sorts, what a reduction scatters.

Both log what they find (`TF_CPP_VMODULE=sol_latency_estimator=10` and `TPU_VMODULE=latency_hiding_scheduler=5`, with
`TPU_MIN_LOG_LEVEL=0 TPU_STDERR_LOG_LEVEL=0`); the second also tells why each step comes where it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unity_jax.cost.program import kernel_work
from unity_jax.machine.device import Device
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import Collective
from unity_jax.ops.rule import Shard
from unity_jax.xla.dots import product_size, split
from unity_jax.xla.fusion import Kernel
from unity_jax.xla.op_classes import PRODUCTS
from unity_jax.xla.targets import target_of

_UNKNOWN, _LIBRARY = 0.01, 10.0
"""Of a kernel that is not known, and of a convolution of cuDNN."""

_TPU_PRODUCTS = 1.7
"""How much longer XLA:TPU takes a matmul for."""
_TPU_COLLECTIVES = {"all_gather": 4.35, "all_reduce": 4.35, "all_to_all": 15.2, "permute": 8.7}
"""How much longer than through HBM a byte takes, of the larger of operand and result (libtpu 0.0.42, v5e)."""

_PRODUCT, _PRODUCTS = 6.3, 790e6
"""Microseconds of any product in the table, and the operations in one that come on top, of two bytes each."""
_BATCH, _SIZES = 4, (256, 4096)
"""The largest batch in the table, the least and the largest sizes; others take as long per operation."""

_COLLECTIVES = {
    "all_gather": ((0, 1e3, 2e6, 17e6, 134e6, 268e6), (0, 30, 31, 82, 390, 729)),
    "all_reduce": ((0, 1e3, 1e6, 17e6, 134e6, 1074e6), (0, 40, 50, 145, 670, 4721)),
    "reduce_scatter": ((0, 1e3, 1e6, 17e6, 134e6, 268e6), (0, 20, 20, 87, 411, 771)),
    "all_to_all": ((0, 1e3, 1e6, 8e6, 17e6, 51e6), (0, 40, 40, 71, 106, 167)),
}
"""Bytes, the larger of operand and result, and microseconds of eight devices."""


@dataclass(frozen=True)
class Estimates:
    """What the compiler for a machine takes things for (`xla.module.LatencyEstimator`), and what they take."""

    machine: Machine

    def kernel(self, kernel: Kernel) -> float:
        """Of a kernel. XLA:GPU knows nothing of loops and of the convolutions of a library. Two digits, so that equal
        kernels are equal."""
        device, root = self.machine.device, kernel.root
        target = target_of(device)
        if not target.tabled:
            return _tpu_microseconds(kernel, device)
        if root.bodies:
            return _UNKNOWN
        if root.name == "conv_general_dilated" and target.library:
            return _LIBRARY
        if root.name == "dot_general" and root.shard is not None and target.library:
            found = _product_microseconds(root.shard)
        else:
            found = 1e6 * kernel_work(kernel, device)._replace(launches=0).seconds(device)
        return max(float(f"{found:.1e}"), _UNKNOWN)

    def fill(self, nbytes: float) -> float:
        """Of filling an array with a constant."""
        device = self.machine.device
        return 1e6 * nbytes / device.memory_bandwidth if target_of(device).tabled else _UNKNOWN

    def collectives(self, combined: Sequence[Collective]) -> float:
        """Of collectives of one kind that are combined, from their start to their end."""
        nbytes, device = sum(c.bytes for c in combined), self.machine.device
        if not target_of(device).tabled:
            return 1e6 * nbytes * _TPU_COLLECTIVES.get(combined[0].kind, 0.0) / device.memory_bandwidth
        seconds = sum(c.seconds for c in combined)
        tabled = _COLLECTIVES.get(combined[0].kind)
        return max(1e6 * seconds, float(np.interp(nbytes, *tabled)) if tabled else 0.0)

    def seconds(self, kernel: Kernel) -> tuple[float, bool]:
        """How long a kernel really takes, and whether memory bounds it."""
        work = kernel_work(kernel, self.machine.device)
        return work.seconds(self.machine.device), work.matrix <= max(work.memory, work.chip)


def _tpu_microseconds(kernel: Kernel, device: Device) -> float:
    if kernel.root.bodies:
        return _UNKNOWN
    work = kernel_work(kernel, device)
    if kernel.root.name in PRODUCTS:
        return 1e6 * max(_TPU_PRODUCTS * work.matrix, work.memory)
    return _UNKNOWN if len(kernel.ops) == 1 else 1e6 * work.memory


def _product_microseconds(shard: Shard) -> float:
    """Of a matmul. For types that are not in its table XLA:GPU looks up the sizes in bytes, and counts as many
    operations as there were if these were sizes: a product of bfloat16 into float32, as that of a part of its depth,
    takes 64 times as long."""
    batch, rows, columns, depth = product_size(shard)
    parts = split(shard).count
    taken = max(t.itemsize for t in shard.op.inputs)
    made = 4 if parts > 1 else shard.op.outputs[0].itemsize
    scale, per_row, rate = (1, 1.0, _PRODUCTS * 2 / taken) if made == taken else (made, made / 2, _PRODUCTS)
    sizes = rows, columns, depth / parts
    tabled = 2 * min(batch * parts, _BATCH) * math.prod(min(max(n * per_row, _SIZES[0]), _SIZES[1]) for n in sizes)
    return 2 * batch * parts * math.prod(n * scale for n in sizes) * (_PRODUCT / tabled + 1 / rate)
