"""Attention as two primitives, so that a traced step has it as one op of each pass, which is planned like any other.

    attention       q, k, v, *others                               -> output, sums, *kept
    attention_back  q, k, v, *others, output, sums, *kept, cotangent -> dq, dk, dv

What runs it is decided where it is compiled: on GPUs `cudnn` where that can, else `flash`, which runs it on TPUs too,
and `xla` elsewhere. Shapes as in `flash`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from unity_jax import _compat
from unity_jax.kernels import cudnn, flash, xla
from unity_jax.kernels.spec import WORD, Operands, Residuals, Spec

ATTENTION, ATTENTION_BACK = Primitive("attention"), Primitive("attention_back")
ATTENTION.multiple_results = ATTENTION_BACK.multiple_results = True

OTHERS = ("bias", "mask", "seeds")
"""Operands that may be missing; `given` says which are there, in this order."""


def forward(spec: Spec, x: Operands) -> Residuals:
    """`flash.forward`, or the same by `xla`."""
    given = tuple(of for of in OTHERS if getattr(x, of) is not None)
    output, sums, *kept = ATTENTION.bind(x.q, x.k, x.v, *(getattr(x, of) for of in given), spec=spec, given=given)
    return Residuals(output, sums, kept[0] if kept else None)


def backward(spec: Spec, x: Operands, found: Residuals, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`flash.backward`, or the same by `xla`."""
    given = tuple(of for of in OTHERS[:2] if getattr(x, of) is not None)
    kept = () if found.kept is None else (found.kept,)
    others = [getattr(x, of) for of in given]
    dq, dk, dv = ATTENTION_BACK.bind(
        x.q, x.k, x.v, *others, found.output, found.sums, *kept, cotangent, spec=spec, given=given
    )
    return dq, dk, dv


def operands(flat: Sequence[Any], given: Sequence[str]) -> Operands:
    """The first operands of a primitive, by name."""
    return Operands(*flat[:3], **dict(zip(given, flat[3:], strict=False)))


def _forward(of: Callable[..., Residuals], *flat: Any, spec: Spec, given: tuple[str, ...]) -> list[Any]:
    return [t for t in of(spec, operands(flat, given)) if t is not None]


def _backward(of: Callable[..., Any], *flat: Any, spec: Spec, given: tuple[str, ...]) -> list[Any]:
    output, sums, *kept, cotangent = flat[3 + len(given) :]
    found = Residuals(output, sums, kept[0] if kept else None)
    return list(of(spec, operands(flat, given), found, cotangent))


def _shapes(*flat: Any, spec: Spec, given: tuple[str, ...]) -> list[Any]:
    q, k, v, *_ = flat
    batch, heads, queries, _ = q.shape
    found = [(*q.shape[:3], v.shape[-1]), (batch, heads, 2, queries), (batch, heads, -(-k.shape[2] // WORD), queries)]
    types = q.dtype, jnp.promote_types(q.dtype, jnp.float32), jnp.uint32
    return [q.update(shape=s, dtype=jnp.dtype(d)) for s, d in zip(found, types, strict=True)][: 2 + ("seeds" in given)]


def _vmapped(primitive: Primitive) -> Callable[..., Any]:
    """Examples of `vmap` are more of the batch."""

    def rule(flat: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
        count = next(x.shape[d] for x, d in zip(flat, dims, strict=True) if d is not None)
        every = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(flat, dims, strict=True)]
        batch = every[0].shape[1]
        every = [jnp.broadcast_to(x, (count, batch, *x.shape[2:])) for x in every]  # biases may be of all examples
        made = primitive.bind(*(x.reshape(-1, *x.shape[2:]) for x in every), **params)
        return [x.reshape(count, batch, *x.shape[1:]) for x in made], [0] * len(made)

    return rule


def _on_tpu(name: str) -> Callable[..., Any]:
    return functools.partial(getattr(flash, name), platform="tpu")


def _on_gpu(name: str) -> Callable[..., Any]:
    def run(spec: Spec, x: Operands, *others: Any) -> Any:
        if cudnn.takes(spec, x):
            return getattr(cudnn, name)(spec, x, *others)
        return getattr(flash, name)(spec, x, *others, platform="gpu")

    return run


PLATFORMS: dict[str | None, Callable[[str], Callable[..., Any]]] = {
    None: functools.partial(getattr, xla),
    "tpu": _on_tpu,
    "cuda": _on_gpu,
}
"""What runs a pass, by its name, on a platform, and on all others."""


def _register(primitive: Primitive, run: Callable[..., Any], name: str) -> None:
    """How a primitive is run by the functions of this name."""
    for platform, of in PLATFORMS.items():
        made = mlir.lower_fun(functools.partial(run, of(name)), multiple_results=True)
        mlir.register_lowering(primitive, _compat.quiet(made), platform=platform)
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=("spec", "given")))
    batching.primitive_batchers[primitive] = _vmapped(primitive)


ATTENTION.def_abstract_eval(_shapes)
ATTENTION_BACK.def_abstract_eval(lambda q, k, v, *_, spec, given: [q, k, v])
_register(ATTENTION, _forward, "forward")
_register(ATTENTION_BACK, _backward, "backward")
