"""What the scores of attention are, from the exponential of its softmax back to the product of queries and keys.

    s = q @ k.T / 8        s = s + bias        s = where(mask, s, -1e9)        exp(s - max(s))

in any order that comes to scale * q @ k.T + bias with hidden keys, of any dimensions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unity_jax import _compat
from unity_jax.implement.constants import Constants, elementwise
from unity_jax.implement.dims import Dims, Dot, Labelled, is_same, labelled_before, varying
from unity_jax.kernels.spec import LEAST
from unity_jax.pcg.graph import Graph, Op, Tensor

HIDDEN = -1e4
"""A score so low that a key with it is not seen beside others."""


@dataclass(frozen=True)
class Mask:
    """Where keys are seen: where `which` is true, or false.

    **Fields:** `case`: which of the cases of `select_n` their scores are.
    """

    which: Labelled
    case: int


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of a softmax.

    **Fields:** `exp`: the exponential; `dims`: of it; `key`: the label of keys; `q`, `k`: with a label "f" for the
    features; `scale`, `biases`, `fill`, `causal`: see `kernels.spec`; `masks`: all; `hiding`: those that `causal`
    does not tell.
    """

    exp: Op
    dims: Dims
    key: Any
    scale: float = 1.0
    biases: tuple[Labelled, ...] = ()
    masks: tuple[Mask, ...] = ()
    fill: float = LEAST
    hiding: tuple[Mask, ...] = ()
    causal: bool = False
    q: Labelled | None = None
    k: Labelled | None = None


class Finder:
    """Finds the scores of softmaxes in a graph."""

    def __init__(self, graph: Graph, constants: Constants) -> None:
        self.graph, self.constants = graph, constants

    @functools.cached_property
    def place(self) -> dict[Op, int]:
        """Where ops are in the program."""
        return {op: i for i, op in enumerate(self.graph.ops)}

    def scores(self, exp: Op) -> Scores | None:
        """Those whose exponentials an op computes; None where they are not those of attention."""
        made = exp.outputs[0]
        less = self._past(exp.inputs[0])
        if less is None or less.name != "sub" or made.rank < 2 or made.shape != less.inputs[0].shape:
            return None
        dims = varying(made, range(made.rank))
        key = self._key(less, dims)
        if key is None:
            return None
        found = self._followed(less.inputs[0], dims, Scores(exp, dims, key))
        return None if found is None else self._without_constants(found)

    def _past(self, t: Tensor) -> Op | None:
        """What makes a tensor, before conversions."""
        op = self.graph.producer.get(t)
        while op is not None and is_same(op):
            op = self.graph.producer.get(op.inputs[op.outputs.index(t)])
            t = op.outputs[0] if op is not None else t
        return op

    def _key(self, less: Op, dims: Dims) -> Any:
        """The label of the dimension whose largest score is subtracted."""
        scores, t = less.inputs
        while (op := self.graph.producer.get(t)) is not None and op.name != "reduce_max":
            if op.name == "max":
                sides = [i for i in (0, 1) if self.constants.scalar(op.inputs[i]) == -math.inf]
                if not sides:
                    return None
                t = op.inputs[1 - sides[0]]
            elif is_same(op) or op.name in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"):
                t = op.inputs[0]
            else:
                return None
        if op is None or len(op.params["axes"]) != 1:
            return None
        turned = op.inputs[0]
        first = self._before(scores, dims, ["transpose"])
        same = self._before(turned, range(turned.rank), ["transpose"])
        if first.tensor is not same.tensor or op.params["axes"][0] not in same.dims:
            return None
        return first.dims[same.dims.index(op.params["axes"][0])]

    def _before(self, t: Tensor, dims: Sequence[Any], names: Sequence[str]) -> Labelled:
        """What a tensor is before ops of these names that only move it."""
        dims = varying(t, dims)
        while (op := self.graph.producer.get(t)) is not None and op.name in names:
            before = labelled_before(op, dims)
            if before is None:
                break
            t, dims = op.inputs[0], before
        return Labelled(t, dims)

    def _followed(self, t: Tensor, dims: Dims, so_far: Scores) -> Scores | None:
        """What scores of a tensor come to, beside what is known already."""
        op = self.graph.producer.get(t)
        if op is None:
            return None
        if op.name == "dot_general":
            return _product(op, dims, so_far)
        if len(op.outputs) == 1 and (before := labelled_before(op, dims)) is not None:
            return self._followed(op.inputs[0], before, so_far)
        if op.name in ("mul", "div"):
            for i in (0, 1) if op.name == "mul" else (0,):
                by = self.constants.scalar(op.inputs[1 - i])
                if by:
                    scale = so_far.scale * by if op.name == "mul" else so_far.scale / by
                    return self._followed(op.inputs[i], dims, replace(so_far, scale=scale))
        if op.name == "add" and so_far.scale == 1:
            for i in (0, 1):
                biases = *so_far.biases, self._smallest(op.inputs[1 - i], dims)
                found = self._followed(op.inputs[i], dims, replace(so_far, biases=biases))
                if found is not None:
                    return found
        if op.name == "select_n" and len(op.inputs) == 3 and not so_far.biases:
            for i in (0, 1):
                fill = self.constants.scalar(op.inputs[2 - i])
                if fill is None or (so_far.masks and fill * so_far.scale != so_far.fill):
                    continue
                mask = Mask(self._smallest(op.inputs[0], dims), i)
                known = replace(so_far, masks=(*so_far.masks, mask), fill=fill * so_far.scale)
                return self._followed(op.inputs[1 + i], dims, known)
        return None

    def _smallest(self, t: Tensor, dims: Dims) -> Labelled:
        """What a tensor is broadcast from."""
        return self._before(t, dims, ("broadcast_in_dim", "reshape"))

    def hides_alike(self, mask: Mask, which: Tensor, dims: Dims, case: int) -> bool:
        """Whether a predicate hides the same keys."""
        other = self._smallest(which, dims)
        if case != mask.case or other.dims != mask.which.dims:
            return False
        if other.tensor is mask.which.tensor:
            return True
        ours, theirs = (self.constants.value(x.tensor) for x in (mask.which, other))
        return ours is not None and theirs is not None and np.array_equal(ours, theirs)

    def _without_constants(self, found: Scores) -> Scores:
        """With what is known to be a causal mask as that."""
        hidden = [m for m in found.masks if not (found.fill <= HIDDEN and self._is_causal(found, m))]
        biases = tuple(b for b in found.biases if not self._is_causal_bias(found, b))
        causal = len(hidden) < len(found.masks) or len(biases) < len(found.biases)
        return replace(found, biases=biases, hiding=tuple(hidden), causal=causal)

    def _is_causal(self, found: Scores, mask: Mask) -> bool:
        value = self._table(found, mask.which)
        return value is not None and _is_triangle(value != 0 if mask.case else value == 0)

    def _is_causal_bias(self, found: Scores, bias: Labelled) -> bool:
        value = self._table(found, bias)
        return value is not None and bool(((value == 0) | (value <= HIDDEN)).all()) and _is_triangle(value == 0)

    def _table(self, found: Scores, of: Labelled) -> np.ndarray | None:
        """A constant by queries and keys, alike along all that it has besides."""
        shape = of.tensor.shape
        if found.q is None or found.k is None or any(n > 1 and of.dims[d] is None for d, n in enumerate(shape)):
            return None
        value = self.constants.value(of.tensor)
        if value is None:
            return None
        varies = [d for d, n in enumerate(shape) if n > 1 and value.strides[d]]
        labels = [of.dims[d] for d in varies]
        if len(varies) != 2 or labels[1] != found.key or labels[0] not in found.q.dims or labels[0] in found.k.dims:
            return None
        return np.asarray(value[tuple(slice(None) if d in varies else 0 for d in range(len(shape)))])


def _is_triangle(seen: np.ndarray) -> bool:
    n, m = seen.shape
    return n == m and bool((seen == (np.arange(m) <= np.arange(n)[:, None])).all())


def _product(dot: Op, dims: Dims, so_far: Scores) -> Scores | None:
    """The scores of a product of queries and keys."""
    of = Dot.of(dot)
    if any(len(d) != 1 for d in of.contracted):
        return None
    sides: list[list[Any]] = [[None] * t.rank for t in dot.inputs]
    made = iter(dims)
    for d, e in zip(*of.batch, strict=True):
        sides[0][d] = sides[1][e] = next(made)
    for i in (0, 1):
        for d in of.free[i]:
            sides[i][d] = next(made)
        sides[i][of.contracted[i][0]] = "f"
    labelled = [Labelled(t, tuple(s)) for t, s in zip(dot.inputs, sides, strict=True)]
    free = [[sides[i][d] for d in of.free[i] if dot.inputs[i].shape[d] > 1] for i in (0, 1)]
    keys = [i for i in (0, 1) if free[i] == [so_far.key]]
    if len(keys) != 1 or so_far.key in free[1 - keys[0]]:
        return None
    return replace(so_far, q=labelled[1 - keys[0]], k=labelled[keys[0]])


@dataclass(frozen=True, eq=False)
class Dropout:
    """Which probabilities are kept: `uniform(key) < keep` of an array with these dimensions."""

    key: Tensor
    bits: Labelled
    keep: float


_PROBE = np.array([0, 1, 511, 512, 2**9 * 4097, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)


def dropout(t: Tensor, dims: Dims, graph: Graph, constants: Constants) -> Dropout | None:
    """What tells that probabilities are kept, if a tensor does.

    The chain from random bits to a number in [0, 1) is followed by computing it for some bits.
    """
    op = graph.producer.get(t)
    while op is not None and (before := labelled_before(op, dims)) is not None:
        t, dims = op.inputs[0], before
        op = graph.producer.get(t)
    if op is None or op.name != "lt" or (keep := constants.scalar(op.inputs[1])) is None:
        return None
    chain, now = list[Op](), op.inputs[0]
    while (made := graph.producer.get(now)) is not None and made.name != "random_bits":
        chain.append(made)
        inner = [x for x in made.inputs if constants.scalar(x) is None]
        if len(inner) != 1 or inner[0].shape != now.shape:
            return None
        now = inner[0]
    if made is None or not str(made.inputs[0].dtype).startswith("key<fry") or made.inputs[0].shape:
        return None
    if made.eqn is None or not _compat.threefry_partitionable(made.eqn) or now.dtype != np.uint32:
        return None
    value: Any = _PROBE
    for step in reversed(chain):
        operands = [value if (c := constants.scalar(x)) is None else np.asarray(c).astype(x.dtype) for x in step.inputs]
        try:
            value = elementwise(step, *operands)
        except KeyError:
            return None
    expected = (_PROBE >> np.uint32(9)).astype(np.float32) * np.float32(2**-23)
    return Dropout(made.inputs[0], Labelled(now, varying(now, dims)), keep) if np.array_equal(value, expected) else None
