"""What of a pytree is an object of `flax.nnx`, and one such object as a pytree of its own."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

_ARRAY, _OBJECT, _STATE, _OTHER = range(4)
_REGISTRY = jax.tree_util.default_registry
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class Name:
    """A key of a pytree path that prints as it is."""

    text: str

    def __str__(self) -> str:
        return self.text


class ObjectDef:
    """The structure of an object: static, one instance for all that are equal, so that comparing them is free.

    **Fields:** `graphdef`: an `nnx.GraphDef`, whose indices say what the objects of one call share; `names`: one key
    per array, such as `.layers[0].kernel`.
    """

    def __init__(self, graphdef: Any, paths: Sequence[Sequence[Any]]) -> None:
        self.graphdef = graphdef
        self.names = tuple(Name("".join(map(_key, path))) for path in paths)

    def __repr__(self) -> str:
        return getattr(getattr(self.graphdef.nodes[0], "type", None), "__name__", "object")

    @staticmethod
    def of(graphdef: Any, paths: Sequence[Sequence[Any]]) -> ObjectDef:
        """Raises `TypeError` for an object with an attribute that is neither data nor hashable, as `nnx.jit` does."""
        kind = getattr(graphdef.nodes[0], "type", None), len(graphdef.nodes), len(graphdef.attributes)
        last = _last.get(kind)
        if last is not None and last.graphdef == graphdef:  # in a fraction of the time that it takes to hash one
            return last
        try:
            found = _known.get(graphdef)
        except TypeError as error:
            raise TypeError(_unhashable(graphdef, error)) from None
        if found is None:
            found = _known.setdefault(graphdef, ObjectDef(graphdef, paths))
        _last[kind] = found
        return found


_known: weakref.WeakValueDictionary[Any, ObjectDef] = weakref.WeakValueDictionary()
_last: weakref.WeakValueDictionary[Any, ObjectDef] = weakref.WeakValueDictionary()  # of each kind, the last one met


@dataclass(frozen=True)
class ObjectState:
    """One object as a pytree: the arrays that it is the first to hold."""

    structure: ObjectDef
    values: Iterable[Any]

    @staticmethod
    def of(context: Any, thing: Any) -> ObjectState:
        """Of an object, in an `nnx.split_context`."""
        graphdef, flat = context.flatten(thing)
        variable = sys.modules["flax.nnx"].Variable
        values = [x.get_raw_value() if isinstance(x, variable) else x for x in flat.leaves]
        return ObjectState(ObjectDef.of(graphdef, flat.paths), values)

    def object(self, context: Any) -> Any:
        """The object, in an `nnx.merge_context`."""
        return context.unflatten(self.structure.graphdef, list(self.values))


jax.tree_util.register_pytree_with_keys(
    ObjectState,
    lambda x: (list(zip(x.structure.names, x.values, strict=True)), x.structure),
    ObjectState,
    lambda x: (x.values, x.structure),
)


class _Kinds(dict[type, int]):
    """What instances of a class are. Only asked once `flax.nnx` is loaded."""

    def __missing__(self, kind: type) -> int:
        nnx = sys.modules["flax.nnx"]
        rows = ((nnx.State,), _STATE), ((nnx.Pytree, nnx.Variable), _OBJECT), (_ARRAYS, _ARRAY), ((object,), _OTHER)
        self[kind] = found = next(found for classes, found in rows if issubclass(kind, classes))
        if found in (_ARRAY, _STATE):
            _without.add(kind)
        return found


_kinds = _Kinds()
_without: set[type] = set()  # classes whose instances hold no objects


def is_object(x: Any) -> bool:
    """Whether it is a module, optimizer, metric, stream or variable, or another graph node."""
    return _kinds[type(x)] == _OBJECT


def is_special(x: Any) -> bool:
    """Whether it is an object, or an `nnx.State`, whose variables are none."""
    return _kinds[type(x)] in (_OBJECT, _STATE)


def holds_objects(x: Any) -> bool:
    """Whether there are objects in a tree.

    Asked in every call: of most containers it looks at the classes of the children alone.
    """
    kind = type(x)
    if kind is dict:
        children: Any = x.values()
    elif kind is tuple or kind is list:
        children = x
    elif _kinds[kind] != _OTHER:
        return _kinds[kind] == _OBJECT
    else:
        children = (_REGISTRY.flatten_one_level(x) or ((),))[0]
    return not _without.issuperset(map(type, children)) and any(map(holds_objects, children))


def _key(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _unhashable(graphdef: Any, error: TypeError) -> str:
    """Which attribute it is."""
    for key, value in graphdef.attributes:
        try:
            hash(value)
        except TypeError:
            return (
                f"an nnx object of class {graphdef.nodes[0].type.__name__} has the static attribute {key!r}, which "
                f"cannot be hashed ({error}); if it is data, wrap it in nnx.data, else make it hashable, as a tuple"
            )
    return str(error)
