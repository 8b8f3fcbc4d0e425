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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from unity_jax.kernels.bits import is_kept, threefry
from unity_jax.kernels.grid import Blocks, Platform, Sizes, best
from unity_jax.kernels.spec import LEAST, WORD, Operands, Residuals, Spec
from unity_jax.kernels.task_mapping import Task

Refs = Mapping[str, Any]


def forward(spec: Spec, x: Operands, platform: Platform, blocks: Blocks | None = None) -> Residuals:
    """Attention."""
    sizes = Sizes.of(spec, x, platform, blocks or best(spec, "forward", platform))
    batch, heads, queries, _ = x.q.shape
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
    results = {f"d{of}": _like(getattr(x, of)) for of in "qkv"}
    sizes = Sizes.of(spec, x, platform, blocks or best(spec, "backward_queries", platform))
    made = sizes.call(_backward_queries, spec, "q", given, {"dq": results.pop("dq")})
    sizes = Sizes.of(spec, x, platform, blocks or best(spec, "backward_keys", platform))
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


def _forward(spec: Spec, sizes: Sizes, here: Task, x: Refs, out: Refs) -> None:
    q, row = x["q"][0, 0], jnp.zeros((1, sizes.blocks.queries), jnp.float32)

    def step(j: Any, known: tuple[Any, Any, Any], hides: bool) -> tuple[Any, Any, Any]:
        (most, total, output), at = known, _seen(sizes, here, j)
        s = _scores(spec, sizes, x, q, x["k"][0, 0, at.keys], at, hides)
        now = jnp.maximum(most, jnp.max(s, axis=0, keepdims=True))
        p, less = jnp.exp(s - now), jnp.exp(most - now)
        v, total = x["v"][0, 0, at.keys], total * less + jnp.sum(p, axis=0, keepdims=True)
        if spec.keep < 1:
            kept = _drawn(spec, sizes, x["seeds"], at)
            out["kept"][0, 0, at.words] = _packed(kept)
            p = jnp.where(kept, p, 0.0)
        return now, total, output * less + _product(v, p.astype(v.dtype), 0, 0)

    start = row + LEAST, row, jnp.zeros((x["v"].shape[-1], row.shape[1]), jnp.float32)
    most, total, output = _over(*blocks_of_keys(spec, sizes, here), step, start)
    out["output"][0, 0] = (output / (total * spec.keep)).T.astype(out["output"].dtype)
    out["sums"][0, 0, :1], out["sums"][0, 0, 1:] = most, total


def _backward_queries(spec: Spec, sizes: Sizes, here: Task, x: Refs, out: Refs) -> None:
    q, cotangent, delta = (x[of][0, 0] for of in ("q", "cotangent", "delta"))
    sums = _sums(x, 0, slice(None))

    def step(j: Any, dq: Any, hides: bool) -> Any:
        at = _seen(sizes, here, j)
        k, v = x["k"][0, 0, at.keys], x["v"][0, 0, at.keys]
        p = _probabilities(_scores(spec, sizes, x, q, k, at, hides), sums)
        (dp,) = _kept(spec, x, at, _product(v, cotangent, 1, 1))
        return dq + _product(_shown(x, at, p * (dp - delta)).astype(k.dtype), k, 0, 0)

    dq = _over(*blocks_of_keys(spec, sizes, here), step, jnp.zeros(q.shape, jnp.float32))
    out["dq"][0, 0] = (dq * spec.scale).astype(q.dtype)


def _backward_keys(spec: Spec, sizes: Sizes, here: Task, x: Refs, out: Refs) -> None:
    k, v, (queries, keys) = x["k"][0, 0], x["v"][0, 0], sizes.blocks
    batch, first, _, block = here
    key = block * keys
    found = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for head in range(sizes.heads):

        def step(i: Any, known: tuple[Any, Any], hides: bool, head: int = head) -> tuple[Any, Any]:
            (dk, dv), rows = known, pl.ds(i * queries, queries)
            at = _At(head, rows, slice(None), slice(None), (batch, first + head), i * queries, key)
            q, cotangent = x["q"][0, head, rows], x["cotangent"][0, head, rows]
            p = _probabilities(_scores(spec, sizes, x, q, k, at, hides), _sums(x, head, rows))
            delta = x["delta"][0, head, :, rows]
            kept, dp = _kept(spec, x, at, p, _product(v, cotangent, 1, 1))
            dv += _product(kept.astype(v.dtype), cotangent, 1, 0)
            return dk + _product(_shown(x, at, p * (dp - delta)).astype(q.dtype), q, 1, 0), dv

        found = _over(*blocks_of_queries(spec, sizes, block), step, found)
    dk, dv = found
    out["dk"][0, 0], out["dv"][0, 0] = (dk * spec.scale).astype(k.dtype), dv.astype(v.dtype)


def _seen(sizes: Sizes, here: Task, j: Any) -> _At:
    """The scores of a program's queries and a block of keys."""
    (batch, head, i, _), (queries, keys) = here, sizes.blocks
    words = pl.ds(j * (keys // WORD), keys // WORD)
    return _At(0, slice(None), pl.ds(j * keys, keys), words, (batch, head), i * queries, j * keys)


Range = tuple[Any, Any]


def blocks_of_keys(spec: Spec, sizes: Sizes, here: Task) -> tuple[Range, Range]:
    """The blocks of keys of which a program's queries see all, and those of which they see some."""
    (queries, keys), (_, _, i, _) = sizes.blocks, here
    whole, every = sizes.keys // keys, sizes.whole("k") // keys
    if not spec.causal:
        return (0, whole), (whole, every)
    whole = jnp.minimum((i * queries + 1) // keys, whole)
    return (0, whole), (whole, jnp.minimum(((i + 1) * queries + keys - 1) // keys, every))


def blocks_of_queries(spec: Spec, sizes: Sizes, j: Any) -> tuple[Range, Range]:
    """The blocks of queries that see all of a program's keys, and those that see some."""
    (queries, keys), every = sizes.blocks, sizes.whole("q") // sizes.blocks.queries
    first, whole = (j * keys // queries, ((j + 1) * keys + queries - 2) // queries) if spec.causal else (0, 0)
    if sizes.keys % keys:
        whole = lax.select((j + 1) * keys > sizes.keys, jnp.int32(every), jnp.asarray(whole, jnp.int32))
    whole = jnp.minimum(whole, every) if spec.causal else whole
    return (whole, every), (first, whole)


def _over(whole: Range, some: Range, step: Callable[..., Any], start: Any) -> Any:
    """Steps over blocks of which all is seen, and then over those of which some is hidden."""
    for (first, stop), hides in ((whole, False), (some, True)):
        if first is not stop:
            of = functools.partial(_step, step, first, hides)
            start = lax.fori_loop(0, stop - first, of, start)
    return start


def _step(step: Callable[..., Any], first: Any, hides: bool, i: Any, known: Any) -> Any:
    return step(first + i, known, hides)


def _scores(spec: Spec, sizes: Sizes, x: Refs, q: Any, k: Any, at: _At, hides: bool) -> Any:
    """Scores, float32 [keys, queries]. **Arguments:** `hides`: whether some are of keys that no query may see."""
    s = _product(k, q, 1, 1) * spec.scale
    if "bias" in x:
        s += _tile(x["bias"], at).astype(jnp.float32)
    if "mask" in x:
        s = jnp.where(_tile(x["mask"], at) != 0, s, spec.fill)
    if hides:
        query, key = _places(s.shape, at)
        seen = key < sizes.keys
        s = jnp.where(seen & (key <= query) if spec.causal else seen, s, -jnp.inf)
    return s


def _shown(x: Refs, at: _At, slopes: Any) -> Any:
    """Cotangents of scores that no mask replaces: where all keys are hidden, they have probabilities all the same."""
    return jnp.where(_tile(x["mask"], at) != 0, slopes, 0.0) if "mask" in x else slopes


def _sums(x: Refs, head: int, queries: Any) -> tuple[Any, Any]:
    return x["sums"][0, head, :1, queries], x["sums"][0, head, 1:, queries]


def _probabilities(scores: Any, sums: tuple[Any, Any]) -> Any:
    most, total = sums
    return jnp.exp(scores - most) * (1 / total)


def _tile(ref: Any, at: _At) -> Any:
    _, heads, _, queries = ref.shape
    return ref[0, at.head if heads > 1 else 0, at.keys, at.queries if queries > 1 else slice(None)]


def _drawn(spec: Spec, sizes: Sizes, seeds: Any, at: _At) -> Any:
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
