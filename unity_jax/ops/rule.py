"""Op rules: one small description per primitive, from which strategies, local programs and costs follow.

A rule names the *factors* of an op, the index classes of its einsum: `dot_general` of a batched matmul is
`([b,m,k], [b,k,n]) -> ([b,m,n]) reduce={k}`. A mesh axis may split any factor:

* `pass`: each device computes its part of the results, no communication;
* `sum`, `max`, `min`: a reduction; each device holds a partial result;
* `replicate`: may not be split (a sort dimension);
* `halo`: may be split when the local program exchanges borders with its neighbours.

A mesh axis may also carry *partial sums* through an op that is linear in some operands (`Rule.linear`). Following
Shardy's OpShardingRule (https://openxla.org/shardy/sharding_representation) and GSPMD (arXiv:2105.04663).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from unity_jax import _compat
from unity_jax.pcg.graph import Op
from unity_jax.pcg.layout import Layout, interned
from unity_jax.pcg.mesh import MeshAxes

REDUCTIONS = ("sum", "max", "min")
Strategy = tuple[int, ...]
"""Per mesh axis: the factor it splits, -1 for none, `len(factors) + j` for partial sums through `linear[j]`."""
Dims = tuple[tuple[int, ...], ...]
"""Per dimension of a tensor, its factors from major to minor; empty for a dimension of size 1 that no factor indexes.
"""


@dataclass(frozen=True)
class Factor:
    """An index class. `pad`: may be split unevenly (the local program never mixes padding into results)."""

    label: str
    size: int
    kind: str = "pass"
    pad: bool = True
    halo: int = 0  # elements that a shard needs from its neighbours: it must be at least this large


@dataclass(frozen=True)
class InnerCollective:
    """A collective that the local program of an op issues itself (the Shift of a halo). `bytes` per device."""

    kind: str
    axes: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, eq=False)
class Rule:
    """How an op may be split.

    **Fields:** `factors`; `operands` and `results` (factors of every dimension); `linear`: sets of operands, such that
    partial sums in all operands of a set (others replicated) give partial sums in every result; `local`: the per-device
    program (by default the primitive itself on local operands); `flops` of the whole op; `inner`: the collectives that
    `local` issues; `bytes`: local memory traffic where it is not all operands and results; `mask`: whether padding of
    reduced dimensions is overwritten before `local` (False if it never reads padding).
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: tuple[frozenset[int], ...] = ()
    local: Callable[..., Any] | None = None
    flops: float = 0.0
    inner: Callable[[Shard], list[InnerCollective]] | None = None
    bytes: Callable[[Shard], float] | None = None
    mask: bool = True
    fallback: bool = False  # made by `replicated` for a primitive without a rule
    fixed: tuple[tuple[Layout, ...], tuple[Layout, ...]] | None = None  # of operands and results the user has laid out

    @functools.cached_property
    def works(self) -> dict[tuple[int, ...], dict[Hashable, Any]]:
        """`Shard.works`, by how many shards each factor is split into."""
        return {}

    @property
    def is_shared(self) -> bool:
        """Whether shards of the same sizes work alike, whichever axes split them."""
        return self.fixed is None and not (self.inner or self.bytes or any(f.halo for f in self.factors))

    def __str__(self) -> str:
        """The grammar of `jax.experimental.custom_partitioning`: `([i,j], [j,k]) -> ([i,k]) sum={j}`."""
        if self.fixed is not None:
            return " -> ".join("(" + ", ".join(map(str, layouts)) + ") as given" for layouts in self.fixed)

        def side(tensors: tuple[Dims, ...]) -> str:
            return ", ".join(
                "[" + ",".join("".join(self.factors[f].label for f in d) or "1" for d in dims) + "]" for dims in tensors
            )

        kinds = "".join(
            f" {kind}={{{','.join(f.label for f in self.factors if f.kind == kind)}}}"
            for kind in dict.fromkeys(f.kind for f in self.factors)
            if kind != "pass"
        )
        return f"({side(self.operands)}) -> ({side(self.results)}){kinds}"


RuleFn = Callable[[Op], Rule | None]
"""None where the op cannot be split: it is replicated."""
RULES: dict[str, RuleFn] = {}


def register(*names: str) -> Callable[[RuleFn], RuleFn]:
    """Make the decorated function the rule of these primitives."""

    def add(fn: RuleFn) -> RuleFn:
        for name in names:
            if name in RULES:
                raise ValueError(f"two rules for {name}")
            RULES[name] = fn
        return fn

    return add


Label = Hashable
Labels = Sequence[Sequence[Label] | Label]


def make_rule(
    op: Op,
    operands: Sequence[Labels],
    results: Sequence[Labels],
    *,
    kinds: Mapping[Any, str] | None = None,
    sizes: Mapping[Any, int] | None = None,
    no_pad: Iterable[Label] = (),
    halos: Mapping[Any, int] | None = None,
    linear: Iterable[Iterable[int]] = (),
    local: Callable[..., Any] | None = None,
    flops: float | None = None,
    inner: Callable[[Shard], list[InnerCollective]] | None = None,
    bytes: Callable[[Shard], float] | None = None,
    mask: bool = True,
) -> Rule:
    """Build a rule from labels, one per dimension (a tuple of labels for a dimension made of several factors).

        make_rule(op, [["m", "k"], ["k", "n"]], [["m", "n"]], kinds={"k": "sum"}, linear=[{0}, {1}])

    Sizes come from the shapes where a label stands alone on a dimension, else from `sizes`. Dimensions of size 1 have
    no factor, whatever their label. `None` labels a dimension that must not be split. `flops` defaults to one per
    result element. No reduction is left to do over results of less than 16 bits, which no collective reduces: what
    would be reduced must not be split.
    """
    kinds, sizes, halos, no_pad = dict(kinds or {}), dict(sizes or {}), dict(halos or {}), set(no_pad)
    if any(_compat.is_narrow(t.dtype) for t in op.outputs):
        kinds = {label: "replicate" if kind in REDUCTIONS else kind for label, kind in kinds.items()}
    order: dict[Label, int] = {}
    fresh = itertools.count()

    def normal(shape: tuple[int, ...], labels: Labels) -> list[tuple[Label, ...]]:
        if len(labels) != len(shape):
            raise ValueError(f"{op.name}: {len(labels)} labels for shape {shape}")
        dims = []
        for n, label in zip(shape, labels, strict=True):
            group = label if isinstance(label, tuple) else (label,)
            if n == 1:
                group = ()
            if group == (None,):
                group = (("_", next(fresh)),)
                kinds[group[0]] = "replicate"
            if len(group) == 1:
                sizes.setdefault(group[0], n)
            dims.append(group)
        return dims

    sides = [
        [normal(t.shape, labels) for t, labels in zip(tensors, side, strict=True)]
        for tensors, side in ((op.inputs, operands), (op.outputs, results))
    ]
    for label in sizes:
        if sizes[label] != 1:
            order[label] = len(order)
    names = iter("ijklmnopqrstuvwxyzabcdefgh" + "".join(map(chr, range(945, 970))))
    factors = tuple(
        Factor(
            label if isinstance(label, str) and len(label) == 1 else next(names, "?"),
            sizes[label],
            kinds.get(label, "pass"),
            label not in no_pad and kinds.get(label) != "halo",
            halos.get(label, 0),
        )
        for label in order
    )
    index = [tuple(tuple(tuple(order[f] for f in d if f in order) for d in dims) for dims in side) for side in sides]
    return Rule(
        factors,
        index[0],
        index[1],
        tuple(frozenset(s) for s in linear),
        local,
        float(sum(math.prod(t.shape) for t in op.outputs)) if flops is None else float(flops),
        inner,
        bytes,
        mask,
    )


class Fill(NamedTuple):
    """Padding that becomes the neutral element of a reduction.

    **Fields:** `axes`: split the dimension `dim` of `size` elements; `kind`: the reduction.
    """

    dim: int
    axes: tuple[str, ...]
    size: int
    kind: str

    def __call__(self, x: Any) -> Any:
        """The same shard, without padding along the dimension."""
        return jnp.where(_within(x, self.dim, self.axes, self.size), x, identity(self.kind, x.dtype))


@dataclass(frozen=True, eq=False)
class Shard:
    """One op under one strategy: what its local program and its costs can ask. `onto_zeros`: whether the array that it
    adds to (the operand of a scatter) is zeros, on every device."""

    op: Op
    rule: Rule
    mesh: MeshAxes
    strategy: Strategy
    onto_zeros: bool = False

    @functools.cached_property
    def factor_axes(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that split each factor, major to minor."""
        split = list(zip(self.mesh.names, self.strategy, strict=True))
        return tuple([tuple([a for a, s in split if s == f]) for f in range(len(self.rule.factors))])

    @functools.cached_property
    def works(self) -> dict[Hashable, Any]:
        """Its work, by device and use, as far as it is known (`cost.compute`). Equal ops share one shard, and shards of
        the same sizes share their work, whichever axes split them: what is sent, and what a rule counts, may differ."""
        return self.rule.works.setdefault(self._ways, {}) if self.rule.is_shared else {}

    @property
    def linear_axes(self) -> tuple[tuple[str, int], ...]:
        """Mesh axes that carry partial sums through the op, each with its operand set."""
        n = len(self.rule.factors)
        return tuple((a, s - n) for a, s in zip(self.mesh.names, self.strategy, strict=True) if s >= n)

    @functools.cached_property
    def _ways(self) -> tuple[int, ...]:
        """How many shards each factor is split into."""
        found = [1] * len(self.rule.factors)
        for size, s in zip(self.mesh.sizes, self.strategy, strict=True):
            if 0 <= s < len(found):
                found[s] *= size
        return tuple(found)

    def ways(self, factor: int) -> int:
        """How many shards a factor is split into."""
        return self._ways[factor]

    def is_padded(self, factor: int) -> bool:
        """Whether its shards do not divide a factor."""
        return self.rule.factors[factor].size % self.ways(factor) != 0

    def local_size(self, factor: int) -> int:
        """Elements of a factor on each device, padding included."""
        return -(-self.rule.factors[factor].size // self.ways(factor))

    def offset(self, factor: int) -> Any:
        """The first global index of this device's shard of a factor (a traced int32; 0 where it is not split)."""
        axes = self.factor_axes[factor]
        return jax.lax.axis_index(axes) * self.local_size(factor) if axes else 0

    def _layout(self, dims: Dims, partial: tuple[tuple[str, str], ...]) -> Layout:
        return interned(tuple([self.factor_axes[d[0]] if d else () for d in dims]), partial)

    @functools.cached_property
    def operand_layouts(self) -> tuple[Layout, ...]:
        """How each operand must lie."""
        if self.rule.fixed is not None:
            return self.rule.fixed[0]
        linear = self.linear_axes
        return tuple(
            self._layout(dims, tuple([(a, "sum") for a, j in linear if i in self.rule.linear[j]]))
            for i, dims in enumerate(self.rule.operands)
        )

    @functools.cached_property
    def result_layouts(self) -> tuple[Layout, ...]:
        """How each result then lies."""
        if self.rule.fixed is not None:
            return self.rule.fixed[1]
        n = len(self.rule.factors)
        partial = tuple(
            (a, "sum" if s >= n else self.rule.factors[s].kind)
            for a, s in zip(self.mesh.names, self.strategy, strict=True)
            if s >= n or (s >= 0 and self.rule.factors[s].kind in REDUCTIONS)
        )
        return tuple(self._layout(dims, partial) for dims in self.rule.results)

    def local_shape(self, dims: Dims, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The per-device shape of a tensor with these factors, padding included."""
        ways = self._ways
        return tuple([-(-n // ways[d[0]]) if d else n for n, d in zip(shape, dims, strict=True)])

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of each operand and result, per device."""
        tensors = (*self.op.inputs, *self.op.outputs)
        if self.rule.fixed is not None:
            layouts = (*self.rule.fixed[0], *self.rule.fixed[1])
            return tuple([lay.local_shape(t.shape, self.mesh) for t, lay in zip(tensors, layouts, strict=True)])
        sides = (*self.rule.operands, *self.rule.results)
        return tuple([self.local_shape(dims, t.shape) for t, dims in zip(tensors, sides, strict=True)])

    def operand_bytes(self, i: int) -> int:
        """Per device."""
        return math.prod(self.operand_shape(i)) * self.op.inputs[i].itemsize

    def result_bytes(self, i: int = 0) -> int:
        """Per device."""
        return math.prod(self.result_shape(i)) * self.op.outputs[i].itemsize

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        """Per device, padding included."""
        return self.shapes[len(self.op.inputs) + i]

    def operand_shape(self, i: int = 0) -> tuple[int, ...]:
        """Per device, padding included."""
        return self.shapes[i]

    @property
    def flops(self) -> float:
        """Per device."""
        return self.rule.flops / math.prod(self._ways)

    def valid(self, factor: int, x: Any, dim: int) -> Any:
        """A boolean mask, broadcastable to `x`, of the positions along `dim` that are not padding of `factor`."""
        return _within(x, dim, self.factor_axes[factor], self.rule.factors[factor].size)

    @functools.cached_property
    def fills(self) -> tuple[tuple[Fill, ...], ...]:
        """What overwrites the padding of each operand before `run`, which may not read it."""
        if not self.rule.mask:
            return tuple(() for _ in self.op.inputs)
        return tuple(
            tuple(
                Fill(d, self.factor_axes[f], self.rule.factors[f].size, self.rule.factors[f].kind)
                for d, factors in enumerate(dims)
                for f in factors[:1]
                if self.rule.factors[f].kind in REDUCTIONS and self.is_padded(f)
            )
            for dims in self.rule.operands
        )

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Evaluate the op on this device's shards, of which `fills` are made: padding never enters a reduction."""
        if self.rule.local is None:
            return _compat.bind(self.op.eqn, operands, self.op.params)
        result = self.rule.local(self, *operands)
        return list(result) if isinstance(result, (tuple, list)) else [result]


def _within(x: Any, dim: int, axes: tuple[str, ...], size: int) -> Any:
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    first = jax.lax.axis_index(axes) * x.shape[dim] if axes else 0
    return first + jax.lax.broadcasted_iota(jnp.int32, tuple(shape), dim) < size


def identity(reduction: str, dtype: Any) -> Any:
    """The neutral element of a reduction, as a scalar of the dtype."""
    if reduction == "sum":
        return np.zeros((), dtype)
    largest = reduction == "min"
    if jnp.issubdtype(dtype, jnp.floating):
        return np.array(np.inf if largest else -np.inf, dtype)
    if np.dtype(dtype) == np.bool_:
        return np.array(largest)
    info = jnp.iinfo(dtype)
    return np.array(info.max if largest else info.min, dtype)
