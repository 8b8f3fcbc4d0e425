"""Attention by cuDNN on GPUs, forward and backward: the custom calls of XLA:GPU that `jax.nn.dot_product_attention`
makes, of which a planned step needs each pass by itself.

What a query's scores were normalized with is one number there, the logarithm of the sum of their exponentials; as
`Residuals.sums` that is a largest score with the sum one. Of queries that see no key it would not tell enough
(`spec`), and dropout draws bits of its own: what has a bias, a mask or dropout is left to `flash`.

https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
from jax import ffi

from unity_jax.kernels.spec import Operands, Residuals, Spec

WIDEST = 128
"""Features of a head; Hopper takes twice as many."""
TYPES = {"bfloat16": "BF16", "float16": "F16"}


def takes(spec: Spec, x: Operands) -> bool:
    """Whether cuDNN computes both passes, on GPUs of compute capability 8.0 and later: one type of 16 bits, features in
    multiples of eight; with a causal mask, as many keys as queries."""
    (_, _, queries, features), keys = x.q.shape, x.k.shape[2]
    return (
        x.bias is None
        and x.mask is None
        and spec.keep == 1
        and str(x.q.dtype) in TYPES
        and all(t.dtype == x.q.dtype and t.shape[3] == features for t in (x.k, x.v))
        and features % 8 == 0
        and 0 < features <= WIDEST
        and (queries == keys if spec.causal else queries > 0)
        and keys > 1
    )


def forward(spec: Spec, x: Operands) -> Residuals:
    """As `flash.forward`."""
    sums = jax.ShapeDtypeStruct(x.q.shape[:3], jnp.float32)
    products = {"bmm1": (3, 3), "bmm2": (3, 2)}
    output, found = _call("fmhaSoftmax", spec, x, products, (x.q, x.k, x.v), (x.q, sums))
    return Residuals(output, jnp.stack([found, jnp.ones_like(found)], axis=2), None)


def backward(spec: Spec, x: Operands, found: Residuals, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `flash.backward`."""
    sums = found.sums[:, :, 0] + jnp.log(found.sums[:, :, 1])
    products = {"bmm1_grad_gemm1": (2, 2), "bmm1_grad_gemm2": (3, 2), "bmm2_grad_gemm1": (2, 2)}
    products["bmm2_grad_gemm2"] = (3, 3)
    given = *x[:3], sums, cotangent.astype(x.q.dtype), found.output
    dq, dk, dv = _call("fmhaSoftmaxBackward", spec, x, products, given, x[:3])
    return dq, dk, dv


def _call(
    target: str, spec: Spec, x: Operands, products: dict[str, tuple[int, int]], given: Any, results: Any
) -> list[jax.Array]:
    """The results of a custom call, which has a workspace besides: XLA finds out how large it is.

    **Arguments:** `products`: of each product that is not batched, the dimensions of its operands.
    """
    (batch, heads, queries, _), keys = x.q.shape, x.k.shape[2]
    scores = {
        "element_type": TYPES[str(x.q.dtype)],
        "dimensions": [str(n) for n in (batch, heads, queries, keys)],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    config = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": spec.scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if spec.causal else "NO_MASK",
        "max_seg_per_batch": 1,
        **{f"{name}_dot_dimension_numbers": _numbers(*dims) for name, dims in products.items()},
    }
    made = ffi.ffi_call(
        f"__cudnn${target}",
        [*(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in results), jax.ShapeDtypeStruct((0,), jnp.uint8)],
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config}),
    )(*given)
    return list(made[:-1])


def _numbers(left: int, right: int) -> dict[str, list[str]]:
    batch = {f"{side}_batch_dimensions": ["0", "1"] for side in ("lhs", "rhs")}
    return {"lhs_contracting_dimensions": [str(left)], "rhs_contracting_dimensions": [str(right)], **batch}
