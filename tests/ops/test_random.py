"""Random numbers and keys: equal bits for every strategy."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from tests.ops.harness import arg, check_rule, ops_of
from unity_jax.ops import random
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.mesh import MeshAxes

MESHES = ((2,), (3,), (2, 2))
IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


@pytest.fixture(params=[*((i, True) for i in IMPLEMENTATIONS), ("threefry2x32", False)], ids=str)
def key(request):
    """A key of every implementation."""
    with jax.threefry_partitionable(request.param[1]):
        yield jax.random.key(3, impl=request.param[0])


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64])
def test_bits(key, dtype):
    def fn(k):
        return jax.random.bits(k, (5, 6), dtype), jax.random.bits(k, (), dtype), jax.random.bits(k, (1, 4), dtype)

    assert check_rule(fn, key, mesh_sizes=MESHES)["random_bits"] == {"pass", "uneven", "replicated"}


def test_bits_of_many_keys(key):
    def fn(k):
        return jax.vmap(lambda k: jax.random.bits(k, (5, 3)))(k)

    kinds = check_rule(fn, jax.random.split(key, 4), mesh_sizes=MESHES)
    assert kinds["random_bits"] == {"pass", "uneven", "replicated"}


def test_keys(key):
    def fn(k):
        many = jax.random.split(k, (3, 4))
        folded = jax.vmap(jax.vmap(jax.random.fold_in), (0, None))(many, jnp.arange(4))
        again = jax.vmap(jax.vmap(lambda k: jax.random.split(k, 5)))(many)
        words = jax.random.key_data(jax.random.clone(again))
        return folded, jax.random.wrap_key_data(words, impl=str(jax.random.key_impl(k)))

    kinds = check_rule(fn, key, mesh_sizes=((2,), (3,)))
    assert "pass" in kinds["random_wrap"] & kinds["random_unwrap"] & kinds["random_clone"]
    threefry = str(key.dtype) == "key<fry>"
    assert ("pass" in kinds["random_fold_in"]) == threefry
    assert ("pass" in kinds["random_split"]) == threefry


def test_seeds(key):
    impl = str(jax.random.key_impl(key))
    fn = jax.vmap(lambda s: jax.random.key(s, impl=impl))
    assert "pass" in check_rule(fn, np.arange(5), mesh_sizes=MESHES)["random_seed"]


def test_gamma(key):
    fn = lambda k: jax.random.gamma(k, jnp.full((4,), 2.0))  # noqa: E731
    kinds = check_rule(fn, key, only="random_gamma", mesh_sizes=((2,),))
    assert kinds["random_gamma"] == {"replicated"}  # how a key is split depends on the shape
    fn = jax.vmap(lambda k, a: jax.random.gamma(k, a))
    kinds = check_rule(fn, jax.random.split(key, 4), np.full((4, 3), 2.0), only="random_gamma", mesh_sizes=((2,),))
    assert ("pass" in kinds["random_gamma"]) == (str(key.dtype) == "key<fry>")


def test_threefry():
    count = arg(4, 5, dtype=np.uint32)
    for k in (np.uint32(7), count[:1]):
        kinds = check_rule(lambda k, x: threefry2x32_p.bind(k, k, x, x), k, count, mesh_sizes=MESHES)
        assert kinds["threefry2x32"] == {"pass", "uneven", "replicated"}


def test_draws_from_a_key_with_partitionable_threefry_need_no_whole_array():
    (op,) = ops_of(lambda k: jax.random.bits(k, (64, 48)), jax.random.key(0))
    assert rule_of(op).local is random._hash_counters


@pytest.mark.parametrize("whole", [(6, 8, 3), (2**16, 2**16), (2**17, 2**16), (3, 2**31, 5)])
def test_positions_in_arrays_of_more_and_fewer_than_32_bits(whole):
    """Of a shard of one element along each dimension but the last, somewhere in the middle."""
    at = [n // 2 for n in whole]
    shard = types.SimpleNamespace(
        op=types.SimpleNamespace(outputs=[types.SimpleNamespace(shape=whole)], params={}),
        rule=types.SimpleNamespace(results=[[(d,) for d in range(len(whole))]]),
        result_shape=lambda: (*[1] * (len(whole) - 1), 2),
        offset=lambda d: at[d],
    )
    first = sum(i * math.prod(whole[d + 1 :]) for d, i in enumerate(at))
    high, low = random._positions(shard, 0, ())
    assert [(int(h) << 32) + int(w) for h, w in zip(high.ravel(), low.ravel(), strict=True)] == [first, first + 1]


@pytest.mark.parametrize(("platform", "wide"), [("cpu", False), ("tpu", False), ("cuda", True)])
def test_gpus_count_with_64_bits_as_jax_does(platform, wide):
    (op,) = ops_of(lambda k: jax.random.bits(k, (64, 48), "uint32"), jax.random.key(0))
    shard = Shard(op, rule_of(op), MeshAxes(("x",), (1,)), (-1,))
    lowered = jax.jit(lambda k: random._hash_counters(shard, k)).trace(jax.random.key(0))
    assert ("xui64>" in lowered.lower(lowering_platforms=(platform,)).as_text()) == wide
