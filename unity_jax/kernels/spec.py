"""What attention is asked for, and what its passes hand on, whatever computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LEAST = float(jnp.finfo(jnp.float32).min)
"""The score of a key that a mask hides, if nothing else is said: where all are hidden, all are alike."""

WORD = 32
"""How many keys share a word of bits."""


AXES = {
    **dict.fromkeys(("q", "output", "cotangent", "dq"), "bhqf"),
    **dict.fromkeys(("k", "v", "dk", "dv"), "bgkf"),
    **dict.fromkeys(("bias", "mask"), "bhkq"),
    "sums": "bhsq",
    "delta": "bh1q",
    "kept": "bhwq",
}
"""How arrays lie: batch, heads, groups of heads that share keys, queries, keys or words of them, features."""


@dataclass(frozen=True)
class Spec:
    """What an attention computes besides its operands.

    **Fields:** `scale`: of the products of queries and keys; `causal`: no query sees a later key; `keep`: the part of
    the probabilities that dropout keeps; `fill`: the score of a key that `mask` hides.
    """

    scale: float = 1.0
    causal: bool = False
    keep: float = 1.0
    fill: float = LEAST


class Operands(NamedTuple):
    """What an attention reads.

    **Fields:** `q`: [batch, heads, queries, features]; `k`, `v`: [batch, groups, keys, features], heads being a
    multiple of groups; `bias`, which is added to the scaled scores, and `mask`, true where a key is seen:
    [batch, heads, queries, keys], where any of the first three may be 1; `seeds`: of dropout, uint32 [batch, heads, 4]:
    the words of its key, and those of the index that a head's first probability has in the array of all.
    """

    q: Any
    k: Any
    v: Any
    bias: Any = None
    mask: Any = None
    seeds: Any = None


class Residuals(NamedTuple):
    """What the backward pass reads of the forward pass.

    **Fields:** `output`: [batch, heads, queries, features of v]; `sums`: of each query its largest score, and the sum
    of the exponentials of how its scores differ from that, float32 [batch, heads, 2, queries]: their logarithms added
    up would not tell a mask's large negative scores apart; `kept`: by dropout, a bit each, uint32
    [batch, heads, words, queries].
    """

    output: jax.Array
    sums: jax.Array
    kept: jax.Array | None
