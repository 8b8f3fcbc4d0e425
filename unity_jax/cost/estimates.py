"""What kernels and collectives take in the eyes of XLA:GPU, which orders them by that, in microseconds.

XLA:GPU has an estimate for each on Hopper: the traffic of a kernel, and tables of products and of the collectives of a
node that were measured on an H100 (`SolLatencyEstimator` and `default_matmul_perf_table.txtpb` in
https://github.com/openxla/xla/tree/main/xla/service/gpu/model). Ours are lines through these tables. It logs what
it finds (`TF_CPP_VMODULE=sol_latency_estimator=10`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unity_jax.cost.program import kernel_work
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import Collective
from unity_jax.ops.rule import Shard
from unity_jax.xla.dots import product_size, split
from unity_jax.xla.kernel import Kernel

_UNKNOWN, _LIBRARY = 0.01, 10.0
"""Of a kernel that is not known, and of a convolution of cuDNN."""

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
    """What XLA:GPU takes things for (`xla.module.LatencyEstimator`), and what they take on any machine."""

    machine: Machine

    def kernel(self, kernel: Kernel) -> float:
        """Of a kernel. XLA:GPU knows nothing of loops and of the convolutions of a library. Two digits, so that equal
        kernels are equal."""
        device, root = self.machine.device, kernel.root
        if root.bodies:
            return _UNKNOWN
        if root.name == "conv_general_dilated":
            return _LIBRARY
        if root.name == "dot_general" and root.shard is not None:
            found = _product_microseconds(root.shard)
        else:
            found = 1e6 * kernel_work(kernel, device)._replace(launches=0).seconds(device)
        return max(float(f"{found:.1e}"), _UNKNOWN)

    def fill(self, nbytes: float) -> float:
        """Of filling an array with a constant."""
        return 1e6 * nbytes / self.machine.device.memory_bandwidth

    def collectives(self, combined: Sequence[Collective]) -> float:
        """Of collectives of one kind that are combined, from their start to their end."""
        nbytes = sum(c.bytes for c in combined)
        seconds = sum(c.seconds for c in combined)
        tabled = _COLLECTIVES.get(combined[0].kind)
        return max(1e6 * seconds, float(np.interp(nbytes, *tabled)) if tabled else 0.0)

    def seconds(self, kernel: Kernel) -> tuple[float, bool]:
        """How long a kernel really takes, and whether memory bounds it."""
        work = kernel_work(kernel, self.machine.device)
        return work.seconds(self.machine.device), work.matrix <= max(work.memory, work.chip)


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
