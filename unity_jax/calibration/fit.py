"""The constants of a machine from what was measured of it: the ones the cost model would have needed.

    fit_device(samples, device).memory_bandwidth
    # 1.1e10

Rates are the best that any size reached. Lines (a latency and a bandwidth) are non-negative least squares of relative
errors, so small sizes count as much as large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from unity_jax.calibration.measure import COLLECTIVES, COPIES, Sample
from unity_jax.cost.compute import Work
from unity_jax.machine.device import Device
from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Level, Matrix
from unity_jax.network.communication import collective_seconds
from unity_jax.network.levels import lines
from unity_jax.pcg.mesh import MeshAxes


def fit_device(samples: Sequence[Sample], base: Device) -> Device:
    """A device with the measured rates, overhead and host link; the rest is that of `base`."""
    overhead = min(s.seconds for s in samples if s.kind == "launch")
    dtypes = dict.fromkeys(s.about for s in samples if s.kind == "matmul")
    by_dtype = [(d, [s for s in samples if (s.kind, s.about) == ("matmul", d)]) for d in dtypes]
    by_kind = {kind: [s for s in samples if s.kind == kind] for kind in ("vector", "stream")}
    copies = [s for s in samples if s.kind in COPIES]
    slope = nonnegative_line([(1.0, s.nbytes) for s in copies], [s.seconds for s in copies])[1]
    rates = [(d, _rate(own, overhead, _flops)) for d, own in by_dtype]
    return replace(
        base,
        peak_flops=(*rates, ("vector", _rate(by_kind["vector"], overhead, _flops))),
        memory_bandwidth=_rate(by_kind["stream"], overhead, _bytes),
        host_bandwidth=1 / slope if slope else max(s.nbytes / s.seconds for s in copies),
        kernel_overhead=overhead,
        matmul_efficiency=1.0,  # these rates are those that kernels reach
        memory_efficiency=1.0,
    )


def _rate(samples: Sequence[Sample], overhead: float, work: Callable[[Sample], float]) -> float:
    """The best work per second, of samples so long that the start of a kernel hardly counts, or of the longest."""
    longest = max(s.seconds for s in samples)
    settled = [s for s in samples if s.seconds >= min(10 * overhead, longest)]
    return max(work(s) / max(s.seconds - overhead, s.seconds / 2) for s in settled)


def _flops(sample: Sample) -> float:
    return sample.flops


def _bytes(sample: Sample) -> float:
    return sample.nbytes


def fit_level(samples: Sequence[Sample], level: Level, overhead: float) -> Level:
    """A level of the network with the latency and bandwidth that explain the collectives over it best.

    Their time is linear in the two: what one second of latency and one second per byte make of each gives the rows.
    What is said to be a switch may be shared memory, if that explains them better; what is measured is no longer what
    NCCL expects of itself.
    """
    own = [s for s in samples if s.kind in COLLECTIVES and s.about == level.name]
    if not own:
        return level
    kinds = [replace(level, links=k) for k in ("switch", "shared")] if level.links in ("switch", "nccl") else [level]
    return min((_fitted(own, kind, overhead) for kind in kinds), key=lambda found: found[0])[1]


def _fitted(own: Sequence[Sample], level: Level, overhead: float) -> tuple[float, Level]:
    """The squares of relative errors, and the level."""
    rows = [level_row(level, s) for s in own]
    taken = [s.seconds for s in own]
    latency, slope = nonnegative_line(rows, [max(t - overhead, 0.0) for t in taken], taken)
    slope = slope or min(t / row[1] for t, row in zip(taken, rows, strict=True))
    found = [overhead + latency * row[0] + slope * row[1] for row in rows]
    errors = sum((f / t - 1) ** 2 for f, t in zip(found, taken, strict=True))
    return errors, replace(level, latency=latency, bandwidth=1 / slope)


def level_row(level: Level, sample: Sample) -> tuple[float, float]:
    """A collective among all members of a level: seconds for each second of latency, and for each second per byte."""
    group = np.arange(level.size)[None]
    hops, _ = lines((replace(level, latency=1.0, bandwidth=1.0),), sample.kind, group)[0]
    _, per_byte = lines((replace(level, latency=0.0, bandwidth=1.0),), sample.kind, group)[0]
    return hops, per_byte * sample.nbytes


def nonnegative_line(
    rows: Sequence[tuple[float, float]], seconds: Sequence[float], scales: Sequence[float] | None = None
) -> tuple[float, float]:
    """The non-negative pair `c` for which `rows @ c` misses `seconds` least, in parts of `scales` (of themselves)."""
    weights = 1 / np.asarray(seconds if scales is None else scales, float)
    design = np.asarray(rows, float) * weights[:, None]
    size = np.maximum(np.abs(design).max(axis=0), 1e-300)  # seconds and bytes differ by many orders of magnitude
    found, _ = nnls(design / size, np.asarray(seconds, float) * weights)
    return float(found[0] / size[0]), float(found[1] / size[1])


def predicted(sample: Sample, machine: Machine) -> float:
    """Seconds of a sample under the cost model; a machine with levels."""
    if sample.kind in COPIES:
        return sample.nbytes / machine.device.host_bandwidth
    if sample.kind in COLLECTIVES:
        return collective_seconds(machine, axes_of(machine), sample.kind, sample.nbytes, (sample.about,))
    device, part = machine.device, "matrix" if sample.kind == "matmul" else "vector"
    busy = {part: sample.flops / device.flops_per_second(sample.about if part == "matrix" else "vector")}
    return Work(memory=sample.nbytes / device.memory_bandwidth, launches=1, **busy).seconds(device)


def axes_of(machine: Machine) -> MeshAxes:
    """A mesh axis for each level of a network."""
    assert not isinstance(machine.network, Matrix)
    return MeshAxes(tuple(x.name for x in machine.network), tuple(x.size for x in machine.network))
