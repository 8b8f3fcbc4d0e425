"""Under `jax.grad` the forward and the backward pass of a decorated function are planned, each as a whole; under
`jax.jvp` the function and its tangents are, as one.

A function that is first traced, by `jax.jit` or as the body of a loop, has only the former: which of the two is wanted
is not known yet, and JAX refuses `jvp` of what has a backward pass of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity_jax import _compat
from unity_jax.call import Call, JitSettings, abstract

TANGENTS = "tangents"
"""The keyword argument with the tangents, followed by a `_` for each that there is already."""


class Derivative:
    """Reverse-mode and forward-mode derivatives.

    **Arguments:** `fun`: the undecorated function; `decorate(fun, in_shardings)`: makes a planned function of another
    one.
    """

    def __init__(
        self, fun: Callable[..., Any], jit: JitSettings, decorate: Callable[[Callable[..., Any], Any], Any]
    ) -> None:
        @functools.wraps(fun)
        def forward(*args: Any, **kwargs: Any) -> Any:
            of_smooth, primals = _of_smooth(fun, Call.of(fun, jit, args, kwargs))
            _, pull, out = jax.vjp(of_smooth, *primals, has_aux=True)
            residuals, structure = jax.tree.flatten(pull)
            return out, Residuals(residuals, Structure(structure))

        @functools.wraps(fun)
        def pushed(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.pop(_tangents(kwargs)[:-1])
            of_smooth, primals = _of_smooth(fun, Call.of(fun, jit, args, kwargs))
            _, tangents, out = jax.jvp(of_smooth, primals, tuple(given), has_aux=True)
            return out, tangents

        self._decorate = decorate
        self._forward = decorate(forward, None)
        self._pushed = decorate(pushed, None)
        self._backward: dict[int, list[tuple[Any, Any]]] = {}  # by the plan of the forward pass: structure, function

    def __call__(self, call: Call, run: Callable[[Call], Any]) -> Any:
        """`run(call)`, with its derivative."""

        def value(*leaves: Any) -> Any:
            return run(Call(call.args, call.kwargs, call.static, list(leaves), call.tree))

        if any(map(_compat.is_pushed, call.leaves)):
            return self._push(call, jax.custom_jvp(value))
        return self._pull(call, jax.custom_vjp(value))

    def _push(self, call: Call, value: Any) -> Any:
        @value.defjvp
        def tangents(primals: Any, tangents: Any) -> Any:
            args, kwargs = call.with_leaves(primals)
            smooth = [t for x, t in zip(call.leaves, tangents, strict=True) if _is_smooth(x)]
            out, found = self._pushed(*args, **kwargs, **{_tangents(kwargs): smooth})
            left = iter(found)
            none = jax.dtypes.float0
            return out, jax.tree.map(lambda x: next(left) if _is_smooth(x) else np.zeros(np.shape(x), none), out)

        return value(*call.leaves)

    def _pull(self, call: Call, value: Any) -> Any:
        def forward(*leaves: Any) -> tuple[Any, Any]:
            args, kwargs = call.with_leaves(leaves)
            plan = self._forward.plan(*args, **kwargs)
            out, residuals = self._forward(*args, **kwargs)
            chosen.append(self._backward_of(plan, residuals.structure))
            return out, residuals.values

        def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
            smooth = [c for c in jax.tree.leaves(cotangents) if c.dtype != jax.dtypes.float0]
            found = iter(chosen[-1](residuals, smooth))
            return tuple(next(found) if _is_smooth(x) else None for x in call.leaves)

        chosen: list[Any] = []
        value.defvjp(forward, backward)
        return value(*call.leaves)

    def _backward_of(self, plan: Any, structure: Structure) -> Any:
        """The backward pass of a forward pass, from its residuals, which lie as the forward pass leaves them.

        Under another derivative the forward pass is traced again: its residuals are the same if it reads the same.
        """
        known = self._backward.setdefault(id(plan), [])
        for other, backward in known:
            if structure == other:
                return backward

        def pull_back(residuals: Any, cotangents: Any) -> Any:
            return jax.tree.unflatten(structure.tree, residuals)(cotangents)

        shardings = plan.out_shardings[1]
        lie = shardings.values if structure == shardings.structure else None
        known.append((structure, self._decorate(pull_back, (lie, None))))
        return known[-1][1]


@dataclass(frozen=True, eq=False)
class Structure:
    """How residuals make a function that pulls back. It holds the program that reads them, which is another object each
    time that it is traced; two are equal if they read alike."""

    tree: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        a, b = self.tree, other.tree
        return a == b or (a.num_leaves == b.num_leaves and self._text == other._text)

    def __hash__(self) -> int:
        return hash(self.tree.num_leaves)

    @functools.cached_property
    def _text(self) -> str:
        return str(self.tree)


@dataclass(frozen=True)
class Residuals:
    """What a forward pass keeps for the backward pass."""

    values: list[Any]
    structure: Structure


jax.tree_util.register_dataclass(Residuals, ["values"], ["structure"])


def _of_smooth(fun: Callable[..., Any], call: Call) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A call as a function of the leaves that have derivatives, to those results that have them and all results; and
    these leaves."""

    def of_smooth(*xs: Any) -> Any:
        smooth = iter(xs)
        args, kwargs = call.with_leaves([next(smooth) if _is_smooth(x) else x for x in call.leaves])
        out = fun(*args, **kwargs)
        return [x for x in jax.tree.leaves(out) if _is_smooth(x)], out

    return of_smooth, tuple(filter(_is_smooth, call.leaves))


def _tangents(keywords: Iterable[str]) -> str:
    """The next keyword for tangents beside others."""
    return max((k + "_" for k in keywords if k.rstrip("_") == TANGENTS), key=len, default=TANGENTS + "_")


def _is_smooth(leaf: Any) -> bool:
    return bool(jnp.issubdtype(abstract(leaf).dtype, jnp.inexact))
