"""What XLA sends in place of the bytes of an all-gather: fewer, where a cast or a copy can run after it or before.

    convert to float32 -> combine     bfloat16 is gathered, and cast then
    combine -> convert to bfloat16    cast first
    broadcast_in_dim -> combine       nothing, if the gathered dimension is new: every device has the value

Seen in programs compiled for eight H100 and for v5e.
"""

from __future__ import annotations

from unity_jax.pcg.graph import Graph, Op
from unity_jax.xla.aliases import is_alias


def sent(graph: Graph) -> dict[Op, float]:
    """The part of its bytes that an all-gather of a planned graph sends; those that are not told send all."""
    producer = graph.producer
    outputs = set(graph.outputs)
    found: dict[Op, float] = {}
    for op in graph.ops:
        if op.move is None or op.move.kind != "combine":
            continue
        (operand,), (result,) = op.inputs, op.outputs
        maker = producer.get(operand)
        if maker is not None and maker.name == "broadcast_in_dim":
            dims = maker.params["broadcast_dimensions"]
            if all(size == 1 for size, d in zip(maker.inputs[0].shape, dims, strict=True) if d == op.move.dim):
                found[op] = 0.0
            continue
        while maker is not None and is_alias(maker):
            maker = producer.get(maker.inputs[0])
        sizes = [result.itemsize]
        if maker is not None and maker.name == "convert_element_type":
            sizes.append(maker.inputs[0].itemsize)
        used = graph.readers.get(result, ())
        if used and result not in outputs and all(r.name == "convert_element_type" for r in used):
            sizes.append(max(r.outputs[0].itemsize for r in used))
        if min(sizes) < result.itemsize:
            found[op] = min(sizes) / result.itemsize
    return found
