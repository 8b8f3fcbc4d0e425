"""Attention kernels at arguments that are drawn, beside plain JAX operations and exact arithmetic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from unity_jax.kernels import flash, primitive, xla
from unity_jax.kernels.grid import Blocks
from unity_jax.kernels.spec import Operands, Spec

BLOCKS = Blocks(128, 128)
INTERPRETED = tuple(functools.partial(of, platform="cpu", blocks=BLOCKS) for of in (flash.forward, flash.backward))
"""Both passes of the kernels of `flash`, without a device that they are for."""
COMPILED = primitive.forward, primitive.backward
"""Both passes by whatever runs them where JAX runs."""


def drawn(rng, shape, dtype=np.float64):
    return jnp.asarray(rng.normal(size=shape), dtype)


def case(seed, batch, groups, heads, queries, keys, features, causal, bias, mask, keep, dtype, more_of_values=8):
    """A specification and its operands. `bias`, `mask`: which of batch, heads and queries they have, or None."""
    rng = np.random.default_rng(seed)
    shape = batch, groups * heads, queries
    more = [
        None if has is None else (*(n if h else 1 for n, h in zip(shape, has, strict=True)), keys)
        for has in (bias, mask)
    ]
    seeds = jnp.asarray(rng.integers(0, 2**32, (*shape[:2], 4)), jnp.uint32) if keep < 1 else None
    x = Operands(
        drawn(rng, (*shape, features), dtype),
        drawn(rng, (batch, groups, keys, features), dtype),
        drawn(rng, (batch, groups, keys, features + more_of_values), dtype),
        None if more[0] is None else drawn(rng, more[0], dtype),
        None if more[1] is None else jnp.asarray(rng.random(more[1]) < 0.7),
        seeds,
    )
    return Spec(features**-0.5, causal, keep), x, drawn(rng, (*shape, features + more_of_values), dtype)


def differentiated(spec, x, kept, cotangent):
    """Attention by its definition, and the cotangents of its operands and its bias, by JAX."""

    def wide(t):
        return t.astype(jnp.float64) if jnp.issubdtype(t.dtype, jnp.floating) else t

    x, cotangent = jax.tree.map(wide, (x, cotangent))

    def fn(q, k, v, bias):
        k, v = (jnp.repeat(t, q.shape[1] // k.shape[1], axis=1) for t in (k, v))
        s = jnp.einsum("bhqf,bhkf->bhqk", q, k) * spec.scale + (0 if bias is None else bias)
        s = s if x.mask is None else jnp.where(x.mask, s, spec.fill)
        s = jnp.where(jnp.tril(jnp.ones(s.shape[2:], bool)), s, -jnp.inf) if spec.causal else s
        p = jax.nn.softmax(s, axis=-1)
        p = p if kept is None else jnp.where(kept, p / spec.keep, 0)
        return jnp.einsum("bhqk,bhkf->bhqf", p, v)

    output, pull = jax.vjp(fn, *x[:4])
    return output, *pull(cotangent)


def unpacked(kept, keys):
    """Which probabilities the bits say are kept, [batch, heads, queries, keys]."""
    kept = np.asarray(kept)
    bits = kept[:, :, :, None] >> np.arange(32, dtype=np.uint32)[:, None] & 1
    return np.swapaxes(bits.reshape(*kept.shape[:2], -1, kept.shape[-1])[:, :, :keys], 2, 3).astype(bool)


axes = st.one_of(st.none(), st.tuples(st.booleans(), st.booleans(), st.booleans()))
CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "batch": st.integers(1, 2),
        "groups": st.integers(1, 2),
        "heads": st.integers(1, 3),
        "queries": st.sampled_from([1, 7, 128, 197, 256, 300]),
        "keys": st.sampled_from([1, 33, 128, 200, 256, 384]),
        "features": st.sampled_from([8, 16, 40]),
        "causal": st.booleans(),
        "bias": axes,
        "mask": axes,
        "keep": st.sampled_from([1.0, 0.9, 0.5]),
        "dtype": st.sampled_from([np.float32, jnp.bfloat16]),
        "more_of_values": st.sampled_from([0, 8]),
    }
)
BY_CUDNN = CASES.map(
    lambda of: of
    | {"bias": None, "mask": None, "keep": 1.0, "dtype": jnp.bfloat16, "more_of_values": 0}
    | {"keys": max(of["queries"], 2) if of["causal"] else max(of["keys"], 2)}
    | {"queries": max(of["queries"], 2)}
)
"""Those that `cudnn` takes on GPUs."""


def error(found, exact):
    return float(jnp.max(jnp.abs(found.astype(jnp.float64) - exact), initial=0))


def errors(arguments, passes=INTERPRETED):
    """By result, how far a kernel is from float64, and how far it may be: twice as far as plain operations, besides one
    rounding of the largest value."""
    spec, x, cotangent = case(**arguments)
    forward, backward = passes
    plain, found = xla.forward(spec, x), forward(spec, x)
    if plain.kept is not None:
        kept, ours = (unpacked(t, x.k.shape[2]) for t in (plain.kept, found.kept))
        seen = np.tril(np.ones(kept.shape[2:], bool)) if spec.causal else np.ones(kept.shape[2:], bool)
        np.testing.assert_array_equal(ours[..., seen], kept[..., seen])  # others are not drawn
    with jax.enable_x64(True):
        exact = differentiated(spec, x, None if plain.kept is None else kept, cotangent)
    theirs = plain.output, *xla.backward(spec, x, plain, cotangent)
    ours = found.output, *backward(spec, x, found, cotangent)
    with jax.enable_x64(True):
        least = float(jnp.finfo(x.q.dtype).eps) * max(error(t, 0) for t in exact[:4])
        results = zip(("output", "dq", "dk", "dv"), ours, theirs, exact, strict=False)
        return {name: (error(a, t), 2 * error(b, t) + least) for name, a, b, t in results}
