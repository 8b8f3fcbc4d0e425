"""XLA:GPU adds the products of a matmul to an array in the kernel of the matmul.

    dot a b -> add c   ->   one kernel, which reads a, b and c

cuBLAS scales and adds an operand by itself
(https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/gemm_rewriter.cc, `FuseMatrixBiasAdd`), and a
matmul of Triton takes the sum in behind its tiles
(https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/gemm_fusion.cc, `FuseDotOutput`): whichever of them
the autotuner prefers, the products are added where nothing else reads them. So are the gradients of a weight that a
loop uses in each iteration.
"""

from __future__ import annotations

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.xla.aliases import Readers, is_alias
from unity_jax.xla.dots import split


def gemm_rewriter(graph: Graph, readers: Readers) -> dict[Op, Op]:
    """The sums that a matmul computes, and that matmul: one of the two operands is all that reads its products, the
    other is an array of this type and shape."""
    found: dict[Op, Op] = {}
    for op in graph.ops:
        if op.name not in ("add", "add_any") or any(t.shape != op.outputs[0].shape for t in op.inputs):
            continue
        made = (_made(graph, t) for t in op.inputs)
        for product in made:
            if product is None or product.name != "dot_general" or readers.escapes(product):
                continue
            if product.shard is not None and split(product.shard).count > 1:
                continue  # what adds up the parts is a loop, which is fused as any
            if readers.of(product) == [op] and product.outputs[0].dtype == op.outputs[0].dtype:
                found[op] = product
                break
    return found


def _made(graph: Graph, t: Tensor) -> Op | None:
    """What makes a tensor, through aliases."""
    while (op := graph.producer.get(t)) is not None and is_alias(op) and op.name != "optimization_barrier":
        t = op.inputs[op.outputs.index(t)]
    return op
