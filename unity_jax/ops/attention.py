"""Rules of attention as one op of each pass (`kernels.primitive`): split by the batch and by heads."""

from __future__ import annotations

import math
from typing import Any

from unity_jax.ops.rule import Rule, make_rule, register
from unity_jax.pcg.graph import Op, Tensor

OPS = ("attention", "attention_back")
PRODUCTS = dict(zip(OPS, (2, 7), strict=True))
"""Products of matrices of all queries and all keys: the backward pass computes scores and their cotangents twice."""


@register(*OPS)
def attention(op: Op) -> Rule:
    """`([b,gr,q,f], [b,g,k,f], [b,g,k,f], ...)`: g groups of r heads that share keys, of which only all together have
    the cotangents of these. What is said of a batch and of heads is a factor where an array has all of them."""
    q, k = op.inputs[:2]
    heads: Any = ("g", "r")
    sizes = {"b": q.shape[0], "g": k.shape[1], "r": q.shape[1] // k.shape[1]}

    def labels(i: int, t: Tensor) -> list[Any]:
        shared = t.shape[1] == k.shape[1] and i in (1, 2)
        return ["b", "g" if shared else heads, *[None] * (t.rank - 2)]

    back = op.name == OPS[1]
    of_results = (0, 1, 2) if back else (0,) * len(op.outputs)
    return make_rule(
        op,
        [labels(i, t) for i, t in enumerate(op.inputs)],
        [labels(i, t) for i, t in zip(of_results, op.outputs, strict=True)],
        kinds={"r": "replicate"} if back else {},
        sizes=sizes,
        no_pad=("g", "r"),
        flops=PRODUCTS[op.name] * _product_flops(op),
    )


def _product_flops(op: Op) -> float:
    """Of one product, of those scores that a causal mask does not hide."""
    q, k = op.inputs[:2]
    queries, keys = q.shape[2], k.shape[2]
    seen = 0.5 * (1 + 1 / max(queries, 1)) if op.params["spec"].causal else 1.0
    return 2 * seen * math.prod(q.shape) * keys
