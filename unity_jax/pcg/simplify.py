"""Rewriting that is always right and always wanted, before anything is planned."""

from __future__ import annotations

import dataclasses
from collections import Counter

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan


def fold_transposes(graph: Graph) -> Graph:
    """`transpose(dot_general(x, y))` as `dot_general(y, x)`, where that is all the transposition does.

    JAX writes the gradient of a weight like this. The compilers fold it too, but not across the gradient's all-reduce,
    which stands between the two in a planned program: XLA:TPU then keeps the gradient in the layout of the product and
    copies the weight there and back (measured on a chain of matmuls for v5e: twice the cycles of the whole step).
    """
    uses = Counter(t for op in graph.ops for t in op.inputs)
    uses.update(graph.outputs)
    products = {op.outputs[0]: op for op in graph.ops if op.name == "dot_general" and _is_symmetric(op)}
    folded: dict[Op, Tensor] = {}
    dropped: set[Op] = set()
    for op in graph.ops:
        product = products.get(op.inputs[0]) if op.name == "transpose" else None
        if product is not None and uses[op.inputs[0]] == 1 and tuple(op.params["permutation"]) == _swapped(product):
            folded[product] = op.outputs[0]
            dropped.add(op)
    ops = [_swap(op, folded[op]) if op in folded else op for op in graph.ops if op not in dropped]
    return Graph(graph.inputs, graph.outputs, ops)


def _is_symmetric(product: Op) -> bool:
    """Whether its parameters can change sides; a `DotAlgorithm` may treat its operands differently."""
    precision = product.params["precision"]
    return precision is None or isinstance(precision, tuple)


def _swapped(product: Op) -> tuple[int, ...]:
    """The permutation of a product's result that exchanges its operands' free dimensions."""
    (lhs_k, _), (lhs_b, _) = product.params["dimension_numbers"]
    batch, middle, rank = len(lhs_b), product.inputs[0].rank - len(lhs_k), product.outputs[0].rank
    return (*range(batch), *range(middle, rank), *range(batch, middle))


def _swap(product: Op, result: Tensor) -> Op:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = product.params["dimension_numbers"]
    params = {**product.params, "dimension_numbers": ((rhs_k, lhs_k), (rhs_b, lhs_b))}
    if params["precision"] is not None:
        params["precision"] = params["precision"][::-1]
    return dataclasses.replace(product, inputs=product.inputs[::-1], outputs=(result,), params=params)


def sink_broadcasts(graph: Graph) -> Graph:
    """Broadcast inside a `scan` what it would take in broadcast.

    Differentiating a `scan` hoists what does not change out of it, such as a causal mask over all heads and sequences,
    which is then in memory for the whole loop.
    """
    ops = [_sunk(op, graph.producer) if op.name == "scan" else op for op in graph.ops]
    return Graph(graph.inputs, graph.outputs, ops)


def _sunk(scan: Op, producer: dict[Tensor, Op]) -> Op:
    roles, (body,) = Scan.of(scan.params), scan.bodies
    operands, inputs, inside = [], [], []
    for outer, inner in zip(scan.inputs[roles.constants], body.inputs[roles.constants], strict=True):
        made = producer.get(outer)
        if (
            made is None
            or made.name != "broadcast_in_dim"
            or len(made.inputs) > 1
            or 2 * made.inputs[0].nbytes > outer.nbytes
        ):
            operands.append(outer)
            inputs.append(inner)
            continue
        (source,) = made.inputs
        if source.literal is None:
            operands.append(source)
            inputs.append(source := Tensor(source.shape, source.dtype))
        inside.append(dataclasses.replace(made, inputs=(source,), outputs=(inner,)))
    if not inside:
        return scan
    params, changing = roles.with_constants(scan.params, len(operands)), slice(roles.carried.start, None)
    small = sink_broadcasts(Graph((*inputs, *body.inputs[changing]), body.outputs, [*inside, *body.ops]))
    return dataclasses.replace(scan, inputs=(*operands, *scan.inputs[changing]), params=params, bodies=(small,))
