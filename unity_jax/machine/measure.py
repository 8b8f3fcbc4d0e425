"""What is measured of a machine: small programs that all of its devices run at once, and how long they take.

>>> probe = Probe("matmul", "float32", flops=2 * 512**3, nbytes=3 * 512**2 * 4, elements=512**2, chain=4)
>>> seconds_of(probe, mesh, repeats=5)  # of one of the four
0.0021

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
from unity_jax.cost.communication import KINDS

ARITHMETIC = 128
"""Operations on each element in a `vector` probe."""


@dataclass(frozen=True)
class Effort:
    """How much is measured: dtypes and sides of square matmuls, bytes per device of streams and host copies, of
    collectives, how often each is repeated (the median counts), and the seconds that overlapping streams take alone."""

    dtypes: tuple[str, ...]
    sides: tuple[int, ...]
    streams: tuple[int, ...]
    collectives: tuple[int, ...]
    repeats: int
    overlap: float


HOST = Effort(
    ("bfloat16", "float16", "float32", "float64"),
    (64, 256, 512),
    (2**23, 2**24),
    (2**10, 2**16, 2**20, 2**22),
    7,
    0.05,
)
ACCELERATOR = Effort(
    ("bfloat16", "float16", "float32", "float64"),
    (256, 1024, 4096, 8192),
    (2**28, 2**29),
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
    in the meaning of the cost model), the elements that each device starts with, and the steps in a program."""

    kind: str
    about: str
    flops: float
    nbytes: float
    elements: int
    chain: int


@dataclass(frozen=True)
class Sample:
    """What one step of a probe took, in seconds."""

    kind: str
    about: str
    flops: float
    nbytes: float
    seconds: float


# The probes


def probes(wanted: Effort, levels: Iterable[tuple[str, int]]) -> Iterator[Probe]:
    """All probes, for mesh axes of these names and sizes (one axis for each level of the network)."""
    yield Probe("launch", "float32", 0.0, 0.0, 16 * 16, 64)
    for dtype in wanted.dtypes:
        for side in wanted.sides:
            n, itemsize = side * side, jnp.dtype(dtype).itemsize
            yield Probe("matmul", dtype, 2.0 * side**3, 3.0 * n * itemsize, n, max(1, min(16, 2**28 // side**3)))
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


def _side(x: jax.Array) -> jax.Array:
    side = math.isqrt(x.size)
    return x.reshape(side, side)


def _arithmetic(x: jax.Array) -> jax.Array:
    for _ in range(ARITHMETIC // 2):
        x = x * 0.999 + 0.001
    return x


STEPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "launch": lambda x: (_side(x) @ _side(x)).reshape(-1),
    "matmul": lambda x: (_side(x) @ _side(x)).reshape(-1),
    "stream": lambda x: x * 0.999,
    "vector": _arithmetic,
}
"""By kind of probe, a step that makes of the array of one device another one of its shape."""

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
    operands = [_operand(p, sharding) for p in inside]
    copied = [(_operand(p, sharding), host) for p in together if p.kind == "device_to_host"]
    copied += [(jax.device_put(_operand(p, sharding), host), sharding) for p in together if p.kind == "host_to_device"]

    def run() -> Any:
        started = program(*operands) if program is not None else ()
        return started, [jax.device_put(x, target) for x, target in copied]

    return run


def _operand(probe: Probe, sharding: NamedSharding) -> jax.Array:
    count = probe.elements * sharding.mesh.size
    make = functools.partial(jnp.full, count, 1 / math.isqrt(probe.elements), _dtype(probe))
    return jax.jit(make, out_shardings=sharding)()  # a matrix of 1 / side is its own square


def lowered(together: Sequence[Probe], mesh: Mesh) -> jax.stages.Lowered:
    """A program of probes that are no copies: the steps of each one after the other, on every device."""

    def steps(probe: Probe, x: jax.Array) -> jax.Array:
        for _ in range(probe.chain):
            if probe.kind in STEPS:
                x = STEPS[probe.kind](x)
            else:  # one element is handed on: the next collective waits, and its operand still differs between devices
                y = COLLECTIVES[probe.kind](x, probe.about, mesh.shape[probe.about])
                x = lax.dynamic_update_slice(x, y[:1], (0,))
        return x

    spec = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)
    run = _compat.shard_map(lambda *xs: tuple(map(steps, together, xs)), mesh, spec, spec)
    shapes = [jax.ShapeDtypeStruct((p.elements * mesh.size,), _dtype(p), sharding=sharding) for p in together]
    return jax.jit(run).lower(*shapes)


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


def measure(found: Iterable[Probe], mesh: Mesh, repeats: int) -> list[Sample]:
    """Every probe, one after the other, without the time of a call."""
    call = seconds_of(Probe("stream", "float32", 0.0, 0.0, 1, 1), mesh, 3 * repeats)
    samples: list[Sample] = []
    launch = 0.0
    for probe in found:
        total = seconds_of(probe, mesh, repeats)
        own = total if probe.kind in COPIES else max(total - call, total / 100)  # noise may take more than there is
        step = own / probe.chain
        if probe.kind == "launch":
            launch = step
        elif probe.kind in COLLECTIVES:
            step = max(step - launch, step / 100)  # the kernel that hands on one element
        samples.append(Sample(probe.kind, probe.about, probe.flops, probe.nbytes, step))
    return samples
