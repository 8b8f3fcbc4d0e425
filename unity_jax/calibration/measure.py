"""What is measured of a machine: small programs that all of its devices run at once, and how long they take.

    probe = Probe("matmul", "float32", flops=2 * 512**3, nbytes=3 * 512**2 * 4, elements=512**2, chain=4, width=512)
    seconds_of(probe, mesh, repeats=5)  # of one of the four
    # 0.0021

A probe runs a step several times within one program, each on the result of the one before, and a tiny program is
subtracted, so that the cost of a call does not count. Collectives run over one mesh axis, in all its groups at once.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unity_jax import _compat
from unity_jax.network.communication import KINDS

ARITHMETIC = 128
"""Operations on each element in a `vector` probe."""


@dataclass(frozen=True)
class Effort:
    """How much is measured: dtypes and shapes (rows, width) of the `x` in matmuls `x @ w` by a square `w`, operations
    that a program of them should have, bytes per device of streams and host copies, of collectives, how often each is
    repeated (the median counts), and the seconds that overlapping streams take alone."""

    dtypes: tuple[str, ...]
    matmuls: tuple[tuple[int, int], ...]
    work: float
    streams: tuple[int, ...]
    collectives: tuple[int, ...]
    repeats: int
    overlap: float


HOST = Effort(
    ("bfloat16", "float16", "float32", "float64"),
    ((64, 64), (256, 256), (512, 512)),
    2.0**29,
    (2**23, 2**24),
    (2**10, 2**16, 2**20, 2**22),
    7,
    0.05,
)
ACCELERATOR = Effort(
    ("bfloat16", "float16", "float32", "float64"),
    ((256, 256), (1024, 1024), (4096, 4096), (8192, 8192), (64, 8192), (1024, 8192), (2**16, 1024), (2**18, 256)),
    2.0**40,
    (2**30, 2**31),
    (2**12, 2**16, 2**20, 2**24, 2**28),
    9,
    0.01,
)


def effort(platform: str) -> Effort:
    """What is worth measuring on a platform. A TPU has no float64."""
    if platform == "cpu":
        return HOST
    return ACCELERATOR if platform == "gpu" else replace(ACCELERATOR, dtypes=ACCELERATOR.dtypes[:-1])


@dataclass(frozen=True)
class Probe:
    """One thing to measure: its kind, the dtype or the mesh axis it is about, the work of one step (operations, bytes
    in the meaning of the cost model), the elements that each device starts with, the steps in a program, and the side
    of a matmul's weight."""

    kind: str
    about: str
    flops: float
    nbytes: float
    elements: int
    chain: int
    width: int = 0


@dataclass(frozen=True)
class Sample:
    """What one step of a probe took, in seconds; of a matmul, `width` is the side of its weight."""

    kind: str
    about: str
    flops: float
    nbytes: float
    seconds: float
    width: int = 0


# The probes


def probes(wanted: Effort, levels: Iterable[tuple[str, int]]) -> Iterator[Probe]:
    """All probes, for mesh axes of these names and sizes (one axis for each level of the network)."""
    yield Probe("launch", "float32", 0.0, 0.0, 16 * 16, 64, 16)
    for dtype in wanted.dtypes:
        for rows, width in wanted.matmuls:
            flops, nbytes = 2.0 * rows * width**2, (2.0 * rows + width) * width * jnp.dtype(dtype).itemsize
            chain = max(1, min(16, int(wanted.work / flops)))
            yield Probe("matmul", dtype, flops, nbytes, rows * width, chain, width)
    for nbytes in wanted.streams:
        yield Probe("stream", "float32", nbytes / 4, 2.0 * nbytes, nbytes // 4, 1)
        yield Probe("vector", "float32", ARITHMETIC * nbytes / 4, 2.0 * nbytes, nbytes // 4, 1)
        for kind in COPIES:
            yield Probe(kind, "host", 0.0, nbytes, nbytes // 4, 1)
    for axis, members in levels:
        for kind in KINDS if members > 1 else ():
            for nbytes in wanted.collectives:
                elements = math.ceil(nbytes / 4 / members) * members
                yield Probe(kind, axis, 0.0, 4.0 * elements, elements, max(1, min(16, 2**22 // nbytes)))


def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    width = math.isqrt(w.size)
    return (x.reshape(-1, width) @ w.reshape(width, width)).reshape(-1)


def _arithmetic(x: jax.Array) -> jax.Array:
    for _ in range(ARITHMETIC // 2):
        x = x * 0.999 + 0.001
    return x


STEPS: dict[str, Callable[..., jax.Array]] = {
    "launch": _matmul,
    "matmul": _matmul,
    "stream": lambda x: x * 0.999,
    "vector": _arithmetic,
}
"""By kind of probe, a step that makes of the array of one device (and of the weight of a matmul) another one of its
shape."""

COLLECTIVES: dict[str, Callable[[jax.Array, str, int], jax.Array]] = {
    "all_gather": lambda x, axis, n: lax.all_gather(x[: x.size // n], axis, tiled=True),
    "reduce_scatter": lambda x, axis, n: lax.psum_scatter(x, axis, tiled=True),
    "all_reduce": lambda x, axis, n: lax.psum(x, axis),
    "all_to_all": lambda x, axis, n: lax.all_to_all(x, axis, 0, 0, tiled=True),
    "permute": lambda x, axis, n: lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]),
}
"""By kind, a collective over an axis of `n` devices whose larger side is `x`."""

COPIES = ("device_to_host", "host_to_device")


# Running them


def seconds_of(probe: Probe, mesh: Mesh, repeats: int) -> float:
    """Median seconds of a program or copy of this probe on all devices of a mesh (the call included)."""
    return medians([runner([probe], mesh)], repeats)[0]


def runner(together: Sequence[Probe], mesh: Mesh) -> Callable[[], Any]:
    """A function that starts these probes at the same time: one program of all that are no copies, and the copies."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    host = sharding.with_memory_kind("pinned_host")
    inside = [p for p in together if p.kind not in COPIES]
    program = lowered(inside, mesh).compile() if inside else None
    operands = [operands_of(p, sharding) for p in inside]
    copied = [(x, host) for p in together if p.kind == "device_to_host" for x in operands_of(p, sharding)]
    back = [x for p in together if p.kind == "host_to_device" for x in operands_of(p, sharding)]
    copied += [(jax.device_put(x, host), sharding) for x in back]

    def run() -> Any:
        started = program(*operands) if program is not None else ()
        return started, [jax.device_put(x, target) for x, target in copied]

    return run


def _sizes(probe: Probe) -> list[int]:
    """Elements per device of each operand."""
    return [probe.elements] + [probe.width**2] * bool(probe.width)


def operands_of(probe: Probe, sharding: NamedSharding) -> tuple[jax.Array, ...]:
    """What a probe works on: the array, and the weight of a matmul."""
    counts = [n * sharding.mesh.size for n in _sizes(probe)]
    return tuple(_values(n, probe.width, _dtype(probe), sharding) for n in counts)


@functools.partial(jax.jit, static_argnums=range(4))
def _values(count: int, width: int, dtype: str, sharding: NamedSharding) -> jax.Array:
    """Numbers without a pattern: with equal ones a GPU takes less power, and multiplies matrices faster than in a train
    step. As weights of this width they keep the size of what they multiply."""
    found = jnp.sin(jnp.arange(count, dtype="float32") ** 2) * (2 / max(width, 2)) ** 0.5
    return lax.with_sharding_constraint(found.astype(dtype), sharding)


def lowered(together: Sequence[Probe], mesh: Mesh) -> jax.stages.Lowered:
    """A program of probes that are no copies: the steps of each one after the other, on every device."""

    def steps(probe: Probe, operands: tuple[jax.Array, ...]) -> jax.Array:
        x, *weights = operands
        for _ in range(probe.chain):
            if probe.kind in STEPS:
                x = STEPS[probe.kind](x, *weights)
            else:  # one element is handed on: the next collective waits, and its operand still differs between devices
                y = COLLECTIVES[probe.kind](x, probe.about, mesh.shape[probe.about])
                x = lax.dynamic_update_slice(x, y[:1], (0,))
        return x

    spec = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)
    run = _compat.shard_map(lambda *xs: tuple(map(steps, together, xs)), mesh, spec, spec)

    def shape(probe: Probe, elements: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((elements * mesh.size,), _dtype(probe), sharding=sharding)

    return jax.jit(run).lower(*(tuple(shape(p, n) for n in _sizes(p)) for p in together))


def _dtype(probe: Probe) -> str:
    return probe.about if probe.kind == "matmul" else "float32"


def medians(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """The median seconds of each, run in turns, after one round that does not count."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, times in zip(runs, taken, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - start)
    return [statistics.median(times[1:]) for times in taken]


def measure(found: Iterable[Probe], mesh: Mesh, repeats: int) -> Iterator[Sample]:
    """Every probe, one after the other, without the time of a call."""
    call = seconds_of(Probe("stream", "float32", 0.0, 0.0, 1, 1), mesh, 3 * repeats)
    launch = 0.0
    for probe in found:
        total = seconds_of(probe, mesh, repeats)
        own = total if probe.kind in COPIES else max(total - call, total / 100)  # noise may take more than there is
        step = own / probe.chain
        if probe.kind == "launch":
            launch = step
        elif probe.kind in COLLECTIVES:
            step = max(step - launch, step / 100)  # the kernel that hands on one element
        yield Sample(probe.kind, probe.about, probe.flops, probe.nbytes, step, probe.width)
