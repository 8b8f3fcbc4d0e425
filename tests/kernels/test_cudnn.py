"""What is asked of cuDNN is what `jax.nn.dot_product_attention` asks of it; no GPU is needed to see that."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unity_jax.kernels import cudnn, primitive, xla
from unity_jax.kernels.spec import Operands, Residuals, Spec


def shaped(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def operands(queries=256, keys=256, features=64, of_values=None, dtype=jnp.bfloat16, **others):
    q, k = (shaped(2, heads, n, features, dtype=dtype) for heads, n in ((8, queries), (4, keys)))
    return Operands(q, k, shaped(2, 4, keys, of_values or features, dtype=dtype), **others)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dtype": jnp.float16},
        {"features": 128},
        {"features": 8},
        {"queries": 197, "keys": 197},
        {"queries": 64, "keys": 512},
    ],
)
def test_takes_types_of_16_bits(given):
    assert cudnn.takes(Spec(), operands(**given))


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        (Spec(), {"dtype": jnp.float32}),
        (Spec(), {"features": 136}),
        (Spec(), {"features": 60}),
        (Spec(), {"of_values": 32}),
        (Spec(), {"keys": 1}),
        (Spec(causal=True), {"keys": 512}),
        (Spec(keep=0.9), {}),
        (Spec(), {"mask": shaped(2, 1, 1, 256, dtype=bool)}),
        (Spec(), {"bias": shaped(2, 1, 1, 256)}),
    ],
)
def test_leaves_the_rest_to_our_kernels(spec, given):
    assert not cudnn.takes(spec, operands(**given))


CALL = re.compile(r'custom_call @__cudnn\$(\w+)\(([^)]*)\).*?backend_config = "((?:[^"\\]|\\.)*)".* : (\(.*)')


def calls(of, *given):
    """The calls of cuDNN that a function makes on GPUs, in order: target, configuration, types, and what of arguments
    and results of other calls each reads."""
    text = jax.jit(of).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    found = CALL.findall(text)
    return [(target, set_fields(json.loads(c.replace("\\22", '"'))), types, names) for target, names, c, types in found]


def set_fields(message):
    """The fields of a message that are not as they are by default, and that a call without dropout reads."""
    if not isinstance(message, dict):
        return message
    found = {name: set_fields(value) for name, value in message.items() if name != "seed"}
    return {name: v for name, v in found.items() if v not in (0, "0", False, [], {}, None, "PRIMITIVE_TYPE_INVALID")}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_calls_are_those_of_jax(monkeypatch, causal, dtype):
    from jax._src.cudnn import fused_attention_stablehlo as of_jax

    monkeypatch.setattr(of_jax, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(of_jax, "check_is_flash_attention", lambda *_, **__: None)  # asks a GPU

    def ours(q, k, v, cotangent):
        spec, x = Spec(scale=0.2, causal=causal), Operands(q, k, v)
        found = primitive.forward(spec, x)
        return found, primitive.backward(spec, x, found, cotangent)

    def theirs(q, k, v, cotangent):
        kind = of_jax.MaskType.CAUSAL if causal else of_jax.MaskType.NO_MASK
        attention = functools.partial(of_jax.dot_product_attention, scale=0.2, mask_type=kind, qkv_layout="BNTH")
        y, back = jax.vjp(attention, q, k, v)
        return y, back(cotangent)

    x = operands(dtype=dtype)
    (forward, backward), others = (calls(of, *x[:3], x.q) for of in (ours, theirs))
    assert forward[0] == "fmhaSoftmax"
    assert [call[:3] for call in (forward, backward)] == [call[:3] for call in others]
    assert re.fullmatch(r"%arg0, %arg1, %arg2, %\w+, %arg3, %\w+#0", backward[3]), "the cotangent, then the output"


def test_the_gradient_is_of_the_sums_of_the_forward_pass():
    """With one number for each query: the logarithm of the sum, and one."""
    spec, x = Spec(scale=0.3), operands(queries=8, keys=16, features=8, dtype=jnp.float32)
    q, k, v, cotangent = (jax.random.normal(jax.random.key(i), t.shape) for i, t in enumerate((*x[:3], x.q)))
    found = xla.forward(spec, given := Operands(q, k, v))
    one = found.sums[:, :, :1] + jnp.log(found.sums[:, :, 1:])
    single = Residuals(found.output, jnp.concatenate([one, jnp.ones_like(one)], axis=2), None)
    for mine, other in zip(*(xla.backward(spec, given, f, cotangent) for f in (single, found)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
