"""Attention whose scores are never in memory, forward and backward, as Pallas kernels for TPUs and GPUs.

    found = forward(spec, x, "tpu")
    dq, dk, dv = backward(spec, x, found, cotangent, "tpu")

Scores of a block of keys and a block of queries are computed where they are needed, and again in the backward pass from
what is known of each query (FlashAttention-2, Dao 2023, https://arxiv.org/abs/2307.08691). They lie with keys along
rows: what is known of each query is one row then, which broadcasts at no cost along the sublanes of a TPU. Dropped are
the same probabilities as by `jax.random.bernoulli` on the array of all of them (`bits`); which are kept is drawn once,
and a bit each.

A program of the grid has a block of queries of a head and loops over its keys, or a block of keys of a group of heads
and loops over their queries; of what a causal mask hides it computes nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from unity_jax.kernels.bits import is_kept, threefry

Refs = Mapping[str, Any]

Platform = Literal["tpu", "gpu", "cpu"]
"""For what kernels are compiled; on CPUs they are interpreted."""

LEAST = float(jnp.finfo(jnp.float32).min)
"""The score of a key that a mask hides, if nothing else is said: where all are hidden, all are alike."""

LANES = 128
"""What blocks are multiples of."""

AXES = {
    **dict.fromkeys(("q", "output", "cotangent", "dq"), "bhqf"),
    **dict.fromkeys(("k", "v", "dk", "dv"), "bgkf"),
    **dict.fromkeys(("bias", "mask"), "bhkq"),
    "sums": "bhsq",
    "delta": "bh1q",
    "kept": "bhwq",
}
"""How arrays lie: batch, heads, groups of heads that share keys, queries, keys or words of them, features."""

WORD = 32
"""How many keys share a word of bits."""


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


class Blocks(NamedTuple):
    """How many queries and keys a step of a kernel takes."""

    queries: int
    keys: int


BLOCKS: Mapping[Platform, Blocks] = {"tpu": Blocks(512, 512), "gpu": Blocks(64, 64), "cpu": Blocks(128, 128)}
"""Where nothing better is known."""


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


def forward(spec: Spec, x: Operands, platform: Platform, blocks: Blocks | None = None) -> Residuals:
    """Attention."""
    (batch, heads, queries, _), sizes = x.q.shape, _Sizes.of(x, platform, blocks)
    results = {
        "output": jax.ShapeDtypeStruct((batch, heads, queries, x.v.shape[-1]), x.q.dtype),
        "sums": jax.ShapeDtypeStruct((batch, heads, 2, queries), jnp.float32),
    }
    if spec.keep < 1:
        results["kept"] = jax.ShapeDtypeStruct((batch, heads, -(-sizes.keys // WORD), queries), jnp.uint32)
    found = sizes.call(_forward, spec, "q", _lying(x), results)
    return Residuals(found["output"], found["sums"], found.get("kept"))


def backward(
    spec: Spec, x: Operands, found: Residuals, cotangent: jax.Array, platform: Platform, blocks: Blocks | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The cotangents of `q`, `k` and `v`, of what `forward` found and the cotangent of its output."""
    delta = jnp.sum(found.output.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1)[:, :, None]
    given = {**_lying(x), "cotangent": cotangent.astype(x.q.dtype), "sums": found.sums, "delta": delta}
    given |= {} if found.kept is None else {"kept": found.kept}
    given.pop("seeds", None)
    sizes, results = _Sizes.of(x, platform, blocks), {f"d{of}": _like(getattr(x, of)) for of in "qkv"}
    made = sizes.call(_backward_queries, spec, "q", given, {"dq": results.pop("dq")})
    made |= sizes.call(_backward_keys, spec, "k", given, results)
    return made["dq"], made["dk"], made["dv"]


def _lying(x: Operands) -> dict[str, jax.Array]:
    """The operands by name, as they lie in kernels; a mask in bytes."""
    turned = {of: jnp.swapaxes(t, 2, 3) for of in ("bias", "mask") if (t := getattr(x, of)) is not None}
    if "mask" in turned:
        turned["mask"] = turned["mask"].astype(jnp.int8)
    return {"q": x.q, "k": x.k, "v": x.v, **turned} | ({} if x.seeds is None else {"seeds": x.seeds})


def _like(t: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(t.shape, t.dtype)


# The grid

ALONG = {"q": "q", "k": "kw"}
"""What is cut into blocks where queries are, and where keys are."""

VMEM = 2**25
"""Bytes on the chip that a TPU's kernel may take in any case, for what its steps compute."""


class _Sizes(NamedTuple):
    """**Fields:** `heads`: how many share keys; `queries`, `keys`: of a head; `blocks`: at most all of them."""

    heads: int
    queries: int
    keys: int
    blocks: Blocks
    platform: Platform

    @staticmethod
    def of(x: Operands, platform: Platform, blocks: Blocks | None) -> _Sizes:
        queries, keys, most = x.q.shape[2], x.k.shape[2], blocks or BLOCKS[platform]
        least = Blocks(min(most.queries, _whole(queries, LANES)), min(most.keys, _whole(keys, LANES)))
        return _Sizes(x.q.shape[1] // x.k.shape[1], queries, keys, least, platform)

    def whole(self, axis: str) -> int:
        """Queries, keys, or words of keys, in whole blocks."""
        if axis == "q":
            return _whole(self.queries, self.blocks.queries)
        return _whole(self.keys, self.blocks.keys) // (WORD if axis == "w" else 1)

    def call(
        self,
        kernel: Callable[..., None],
        spec: Spec,
        along: str,
        given: Mapping[str, jax.Array],
        results: Mapping[str, jax.ShapeDtypeStruct],
    ) -> dict[str, jax.Array]:
        """Run a kernel on every block of queries or keys (`along`): its results, as large as asked for."""
        padded = {of: t if of == "seeds" else self._padded(of, t) for of, t in given.items()}
        shapes = {of: jax.ShapeDtypeStruct(self._shape(of, t), t.dtype) for of, t in results.items()}
        blocks = self.blocks.queries if along == "q" else self.blocks.keys
        batch, heads = given["q" if along == "q" else "k"].shape[:2]
        found = pl.pallas_call(
            functools.partial(kernel, spec, self),
            grid=(batch, heads, self.whole(along) // blocks),
            in_specs=[{of: self._block(of, t, along) for of, t in padded.items()}],
            out_specs={of: self._block(of, t, along) for of, t in shapes.items()},
            out_shape=shapes,
            interpret=self.platform == "cpu",
            compiler_params=self._parameters(padded | shapes, along),
        )(padded)
        return {of: found[of][tuple(map(slice, t.shape))] for of, t in results.items()}

    def _parameters(self, arrays: Mapping[str, Any], along: str) -> Any:
        """What compilers are told: on TPUs what is read and written is on the chip, and what the next program reads."""
        if self.platform != "tpu":
            return plgpu.CompilerParams(num_warps=4, num_stages=2) if self.platform == "gpu" else None
        blocks = [(self._part(of, t, along), t.dtype.itemsize) for of, t in arrays.items() if of in AXES]
        held = sum(itemsize * math.prod(s[:-1]) * _whole(s[-1], LANES) for s, itemsize in blocks)
        return pltpu.CompilerParams(dimension_semantics=("parallel",) * 3, vmem_limit_bytes=VMEM + 2 * held)

    def _shape(self, of: str, t: Any) -> tuple[int, ...]:
        shared = of in ("bias", "mask")  # by all, where there is one
        axes = zip(AXES[of], t.shape, strict=True)
        return tuple(self.whole(axis) if axis in "qkw" and not (shared and n == 1) else n for axis, n in axes)

    def _padded(self, of: str, t: jax.Array) -> jax.Array:
        by = [(0, n - m) for n, m in zip(self._shape(of, t), t.shape, strict=True)]
        return jnp.pad(t, by, constant_values=int(of == "sums"))  # what is divided by

    def _block(self, of: str, t: Any, along: str) -> pl.BlockSpec:
        """What a program reads or writes of an array."""
        if of == "seeds":
            return pl.BlockSpec(memory_space=None if self.platform == "gpu" else pltpu.SMEM)
        def index(b: Any, h: Any, i: Any) -> tuple[Any, ...]:
            at = {"b": b, "h": h, "g": h // self.heads if along == "q" else h} | dict.fromkeys(ALONG[along], i)
            return tuple(at.get(axis, 0) if n > 1 else 0 for axis, n in zip(AXES[of], t.shape, strict=True))

        return pl.BlockSpec(self._part(of, t, along), index)

    def _part(self, of: str, t: Any, along: str) -> tuple[int, ...]:
        """The shape of what a program reads or writes of an array."""
        group = 1 if along == "q" else self.heads
        size = {"b": 1, "h": group, "g": 1, **{axis: self.whole(axis) for axis in "qkw"}}
        size |= {"q": self.blocks.queries} if along == "q" else {"k": self.blocks.keys, "w": self.blocks.keys // WORD}
        return tuple(min(size.get(axis, n), n) for axis, n in zip(AXES[of], t.shape, strict=True))


def _whole(n: int, block: int) -> int:
    return -(-n // block) * block


# Kernels


class _At(NamedTuple):
    """Which scores a step computes.

    **Fields:** `head`, `queries`, `keys`, `words`: where they are in what the program has; `of`: which head it is of
    all, of which batch; `query`, `key`: the first ones of all.
    """

    head: int
    queries: Any
    keys: Any
    words: Any
    of: tuple[Any, Any]
    query: Any
    key: Any


def _forward(spec: Spec, sizes: _Sizes, x: Refs, out: Refs) -> None:
    q, row, here = x["q"][0, 0], jnp.zeros((1, sizes.blocks.queries), jnp.float32), _program()

    def step(j: Any, known: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        (most, total, output), at = known, _seen(sizes, here, j)
        s = _scores(spec, sizes, x, q, x["k"][0, 0, at.keys], at)
        now = jnp.maximum(most, jnp.max(s, axis=0, keepdims=True))
        p, less = jnp.exp(s - now), jnp.exp(most - now)
        v, total = x["v"][0, 0, at.keys], total * less + jnp.sum(p, axis=0, keepdims=True)
        if spec.keep < 1:
            kept = _drawn(spec, sizes, x["seeds"], at)
            out["kept"][0, 0, at.words] = _packed(kept)
            p = jnp.where(kept, p, 0.0)
        return now, total, output * less + _product(v, p.astype(v.dtype), 0, 0)

    start = row + LEAST, row, jnp.zeros((x["v"].shape[-1], row.shape[1]), jnp.float32)
    most, total, output = lax.fori_loop(0, _last(spec, sizes, here), step, start)
    out["output"][0, 0] = (output / (total * spec.keep)).T.astype(out["output"].dtype)
    out["sums"][0, 0, :1], out["sums"][0, 0, 1:] = most, total


def _backward_queries(spec: Spec, sizes: _Sizes, x: Refs, out: Refs) -> None:
    q, cotangent, delta = (x[of][0, 0] for of in ("q", "cotangent", "delta"))
    sums = _sums(x, 0, slice(None))
    here = _program()

    def step(j: Any, dq: Any) -> Any:
        at = _seen(sizes, here, j)
        k, v = x["k"][0, 0, at.keys], x["v"][0, 0, at.keys]
        p = _probabilities(_scores(spec, sizes, x, q, k, at), sums)
        (dp,) = _kept(spec, x, at, _product(v, cotangent, 1, 1))
        return dq + _product((p * (dp - delta)).astype(k.dtype), k, 0, 0)

    dq = lax.fori_loop(0, _last(spec, sizes, here), step, jnp.zeros(q.shape, jnp.float32))
    out["dq"][0, 0] = (dq * spec.scale).astype(q.dtype)


def _backward_keys(spec: Spec, sizes: _Sizes, x: Refs, out: Refs) -> None:
    k, v, (queries, keys) = x["k"][0, 0], x["v"][0, 0], sizes.blocks
    batch, group, block = _program()
    key = block * keys
    found = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for head in range(sizes.heads):

        def step(i: Any, known: tuple[Any, Any], head: int = head) -> tuple[Any, Any]:
            (dk, dv), rows = known, pl.ds(i * queries, queries)
            at = _At(head, rows, slice(None), slice(None), (batch, group * sizes.heads + head), i * queries, key)
            q, cotangent = x["q"][0, head, rows], x["cotangent"][0, head, rows]
            p = _probabilities(_scores(spec, sizes, x, q, k, at), _sums(x, head, rows))
            delta = x["delta"][0, head, :, rows]
            kept, dp = _kept(spec, x, at, p, _product(v, cotangent, 1, 1))
            dv += _product(kept.astype(v.dtype), cotangent, 1, 0)
            return dk + _product((p * (dp - delta)).astype(q.dtype), q, 1, 0), dv

        found = lax.fori_loop(key // queries if spec.causal else 0, sizes.whole("q") // queries, step, found)
    dk, dv = found
    out["dk"][0, 0], out["dv"][0, 0] = (dk * spec.scale).astype(k.dtype), dv.astype(v.dtype)


def _program() -> tuple[Any, Any, Any]:
    return pl.program_id(0), pl.program_id(1), pl.program_id(2)


def _seen(sizes: _Sizes, program: tuple[Any, Any, Any], j: Any) -> _At:
    """The scores of a program's queries and a block of keys."""
    (batch, head, i), (queries, keys) = program, sizes.blocks
    words = pl.ds(j * (keys // WORD), keys // WORD)
    return _At(0, slice(None), pl.ds(j * keys, keys), words, (batch, head), i * queries, j * keys)


def _last(spec: Spec, sizes: _Sizes, program: tuple[Any, Any, Any]) -> Any:
    """How many blocks of keys a program's queries see."""
    (queries, keys), every = sizes.blocks, sizes.whole("k") // sizes.blocks.keys
    return jnp.minimum(((program[2] + 1) * queries + keys - 1) // keys, every) if spec.causal else every


def _scores(spec: Spec, sizes: _Sizes, x: Refs, q: Any, k: Any, at: _At) -> Any:
    """Scores, float32 [keys, queries]."""
    s = _product(k, q, 1, 1) * spec.scale
    if "bias" in x:
        s += _tile(x["bias"], at).astype(jnp.float32)
    if "mask" in x:
        s = jnp.where(_tile(x["mask"], at) != 0, s, spec.fill)
    if spec.causal or sizes.keys != sizes.whole("k"):
        query, key = _places(s.shape, at)
        seen = key < sizes.keys
        s = jnp.where(seen & (key <= query) if spec.causal else seen, s, -jnp.inf)
    return s


def _sums(x: Refs, head: int, queries: Any) -> tuple[Any, Any]:
    return x["sums"][0, head, :1, queries], x["sums"][0, head, 1:, queries]


def _probabilities(scores: Any, sums: tuple[Any, Any]) -> Any:
    most, total = sums
    return jnp.exp(scores - most) * (1 / total)


def _tile(ref: Any, at: _At) -> Any:
    _, heads, _, queries = ref.shape
    return ref[0, at.head if heads > 1 else 0, at.keys, at.queries if queries > 1 else slice(None)]


def _drawn(spec: Spec, sizes: _Sizes, seeds: Any, at: _At) -> Any:
    """Which probabilities dropout keeps, [keys, queries]."""
    query, key = _places((sizes.blocks.keys, sizes.blocks.queries), at)
    index = query.astype(jnp.uint32) * jnp.uint32(sizes.keys) + key.astype(jnp.uint32)
    *words, high, low = (seeds[*at.of, n] for n in range(4))
    low = low + index
    return is_kept(threefry((words[0], words[1]), high + (low < index).astype(jnp.uint32), low), spec.keep)


def _packed(kept: Any) -> Any:
    """A word for as many keys."""
    keys, queries = kept.shape
    bits = kept.astype(jnp.int32).reshape(keys // WORD, WORD, queries)
    return jnp.sum(bits << lax.broadcasted_iota(jnp.int32, bits.shape, 1), axis=1).astype(jnp.uint32)


def _kept(spec: Spec, x: Refs, at: _At, *of: Any) -> Sequence[Any]:
    """What dropout makes of probabilities, or of their cotangents."""
    if spec.keep == 1:
        return of
    packed = x["kept"][0, at.head, at.words, at.queries].astype(jnp.int32)
    shape = (packed.shape[0], WORD, packed.shape[1])
    bits = lax.broadcast_in_dim(packed, shape, (0, 2)) >> lax.broadcasted_iota(jnp.int32, shape, 1)
    kept = (bits & 1).reshape(of[0].shape) != 0
    return [jnp.where(kept, t / spec.keep, 0.0) for t in of]


def _places(shape: tuple[int, ...], at: _At) -> tuple[Any, Any]:
    """Which query and key each score is of."""
    return at.query + lax.broadcasted_iota(jnp.int32, shape, 1), at.key + lax.broadcasted_iota(jnp.int32, shape, 0)


def _product(a: Any, b: Any, left: int, right: int) -> Any:
    """The product of two matrices over these axes, summed in float32."""
    return lax.dot_general(a, b, (((left,), (right,)), ((), ())), preferred_element_type=jnp.float32)
