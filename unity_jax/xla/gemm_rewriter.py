"""XLA:GPU gives cuBLAS memory for a matmul, and may leave any matmul to it; a split matmul has the parts of its sum
(https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/gemm_rewriter.cc).

    dot_general   ->   dot_general needs 33554432
"""

from __future__ import annotations

from unity_jax.xla.dots import split
from unity_jax.xla.module import Module


def gemm_rewriter(module: Module) -> None:
    for i in module.instructions:
        if i.opcode == "dot_general" and i.kernel is not None and i.kernel.root.shard is not None:
            _, *parts = split(i.kernel.root.shard)
            i.workspace = max(sum(parts), module.storage.device.workspace_bytes)
