"""Under `jax.grad` the forward and the backward pass of a decorated function are planned, each as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from unity_jax.call import Call, JitSettings, abstract


class Derivative:
    """Reverse-mode derivatives.

    **Arguments:** `fun`: the undecorated function; `decorate(fun, in_shardings)`: makes a planned function of another
    one.
    """

    def __init__(
        self, fun: Callable[..., Any], jit: JitSettings, decorate: Callable[[Callable[..., Any], Any], Any]
    ) -> None:
        @functools.wraps(fun)
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = Call.of(fun, jit, args, kwargs)

            def of_smooth(*xs: Any) -> Any:
                smooth = iter(xs)
                a, k = call.with_leaves([next(smooth) if _is_smooth(x) else x for x in call.leaves])
                out = fun(*a, **k)
                return [x for x in jax.tree.leaves(out) if _is_smooth(x)], out

            _, pull, out = jax.vjp(of_smooth, *filter(_is_smooth, call.leaves), has_aux=True)
            return out, pull

        self._decorate = decorate
        self._forward = decorate(forward, None)
        self._backward: dict[int, Any] = {}  # by the plan of the forward pass

    def __call__(self, call: Call, run: Callable[[Call], Any]) -> Any:
        """`run(call)`, with its derivative."""

        @jax.custom_vjp
        def value(*leaves: Any) -> Any:
            return run(Call(call.args, call.kwargs, call.static, list(leaves), call.tree))

        def forward(*leaves: Any) -> tuple[Any, Any]:
            args, kwargs = call.with_leaves(leaves)
            plan = self._forward.plan(*args, **kwargs)
            if id(plan) not in self._backward:
                self._backward[id(plan)] = self._decorate(_pull_back, (plan.out_shardings[1], None))
            chosen.append(self._backward[id(plan)])
            return self._forward(*args, **kwargs)

        def backward(pull: Any, cotangents: Any) -> tuple[Any, ...]:
            smooth = [c for c in jax.tree.leaves(cotangents) if c.dtype != jax.dtypes.float0]
            found = iter(chosen[-1](pull, smooth))
            return tuple(next(found) if _is_smooth(x) else None for x in call.leaves)

        chosen: list[Any] = []
        value.defvjp(forward, backward)
        return value(*call.leaves)


def _pull_back(pull: Any, cotangents: Any) -> Any:
    return pull(cotangents)


def _is_smooth(leaf: Any) -> bool:
    return bool(jnp.issubdtype(abstract(leaf).dtype, jnp.inexact))
