"""Arrays over the devices of several processes (`jax.distributed`), each of which runs the same program.

What one process holds, a numpy array or an array on its own devices, is either the whole of an argument, the same in
all processes (`place`), or its own part (`from_parts`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from unity_jax import _compat


def disagreements(values: Sequence[Any], mesh: Mesh | AbstractMesh) -> list[int]:
    """Which of these host arrays or strings are not the same in all processes of a mesh, which must all ask at the
    same time; the others need not.
    """
    if not are_several(mesh) or not values:
        return []
    mine = np.array([_digest(v) for v in values], np.uint32)[None]
    each = {d.process_index: d for d in mesh.devices.flat}
    over = NamedSharding(Mesh(np.array([each[p] for p in sorted(each)]), ("process",)), PartitionSpec("process"))
    parts = [jax.device_put(mine, d) for d in each.values() if d.process_index == jax.process_index()]
    everyones = jax.make_array_from_single_device_arrays((len(each), len(values)), over, parts)
    # Of each column whether it is the same everywhere: a result that every process has.
    differ = jax.jit(lambda x: (x != x[:1]).any(axis=0), out_shardings=NamedSharding(over.mesh, PartitionSpec()))
    return np.flatnonzero(np.asarray(differ(everyones).addressable_data(0))).tolist()


def are_several(mesh: Any) -> bool:
    """Whether the devices of a mesh belong to more than one process."""
    return isinstance(mesh, Mesh) and len(_processes(mesh)) > 1


def is_local(leaf: Any) -> bool:
    """Whether a leaf lies in this process alone."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """An array that is the same in all processes, in a layout over their devices; typed keys as well."""
    if _compat.is_key(leaf.dtype):
        impl = jax.random.key_impl(leaf)
        data = place(jax.random.key_data(leaf), sharding)
        return jax.jit(lambda x: jax.random.wrap_key_data(x, impl=impl), out_shardings=sharding)(data)
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def from_parts(part: Any, shape: tuple[int, ...], layout: Callable[[tuple[int, ...]], NamedSharding]) -> jax.Array:
    """The array whose parts the processes hold, in the order of their numbers.

    **Arguments:** `shape`: what the array is expected to be. Where it differs from that of the part is the dimension
    that the processes share, and the parts may be shorter than expected (a last batch); where it does not, the part
    is the whole array. `layout`: of the whole array, by its shape.
    """
    shared = [d for d, (n, m) in enumerate(zip(part.shape, shape, strict=True)) if n != m]
    if not shared:
        return place(part, layout(shape))
    if len(shared) > 1:
        raise ValueError(f"the part {part.shape} of an array {shape} is shorter in more than one dimension")
    part, (dim,) = np.asarray(part), shared
    length, numbers = part.shape[dim], _processes(layout(shape).mesh)
    whole = (*shape[:dim], length * len(numbers), *shape[dim + 1 :])
    target = layout(whole)
    start = {p: i * length for i, p in enumerate(numbers)}

    def own(index: Any) -> np.ndarray:
        first, stop, _ = index[dim].indices(whole[dim])
        offset = start[jax.process_index()]
        return part[(*index[:dim], slice(first - offset, stop - offset), *index[dim + 1 :])]

    def holds(device: Any, index: tuple[slice, ...]) -> bool:
        first, stop, _ = index[dim].indices(whole[dim])
        return start[device.process_index] <= first and stop <= start[device.process_index] + length

    if all(holds(d, index) for d, index in target.devices_indices_map(whole).items()):
        return jax.make_array_from_callback(whole, target, own)
    # Devices need rows of other processes: the rows go to devices of their own process first.
    devices = sorted(target.mesh.devices.flat, key=lambda d: (d.process_index, d.id))
    rows = Mesh(np.array(devices).reshape(len(numbers), -1), ("process", "device"))
    by_process = NamedSharding(rows, PartitionSpec(*[None] * dim, "process"))
    return jax.device_put(jax.make_array_from_callback(whole, by_process, own), target)


def _processes(mesh: Mesh | AbstractMesh) -> list[int]:
    return sorted({d.process_index for d in mesh.devices.flat})


def _digest(value: Any) -> int:
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    if _compat.is_key(value.dtype):
        value = jax.random.key_data(value)
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
