"""What kernels and collectives take in the eyes of the compilers that order them, in microseconds.

XLA:GPU has an estimate for each on Hopper: the traffic of a kernel, and tables of products and of the collectives of one
node that were measured on an H100 (`SolLatencyEstimator` and `default_matmul_perf_table.txtpb` in
https://github.com/openxla/xla/tree/main/xla/service/gpu/model; it logs what it finds with
`TF_CPP_VMODULE=sol_latency_estimator=10`). Ours are lines through these tables. What XLA:TPU estimates is not known: all
kernels are alike, and five run beside a collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from unity_jax.cost.kernels import Kernel
from unity_jax.cost.products import product_size, split
from unity_jax.cost.program import Collective, kernel_work
from unity_jax.machine.machine import Machine
from unity_jax.ops.rule import Shard

_UNKNOWN, _KERNEL, _COLLECTIVE = 0.01, 1000.0, 5000.0

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


def kernel_microseconds(kernel: Kernel, machine: Machine) -> float:
    """Of a kernel. XLA:GPU knows nothing of loops and of the convolutions of a library. Two digits, so that equal
    kernels are equal."""
    device, root = machine.device, kernel.root
    if device.compiler == "tpu":
        return _KERNEL
    if root.bodies or (root.name == "conv_general_dilated" and device.compiler == "gpu"):
        return _UNKNOWN
    if root.name == "dot_general" and root.shard is not None and device.compiler == "gpu":
        found = _product_microseconds(root.shard)
    else:
        found = 1e6 * kernel_work(kernel, device)._replace(launches=0).seconds(device)
    return max(float(f"{found:.1e}"), _UNKNOWN)


def written_microseconds(nbytes: float, machine: Machine) -> float:
    """Of filling an array with a constant."""
    return _KERNEL if machine.device.compiler == "tpu" else 1e6 * nbytes / machine.device.memory_bandwidth


def _product_microseconds(shard: Shard) -> float:
    """Of a matmul. For types that are not in its table XLA:GPU looks up the sizes in bytes, and counts as many
    operations as there were if these were sizes: a product of bfloat16 into float32, as that of a part of its depth,
    takes 64 times as long."""
    batch, *sizes = product_size(shard)
    parts = split(shard).count
    taken = max(t.itemsize for t in shard.op.inputs)
    made = 4 if parts > 1 else shard.op.outputs[0].itemsize
    scale = 1 if made == taken else made
    rate = _PRODUCTS * 2 / taken if made == taken else _PRODUCTS
    sizes[-1] /= parts
    least, most = _SIZES
    near = [min(max(n * (scale / 2 if scale > 1 else 1), least), most) for n in sizes]
    tabled = 2 * min(batch * parts, _BATCH) * math.prod(near)
    flops = 2 * batch * parts * math.prod(n * scale for n in sizes)
    return flops * (_PRODUCT / tabled + 1 / rate)


def collective_microseconds(together: Sequence[Collective], machine: Machine) -> float:
    """Of collectives of one kind that are combined, from their start to their end."""
    if machine.device.compiler == "tpu":
        return _COLLECTIVE
    seconds, nbytes = sum(c.seconds for c in together), sum(c.bytes for c in together)
    tabled = _COLLECTIVES.get(together[0].kind)
    return max(1e6 * seconds, float(np.interp(nbytes, *tabled)) if tabled else 0.0)
