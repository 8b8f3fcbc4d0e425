"""Objects of `flax.nnx` as arguments and results: a function that changes them becomes one over arrays.

    model, optimizer   --split-->   ObjectState, ObjectState     arrays with readable paths, their structure static
    step(model, optimizer, x)       pure(step)(state, state, x) -> Outcome: new states, result
    updated in place   <--merge--   Outcome

This is the protocol of `nnx.jit`: an object that is met twice, in two arguments or in a result, is one; what the
function adds to objects or takes from them is done to the caller's. flax is imported by nobody but the caller.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from unity_jax.nnx_nodes import ObjectState, holds_objects, is_object, is_special

_TAG = "unity_jax"


@dataclass(frozen=True)
class Part:
    """A key of an `Outcome`: nothing of a printed path."""

    text: str

    def __str__(self) -> str:
        return ""


ARGS, KWARGS, RESULT = map(Part, ("args", "kwargs", "result"))


@dataclass(frozen=True)
class Outcome:
    """What a function over objects gives: the states of its arguments afterwards (None where there is no object),
    and its result."""

    args: Any
    kwargs: Any
    result: Any


jax.tree_util.register_pytree_with_keys(
    Outcome,
    lambda x: (((ARGS, x.args), (KWARGS, x.kwargs), (RESULT, x.result)), None),
    lambda _, children: Outcome(*children),
    lambda x: ((x.args, x.kwargs, x.result), None),
)


def split(tree: Any) -> tuple[Any, Any]:
    """The objects in arguments as `ObjectState`s, and the objects by index for `merge` (None if there are none).

    An `nnx.State` is no object: it stays the pytree that it is.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not holds_objects(tree):
        return tree, None
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=is_special)
    with nnx.update_context(_TAG) as update:
        with nnx.split_context(_TAG) as context:
            states = _states(leaves, context, lambda i: _where(tree, i))
        return jax.tree_util.tree_unflatten(structure, states), update.outer_index_outer_ref


def pure(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function over objects as one over `ObjectState`s, that returns an `Outcome`. Where neither its arguments nor
    its result hold objects it is the function itself."""
    if getattr(fun, "_is_pure", False):
        return fun

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nnx = sys.modules.get("flax.nnx")
        if nnx is None:
            return fun(*args, **kwargs)
        given, tree = jax.tree_util.tree_flatten((args, kwargs), is_leaf=_is_whole)
        with nnx.update_context(_TAG):
            with nnx.merge_context(_TAG, inner=True) as context:
                inside = [x.object(context) if isinstance(x, ObjectState) else x for x in given]
            new_args, new_kwargs = jax.tree_util.tree_unflatten(tree, inside)
            result = fun(
                *(new if _is_split(x) else x for x, new in zip(args, new_args, strict=True)),
                **{k: new_kwargs[k] if _is_split(x) else x for k, x in kwargs.items()},
            )
            leaves, result_tree = jax.tree_util.tree_flatten(result, is_leaf=is_special)
            if not _is_split(given) and not any(map(is_object, leaves)):
                return result
            with nnx.split_context(_TAG) as context:
                pairs = zip(given, inside, strict=True)
                after = [ObjectState.of(context, x) if isinstance(was, ObjectState) else None for was, x in pairs]
                leaves = _states(leaves, context, lambda _: f"the result of {getattr(fun, '__name__', fun)}")
        states, state_kwargs = jax.tree_util.tree_unflatten(tree, after)
        return Outcome(states, state_kwargs, jax.tree_util.tree_unflatten(result_tree, leaves))

    run._is_pure = True  # type: ignore[attr-defined]  # and so is what `functools.wraps` makes of it
    return run


def merge(found: Any, objects: Any = None) -> Any:
    """The result of a function made `pure`, after its arguments have been changed as it says.

    **Arguments:** `objects`: what `split` gave with the arguments.
    """
    if not isinstance(found, Outcome):
        return found
    nnx = sys.modules["flax.nnx"]
    with nnx.update_context(_TAG) as update:
        update.outer_index_outer_ref = objects
        with nnx.merge_context(_TAG, inner=False) as context:
            _objects((found.args, found.kwargs), context)
            return _objects(found.result, context)


def unsplit(tree: Any) -> Any:
    """New objects in place of the `ObjectState`s of a tree, with whatever these hold for arrays."""
    if "flax.nnx" not in sys.modules:
        return tree
    with sys.modules["flax.nnx"].merge_context() as context:
        return _objects(tree, context)


class Stage:
    """A `jax.stages.Lowered` or `Compiled` of a function over `ObjectState`s, for objects."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def compile(self, *args: Any, **kwargs: Any) -> Stage:
        """As of `jax.stages.Lowered`."""
        return Stage(self._stage.compile(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.stages.Compiled`, with the objects updated in place."""
        (args, kwargs), objects = split((args, kwargs))
        return merge(self._stage(*args, **kwargs), objects)


def _states(leaves: Sequence[Any], context: Any, where: Callable[[int], str]) -> list[Any]:
    """Leaves, of which those that are objects as their states; `where` says in errors which leaf it is."""
    found = list(leaves)
    for i, x in enumerate(leaves):
        if is_object(x):
            try:
                found[i] = ObjectState.of(context, x)
            except TypeError as error:
                raise TypeError(f"{where(i)}: {error}") from None
    return found


def _where(tree: Any, index: int) -> str:
    path, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_special)[0][index]
    return f"argument {jax.tree_util.keystr(path[1:])}"


def _objects(tree: Any, context: Any) -> Any:
    def of(x: Any) -> Any:
        return x.object(context) if isinstance(x, ObjectState) else x

    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, ObjectState))


def _is_whole(x: Any) -> bool:
    return isinstance(x, ObjectState) or is_special(x)


def _is_split(tree: Any) -> bool:
    return any(isinstance(x, ObjectState) for x in jax.tree.leaves(tree, is_leaf=_is_whole))
