"""The machine at hand, measured: what `unity calibrate` writes and `auto_shard(machine=Machine.load(...))` plans with.

found = calibrate()  # about a minute on eight CPU devices
found.machine.save("profile.json")
print(found)  # what was measured, beside what the cost model makes of the fitted constants
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from unity_jax.calibration.fit import axes_of, fit_device, fit_level, predicted
from unity_jax.calibration.measure import Effort, Sample, effort, measure, probes
from unity_jax.calibration.overlap import Overlap, fit_contention, overlaps, streams_of
from unity_jax.machine.detect import positions
from unity_jax.machine.device import Device
from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Level, Matrix
from unity_jax.text import columns, render, seconds, size

T = TypeVar("T")


@dataclass(frozen=True)
class Calibration:
    """A measured machine and what it was fitted to, samples of one stream and overlaps of two; prints all."""

    machine: Machine
    samples: tuple[Sample, ...]
    overlaps: tuple[Overlap, ...]

    def __str__(self) -> str:
        return _text(self)


def calibrate(
    devices: Sequence[Any] | None = None,
    wanted: Effort | None = None,
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    keep: Callable[[Sample | Overlap], Any] = lambda _: None,
) -> Calibration:
    """Measure devices and fit the constants of the cost model to them.

    The levels of the network are those of the preset of these devices, or one switch where there is none.

    **Arguments:** `devices` (default: `jax.devices()`); `wanted`: how much to measure (default: what suits the
    platform); `track`: what the probes and pairs of streams go through, such as a progress bar; `keep`: is called with
    each sample and overlap as soon as it has been measured.
    **Raises:** `ValueError` for devices of mixed kinds, or of an unknown one that does not tell its memory.
    """
    found = list(jax.devices() if devices is None else devices)
    wanted = wanted or effort(found[0].platform)
    known = structure(found)
    assert not isinstance(known.network, Matrix)
    axes = axes_of(known)
    at = dict(zip(positions(found, known.network), found, strict=True))
    mesh = Mesh(np.array([at[i] for i in range(len(found))]).reshape(axes.sizes), axes.names)
    table = list(probes(wanted, zip(axes.names, axes.sizes, strict=True)))
    with jax.enable_x64(True):  # float64 is measured too
        samples = tuple(_kept(measure(track(table), mesh, wanted.repeats), keep))
        streams = streams_of(table, samples, wanted.overlap)
        pairs = tuple(_kept(overlaps(streams, mesh, wanted.repeats, track), keep))
    device = replace(fit_device(samples, known.device), contention=fit_contention(pairs))
    network = tuple(fit_level(samples, level, device.kernel_overhead) for level in known.network)
    return Calibration(Machine(f"{known.name} measured", (device,), network), samples, pairs)


def _kept(found: Iterable[T], keep: Callable[[Any], Any]) -> Iterator[T]:
    for x in found:
        keep(x)
        yield x


def structure(devices: Sequence[Any]) -> Machine:
    """The machine that these devices are, with the constants of its preset; those of an unknown kind have none yet."""
    try:
        return Machine.detect(devices)
    except ValueError:
        kinds = sorted({d.device_kind for d in devices})
        memory = (devices[0].memory_stats() or {}).get("bytes_limit")
        if len(kinds) > 1 or not memory:
            raise
        kind = kinds[0].lower()
        unknown = Device(kind, (("vector", 1.0),), float(memory), 1.0, 1.0, 0.0, compiler=devices[0].platform)
        return Machine(f"{kind}:{len(devices)}", (unknown,), (Level("device", len(devices), 1.0, 0.0),))


# Text


def _text(found: Calibration) -> str:
    device, network = found.machine.device, found.machine.network
    assert not isinstance(network, Matrix)
    rates = ", ".join(f"{rate:.3g} {name}" for name, rate in device.peak_flops)
    lines = [
        f"{found.machine.name}: {found.machine.num_devices} devices, each while all do the same",
        f"  arithmetic  {rates} operations per second",
        f"  memory      {size(device.memory_bandwidth)}/s; a kernel takes {seconds(device.kernel_overhead)} at least",
        f"  host link   {size(device.host_bandwidth)}/s in one direction",
    ]
    for level in network:
        if level.size > 1:
            text = f"{size(level.bandwidth)}/s, latency {seconds(level.latency)}"
            lines.append(f"  {level.name:<11} {level.size} by {level.links}: {text}")
    if found.machine.num_devices == 1:
        lines.append("  network     none: one device has nothing to measure collectives with")
    c = device.contention
    lines.append(
        f"  slowed      compute {c.compute_by_collectives:.2f} by collectives, {c.compute_by_copies:.2f} by copies; "
        f"collectives {c.collectives_by_copies:.2f} by copies;\n              "
        f"copies {c.copies_by_collectives:.2f} by collectives, {c.copies_by_copies:.2f} by copies the other way"
    )
    titled = "Measured, and what the fitted constants predict"
    rows = columns(
        "what", "of", "operations", "bytes", "measured", "predicted", "ratio", right=(2, 3, 4, 5, 6), title=titled
    )
    for s in found.samples:
        guess = predicted(s, found.machine)
        cells = (f"{s.flops:.3g}" if s.flops else "", size(s.nbytes) if s.nbytes else "", seconds(s.seconds))
        about = f"{s.about} x {s.width}" if s.width else s.about
        rows.add_row(s.kind.replace("_", "-"), about, *cells, seconds(guess), f"{guess / s.seconds:.2f}")
    return "\n".join(lines) + "\n\n" + render(rows) + "\n" + _overlaps(found)


def _overlaps(found: Calibration) -> str:
    contention = found.machine.device.contention
    titled = "Streams alone and together, and what the fitted contention predicts"
    rows = columns("streams", "alone", "alone", "together", "predicted", "ratio", right=(1, 2, 3, 4, 5), title=titled)
    for o in found.overlaps:
        guess = contention.seconds(*o.row)
        names = " and ".join(s.replace("_", "-") for s in o.streams)
        rows.add_row(names, *map(seconds, (*o.alone, o.together, guess)), f"{guess / o.together:.2f}")
    return render(rows)
