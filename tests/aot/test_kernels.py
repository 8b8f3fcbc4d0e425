"""Kernels compile for chips that are not there, within planned programs, and keep no scores in memory."""

import functools

import jax
import jax.numpy as jnp
import pytest

import unity_jax as unity
from unity_jax.aot.compiled import CompiledMemory
from unity_jax.aot.topologies import compiled_for, topology
from unity_jax.kernels import attention
from unity_jax.lower.compile import lower
from unity_jax.plan.devices import mesh_over

ROWS, WIDTH, HEADS, LENGTH = 128, 512, 8, 2048


def step(w, x, key, rate):
    """A layer with shared keys, dropout and a causal mask, and its update."""

    def loss(w):
        q, k, v = (jnp.einsum("bsd,dhf->bshf", x, w[of]) for of in "qkv")
        y = attention(q, k, v, causal=True, dropout_rate=rate, dropout_key=key)
        return jnp.mean(jnp.einsum("bshf,hfd->bsd", y, w["o"]).astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients), value


@pytest.mark.parametrize(
    ("on", "platform", "rate", "target"),
    [
        *(
            pytest.param(on, "tpu", 0.1, "tpu_custom_call", marks=pytest.mark.extra("tpu-aot"))
            for on in ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")
        ),
        *(
            pytest.param(on, "gpu", rate, target, marks=pytest.mark.extra("gpu-aot"))
            for on in ("h100:8", "a100:8")
            for rate, target in ((0.1, "triton"), (0.0, "__cudnn$fmhaSoftmaxBackward"))
        ),
    ],
)
def test_attention_compiles_in_a_plan(on, platform, rate, target):
    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    features = WIDTH // HEADS
    w = {"q": shape(WIDTH, HEADS, features), "k": shape(WIDTH, HEADS // 2, features), "v": shape(WIDTH, 4, features)}
    w["o"] = shape(HEADS, features, WIDTH)
    given = w, shape(ROWS, LENGTH, WIDTH), jax.eval_shape(lambda: jax.random.key(0))
    sharded = unity.auto_shard(functools.partial(step, rate=rate), machine=on, options=unity.Options(cache=None))
    plan = sharded.plan(*given)
    compiled = compiled_for(lower(plan.stored, plan.pcg, mesh_over(plan, topology(on))), platform)
    scores = ROWS // 8 * HEADS * LENGTH**2
    memory = CompiledMemory.of(compiled)
    assert memory.temp < scores, "not even a byte for each"
    assert target in compiled.as_text()
    assert 0.75 < plan.predicted.peak_bytes / memory.peak < 1.3
