"""XLA:GPU adds the products of a matmul to an argument in the kernel of the matmul.

    dot a b -> add c   ->   one kernel, which reads a, b and c

A matmul of Triton takes the sum in behind its tiles, if the other operand is an argument of the computation: of the
step, or what a loop carries, as are the gradients of a weight that each of its iterations uses
(https://github.com/openxla/xla/blob/main/xla/service/gpu/triton_tiling_propagation.cc,
`GetPropagatedDimOrdersAndRequirementsIfProfitablyFusible`; what is computed before is no such operand). cuBLAS adds to
an operand by itself, also to what is computed
(https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/gemm_rewriter.cc, `FuseMatrixBiasAdd`), but gets
only what Triton cannot take, and what the autotuner gives back behind this.
"""

from __future__ import annotations

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.xla.aliases import Readers, is_alias
from unity_jax.xla.dots import split


def gemm_rewriter(graph: Graph, readers: Readers) -> dict[Op, Op]:
    """The sums that a matmul computes, and that matmul: one of the two operands is all that reads its products, the
    other is an argument of this type and shape."""
    found: dict[Op, Op] = {}
    arguments = {*graph.inputs}
    for op in graph.ops:
        if op.name in ("add", "add_any") and all(t.shape == op.outputs[0].shape for t in op.inputs):
            for product, other in zip(op.inputs, reversed(op.inputs), strict=True):
                made_by, given = graph.producer.get(_base(graph, product)), _base(graph, other)
                if made_by is not None and given in arguments and _is_added(made_by, op, readers):
                    found[op] = made_by
    return found


def _is_added(product: Op, total: Op, readers: Readers) -> bool:
    """Whether a matmul can compute a sum. What adds up the parts of a split one is a loop, which is fused as any."""
    if product.name != "dot_general" or readers.escapes(product) or readers.of(product) != [total]:
        return False
    whole = product.shard is None or split(product.shard).count <= 1
    return whole and product.outputs[0].dtype == total.outputs[0].dtype


def _base(graph: Graph, t: Tensor) -> Tensor:
    """A tensor, or what it is a view of."""
    while (op := graph.producer.get(t)) is not None and is_alias(op) and op.name != "optimization_barrier":
        t = op.inputs[op.outputs.index(t)]
    return t
