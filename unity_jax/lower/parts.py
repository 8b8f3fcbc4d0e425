"""Packed state at run time: one array from step to step, which the caller sees as the leaves that it is made of.

    state, loss = step(state, batch)
    state["q"]                  # a `Part`: shape, dtype and sharding of the leaf, no data of its own
    np.asarray(state["q"])      # whoever reads it gets what is cut out of the array that holds it
    step(state, batch)          # all parts of one array, in their order: the array itself goes in, and is donated

A step returns arrays. To cut them apart at once would cost what packing saves, a container for them would be another
tree than the caller's, and slices cannot share the memory of an array on all platforms. So packed leaves are of a
subclass of `jax.Array` (as JAX's own key arrays are) that is cut when it is read, and is then an ordinary array for
everybody: `jit`, `grad`, `jnp`, numpy, checkpoints, pickle; under any mesh or transformation, since each device cuts
and joins what it has (`rewrite.packing`). Only over several processes leaves are arrays, and packed within the step:
there one process may read what others do not, and JAX's own utilities ask for its own class.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.sharding import NamedSharding

from unity_jax import _compat
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.rewrite.packing import Packing


@dataclass(frozen=True)
class Form:
    """How leaves lie in one array: of these shapes and shardings; the array's own is `sharding`."""

    packing: Packing
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[NamedSharding, ...]
    sharding: NamedSharding

    @functools.cached_property
    def local(self) -> Packing:
        """What one device holds."""
        layout = Layout.from_spec(self.sharding.spec, len(self.packing.shape))
        return self.packing.local(layout, MeshAxes.of(self.sharding.mesh))

    @functools.cached_property
    def _looks(self) -> dict[Any, list[dict[str, Any]]]:
        _register()
        return {}

    def look(self, place: int, dtype: Any) -> dict[str, Any]:
        """What a part has whatever array it is of: the same objects every time, since each call asks for them."""
        if dtype not in self._looks:
            self._looks[dtype] = []
            for k, (shape, sharding) in enumerate(zip(self.shapes, self.shardings, strict=True)):
                aval = jax.typeof(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
                own = {"shape": shape, "sharding": sharding, "_sharding": sharding, "aval": aval, "dtype": dtype}
                self._looks[dtype].append({**own, "_form": self, "_place": k})
        return self._looks[dtype][place]

    def part(self, whole: jax.Array, place: int) -> Part:
        return Part(self, place, whole)

    def whole(self, leaves: Sequence[jax.Array]) -> jax.Array | None:
        """The array of which these leaves are all the parts, in order; None if there is none."""
        first = leaves[0]
        if not isinstance(first, Part) or first.is_deleted():
            return None
        same = (isinstance(x, Part) and x._held is first._held and x._place == k for k, x in enumerate(leaves))
        return first._held if first._form == self and all(same) else None

    def joined(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """One array of leaves that lie as they should."""
        return _apart(_join(self), leaves)

    def cut(self, whole: jax.Array, place: int) -> jax.Array:
        return _apart(_cut(self, place), [whole])


@functools.cache
def _join(form: Form) -> Callable[..., jax.Array]:
    return _on_each_device(lambda *arrays: form.local.joined(arrays), form.shardings, form.sharding)


@functools.cache
def _cut(form: Form, place: int) -> Callable[..., jax.Array]:
    target = form.shardings[place]
    shape = target.shard_shape(form.shapes[place])
    return _on_each_device(lambda whole: form.local.part(whole, place, shape), (form.sharding,), target)


def _on_each_device(
    fun: Callable[..., jax.Array], sources: Sequence[NamedSharding], target: NamedSharding
) -> Callable[..., jax.Array]:
    mesh = _compat.auto_mesh(target.mesh)
    mapped = jax.jit(_compat.shard_map(fun, mesh, tuple(s.spec for s in sources), target.spec), out_shardings=target)

    def run(*arrays: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.enable_x64(True):  # so that no dtype changes
            return mapped(*arrays)

    return run


def _apart(run: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
    """Run in a thread, which has no mesh, no tracing and no settings of the caller's."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run, *arrays).result()


class Part(jax.Array):
    """A leaf that is held with others as one array."""

    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 100
    weak_type = False
    committed = _committed = True

    # Of the instance, where attributes are found at once: these would be properties of `jax.Array`.
    shape = sharding = _sharding = aval = dtype = cast(Any, None)
    _form: Form
    _place: int
    _given_up = False
    _known: Callable[[], jax.Array | None] = staticmethod(lambda: None)

    def __init__(self, form: Form, place: int, held: jax.Array) -> None:
        vars(self).update(form.look(place, held.dtype), _held=held)

    def array(self) -> jax.Array:
        """The leaf as an array of its own, which lives as long as somebody uses it: it is memory that no plan knows."""
        if self.is_deleted():
            raise RuntimeError(f"Array has been deleted with shape={self.aval.str_short()}.")
        found = self._known()
        if found is None or found.is_deleted():
            found = self._form.cut(self._held, self._place)
            self._known = weakref.ref(found)
        return found

    def _kept(self) -> jax.Array:
        """The same, for those who take its address: it lives as long as the part."""
        found = self.array()
        self._known = lambda: found
        return found

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    itemsize = property(lambda self: self.dtype.itemsize)
    nbytes = property(lambda self: self.size * self.itemsize)
    is_fully_addressable = property(lambda self: self.sharding.is_fully_addressable)
    is_fully_replicated = property(lambda self: self.sharding.is_fully_replicated)

    def unsafe_buffer_pointer(self) -> int:
        return self._kept().unsafe_buffer_pointer()

    @property
    def __cuda_array_interface__(self) -> Any:
        kept: Any = self._kept()
        return kept.__cuda_array_interface__

    def devices(self) -> set[jax.Device]:
        return set(self.sharding.device_set)

    def is_deleted(self) -> bool:
        return self._given_up or self._held.is_deleted()

    def delete(self) -> None:
        self._given_up = True

    def block_until_ready(self) -> Part:
        self._held.block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Nothing: what there is to copy is made when it is read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.array(), name)


def _of_array(name: str) -> Any:
    """An attribute that a part has of the array that is cut out."""
    if not name.startswith("__"):
        return property(lambda self: getattr(self.array(), name))

    def method(self: Part, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.array(), name)(*args, **kwargs)

    return method


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow and or xor lshift rshift".split()
_METHODS = [
    *_BINARY,
    *(f"r{name}" for name in _BINARY),
    *"eq ne lt le gt ge neg pos abs invert round bool int float complex index".split(),
    *"len getitem setitem iter contains reversed repr str format".split(),
    *"array array_namespace dlpack dlpack_device copy deepcopy reduce".split(),
]

for _name in [*(f"__{name}__" for name in _METHODS), *(name for name in dir(jax.Array) if name[0] != "_")]:
    if _name not in vars(Part):
        setattr(Part, _name, _of_array(_name))


def as_array(leaf: Any) -> Any:
    """A leaf, cut out if it is a part."""
    return leaf.array() if isinstance(leaf, Part) else leaf


@functools.cache
def _register() -> None:
    _compat.register_array(Part, lambda part: part.aval, lambda part: part.array())
