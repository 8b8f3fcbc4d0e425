"""One call of a decorated function: its arrays, its static arguments, and the key that decides whether to plan anew."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import jax
import numpy as np

from unity_jax import _compat, objects
from unity_jax.errors import UnsupportedError

T = TypeVar("T")


class Once(Generic[T]):
    """`functools.cached_property` without a lock: in Python 3.11 that takes longer than most of what is cached here."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self.find, self.__doc__ = find, find.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Once[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object, owner: type) -> T | Once[T]:
        if instance is None:
            return self
        found = vars(instance)[self.find.__name__] = self.find(instance)
        return found


@dataclass(frozen=True)
class JitSettings:
    """The arguments that `jax.jit` takes too, as the user gave them."""

    donate_argnums: Any = None
    donate_argnames: Any = None
    static_argnums: Any = None
    static_argnames: Any = None

    def keywords(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Call:
    """The arguments of one call.

    **Fields:** `args`, `kwargs`: as given; `static`: positions and names of static arguments; `leaves`: the arrays (or
    `jax.ShapeDtypeStruct`s) in the other arguments; `tree`: their structure, of `(args, kwargs)` without static
    arguments; `objects`: the nnx objects among them, whose arrays are leaves (`objects.split`).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: frozenset[int | str]
    leaves: list[Any]
    tree: Any
    objects: Any = None

    @staticmethod
    def of(
        fun: Callable[..., Any],
        jit: JitSettings,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plain: Any = None,
    ) -> Call:
        """Split the arguments as `jax.jit` would.

        **Arguments:** `plain`: a structure without nnx objects that the arguments may have, as in the last call.
        **Raises:** `UnsupportedError` for a leaf that is no array.
        """
        static = _static(fun, jit, len(args))
        given: Any = args, kwargs
        if static:
            moving = tuple(a for i, a in enumerate(args) if i not in static)
            given = moving, {k: v for k, v in kwargs.items() if k not in static}
        if plain is not None:
            try:
                call = Call(args, kwargs, static, plain.flatten_up_to(given), plain)
                if call.is_concrete:
                    return call
            except ValueError:  # another structure
                pass
        given, found = objects.split(given)
        leaves, tree = jax.tree_util.tree_flatten(given)
        call = Call(args, kwargs, static, leaves, tree, found)
        if not call.is_concrete:
            for i, leaf in enumerate(leaves):
                if not is_array(leaf):
                    call._refuse(i)
        return call

    @Once
    def types(self) -> set[type]:
        """The classes of the leaves."""
        return set(map(type, self.leaves))

    @Once
    def is_plain(self) -> bool:
        """Whether all leaves are arrays of JAX's own class that have not been deleted, as in almost all calls: found
        out without Python between them."""
        try:
            return True not in map(_compat.is_deleted, self.leaves)
        except TypeError:  # another class
            return False

    @property
    def is_concrete(self) -> bool:
        """Whether all leaves are arrays with data, of classes that have been met before."""
        return self.is_plain or self.types <= _concrete

    @Once
    def shardings(self) -> list[Any]:
        """How each array lies; None for what is not on devices."""
        if self.is_plain:
            return list(map(_compat.sharding, self.leaves))
        return [getattr(x, "sharding", None) for x in self.leaves]

    @property
    def fixed(self) -> tuple[tuple[int | str, Any], ...]:
        """The static arguments."""
        if not self.static:
            return ()
        given: dict[Any, Any] = {**dict(enumerate(self.args)), **self.kwargs}
        return tuple((where, given[where]) for where in sorted(self.static & given.keys(), key=str))

    @property
    def settings(self) -> tuple[Any, ...]:
        """The settings of JAX that change what is traced."""
        config: Any = jax.config  # its settings are added while JAX is imported
        return config.jax_enable_x64, config.jax_default_matmul_precision, jax.sharding.get_abstract_mesh()

    @Once
    def look(self) -> tuple[Any, ...]:
        """Equal for calls on arrays that have one key, if it is equal; cheap to compare with that of the last call.

        An array is its `aval`, which is the same object in the results of every step, and no two are looked into. What
        is no array with data equals nothing, but for arrays of the host.
        """
        types = map(_aval, self.leaves) if self.is_concrete else map(_look, self.leaves)
        return self.tree, list(types), self.fixed, self.settings

    @Once
    def key(self) -> Any:
        """What decides whether to trace anew: tree, shapes, dtypes, static values, and settings that change tracing.

        Weak types and pins are in the key, layouts of arrays are not; calls that differ only in weak types share a
        plan unless the types of their programs really differ.
        """
        key = self.tree, tuple(_type(x) for x in self.leaves), self.fixed, self.settings
        try:
            hash(key)
        except TypeError:
            for where, value in self.fixed:
                try:
                    hash(value)
                except TypeError as error:
                    raise TypeError(f"static argument {where!r} must be hashable, as for jax.jit: {error}") from None
            raise
        return key

    def changed(self, before: Any) -> str:
        """What differs from the call that had this key: `[1]['x'] is float32[32,8], was float32[64,8]`."""
        tree, types, fixed, settings = before
        if tree != self.tree:
            return "the arguments have another structure"
        if types != self.key[1]:
            paths = jax.tree_util.tree_flatten_with_path(self.dynamic(range(len(self.leaves))))[0]
            both = zip(paths, self.key[1], types, strict=True)
            found = [
                f"{jax.tree_util.keystr(path[1:])} is {_typed(now)}, was {_typed(was)}"
                for (path, _), now, was in both
                if now != was
            ]
            return found[0] + (f", and {len(found) - 1} more arguments changed" if len(found) > 1 else "")
        if fixed != self.fixed:
            new = ", ".join(f"{where!r} is {value!r}" for where, value in self.fixed if (where, value) not in fixed)
            return f"static argument {new}" if new else "other static arguments are given"
        return "other settings of JAX" if settings != self.key[3] else "other shardings are asked for"

    @property
    def pins(self) -> tuple[Any, ...]:
        """The shardings of the `ShapeDtypeStruct`s, None elsewhere."""
        return tuple(x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None for x in self.leaves)

    @property
    def is_traced(self) -> bool:
        """Whether the call is made under `jit`, `grad`, `vmap` or another transformation."""
        return not self.is_concrete and any(issubclass(t, jax.core.Tracer) for t in self.types)

    def dynamic(self, leaves: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that are not static, with other leaves."""
        return jax.tree_util.tree_unflatten(self.tree, leaves)

    def with_leaves(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments, with other leaves in those that are not static."""
        positional, keywords = self.dynamic(leaves)
        rest = iter(positional)
        args = tuple(a if i in self.static else next(rest) for i, a in enumerate(self.args))
        return args, {k: v if k in self.static else keywords[k] for k, v in self.kwargs.items()}

    def abstract(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments, arrays as shapes and dtypes only."""
        return self.with_leaves([abstract(x) for x in self.leaves])

    def _refuse(self, index: int) -> None:
        paths = jax.tree_util.tree_flatten_with_path(self.dynamic(range(len(self.leaves))))[0]
        where, leaf = jax.tree_util.keystr(paths[index][0][1:]), self.leaves[index]
        if isinstance(leaf, jax.ref.Ref):
            raise UnsupportedError(
                f"argument {where} is a jax.Ref. Mutable state cannot be sharded: pass it as arrays and return the "
                f"updated arrays."
            )
        raise UnsupportedError(
            f"argument {where} is {leaf!r} of type {type(leaf).__name__}, not an array; mark the argument static with "
            "static_argnums or static_argnames"
        )


_concrete: set[type] = set()  # classes of arrays with data, as met: `isinstance` on `jax.Array` is slow for each leaf


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is a `jax.Array` with data, not a tracer."""
    if type(leaf) in _concrete:
        return True
    if isinstance(leaf, jax.Array) and not isinstance(leaf, (jax.core.Tracer, jax.ref.Ref)):
        _concrete.add(type(leaf))
        return True
    return False


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, the shape of one, or a Python number."""
    if is_concrete(leaf):
        return True
    if isinstance(leaf, (bool, int, float, complex)):
        return True
    if isinstance(leaf, jax.ref.Ref) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return False
    return _compat.is_key(leaf.dtype) or np.dtype(leaf.dtype).kind not in "OUSMm"


def _type(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, (bool, int, float, complex)):
        return (), getattr(leaf, "dtype", type(leaf)), True
    return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)


_aval = operator.attrgetter("aval")


def _look(leaf: Any) -> Any:
    if is_concrete(leaf):
        return leaf.aval
    return _type(leaf) if isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)) else object()


def _typed(found: tuple[Any, ...]) -> str:
    shape, dtype, weak = found
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    return f"{name}[{','.join(map(str, shape))}]" + (" of weak type" if weak else "")


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and weak type with which a leaf is traced, as `jax.jit` would."""
    if isinstance(leaf, (bool, int, float, complex)):  # those that JAX hands on, under `grad`, have a dtype
        dtype = jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", None) or np.result_type(type(leaf)))
        return jax.ShapeDtypeStruct((), dtype, weak_type=not isinstance(leaf, bool))
    dtype = leaf.dtype if _compat.is_key(leaf.dtype) else jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, weak_type=getattr(leaf, "weak_type", False))


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return () if x is None else (x,) if isinstance(x, (int, str)) else tuple(x)


def _static(fun: Callable[..., Any], jit: JitSettings, count: int) -> frozenset[int | str]:
    """Positions and names of static arguments; where only one of the two is given, the signature gives the other."""
    if jit.static_argnums is None and jit.static_argnames is None:
        return frozenset()
    nums, names = _as_tuple(jit.static_argnums), _as_tuple(jit.static_argnames)
    parameters = _parameters(fun)
    positions = {i % len(parameters) if i < 0 and parameters else i for i in nums}
    if not names:
        names = tuple(parameters[i] for i in positions if i < len(parameters))
    elif not nums:
        positions = {parameters.index(n) for n in names if n in parameters}
    return frozenset({i for i in positions if i < count} | set(names))


@functools.lru_cache(maxsize=1024)
def _parameters(fun: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the positional parameters."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
