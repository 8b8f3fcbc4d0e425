"""Calibration: fits find known constants again, probes are the programs they say, and a real run gives a usable
machine. Times themselves are not asserted."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import unity_jax as unity
from unity_jax.aot.collectives import Collective, stablehlo_collectives
from unity_jax.aot.flags import OFFLINE
from unity_jax.aot.sites import compiled_collectives
from unity_jax.aot.topologies import topology
from unity_jax.calibration import Calibration, calibrate, structure
from unity_jax.calibration.fit import axes_of, fit_device, fit_level, nonnegative_line, predicted
from unity_jax.calibration.measure import (
    ACCELERATOR,
    COPIES,
    HOST,
    STEPS,
    Effort,
    Probe,
    Sample,
    effort,
    lowered,
    operands_of,
    probes,
)
from unity_jax.calibration.overlap import Overlap, fit_contention, streams_of
from unity_jax.machine.contention import A100, PERFECT, STREAMS, Contention
from unity_jax.machine.device import Device
from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Level
from unity_jax.network.communication import KINDS
from unity_jax.pcg.mesh import MeshAxes

gpu = pytest.mark.extra("gpu-aot")
TINY = Effort(("float32", "float64"), ((16, 16), (32, 32), (8, 64)), 2.0**16, (2**14,), (2**10, 2**12), 2, 1e-3)
PEAKS = (("bfloat16", 3e14), ("float16", 3.1e14), ("float32", 1.5e14), ("float64", 2e13), ("vector", 1e13))
KNOWN = Device("known", PEAKS, 8e10, 2e12, 3e10, 4e-6)
LEVELS = [
    (Level("device", 8, 2e9, 2e-5),),
    (Level("node", 2, 5e10, 4e-6), Level("gpu", 8, 4.5e11, 2e-6)),
    (Level("x", 4, 4.5e10, 1e-6, "line"), Level("y", 16, 4.5e10, 3e-6, "ring")),
    (Level("x", 2, 9e10, 1e-6, "line"), Level("y", 1, 9e10, 1e-6, "line"), Level("core", 2, 5e11, 1e-7)),
]


def samples_of(machine, wanted=ACCELERATOR):
    """What a machine would measure if the cost model were exact."""
    axes = axes_of(machine)
    table = probes(wanted, zip(axes.names, axes.sizes, strict=True))
    blank = (Sample(p.kind, p.about, p.flops, p.nbytes, 0.0) for p in table)
    return [dataclasses.replace(s, seconds=predicted(s, machine)) for s in blank]


@pytest.mark.parametrize("network", LEVELS, ids=lambda network: "x".join(str(level.size) for level in network))
def test_fits_find_the_constants_again(network):
    machine = Machine("known", (KNOWN,), network)
    samples = samples_of(machine)
    start = dataclasses.replace(Machine.preset("v5e:2x4").device, memory_bytes=8e10)
    device = fit_device(samples, start)
    assert dict(device.peak_flops) == pytest.approx(dict(KNOWN.peak_flops), rel=1e-6)
    for name in ("memory_bytes", "memory_bandwidth", "host_bandwidth", "kernel_overhead"):
        assert getattr(device, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6), name
    assert (device.matmul_efficiency, device.memory_efficiency, device.compiler) == (1, 1, "tpu")
    for level in network:
        blank = dataclasses.replace(level, bandwidth=1.0, latency=0.0)
        found = fit_level(samples, blank, device.kernel_overhead)
        if level.size == 1:
            assert found == blank
        else:
            assert (found.bandwidth, found.latency) == pytest.approx((level.bandwidth, level.latency), rel=1e-6)


def test_a_switch_that_is_shared_memory_is_found_out():
    """Virtual devices of one host meet once for an all-reduce, as for an all-gather."""
    level = Level("device", 8, 1e9, 1e-4, "shared")
    samples = samples_of(Machine("known", (KNOWN,), (level,)))
    found = fit_level(samples, Level("device", 8, 1.0, 0.0), KNOWN.kernel_overhead)
    assert found.links == "shared"
    assert (found.bandwidth, found.latency) == pytest.approx((1e9, 1e-4), rel=1e-6)
    by_kind = {s.kind: s.seconds for s in samples if s.nbytes == 2**12}
    assert by_kind["all_reduce"] - by_kind["all_gather"] == pytest.approx(7 / 8 * 2**12 / 1e9)


def test_rates_ignore_samples_that_are_mostly_overhead():
    fast = Sample("matmul", "float32", 1e6, 1.0, 2e-6)  # half of it overhead: ten times the rate of the long one
    slow = Sample("matmul", "float32", 1e9, 1.0, 1e-2 + 1e-6)
    rest = [s for s in samples_of(Machine("known", (KNOWN,), LEVELS[0])) if s.kind not in ("matmul", "launch")]
    found = fit_device([Sample("launch", "float32", 0.0, 0.0, 1e-6), fast, slow, *rest], KNOWN)
    assert found.flops_per_second("float32") == pytest.approx(1e11)


def test_lines_are_not_negative():
    assert nonnegative_line([(1.0, 1.0), (1.0, 2.0)], [1.0, 3.0])[0] == 0  # the line through both begins below zero
    assert nonnegative_line([(1.0, 1.0), (1.0, 2.0)], [3.0, 1.0])[1] == 0
    latency, slope = nonnegative_line([(1.0, 1e3), (1.0, 1e9)], [1e-5 + 1e-9, 1e-5 + 1e-3])
    assert (latency, slope) == pytest.approx((1e-5, 1e-12))


def test_a_level_without_slope_gets_the_best_rate_seen():
    level = Level("device", 8, 1.0, 0.0)
    found = fit_level([Sample("permute", "device", 0.0, n, 1e-3) for n in (1e3, 1e6)], level, 0.0)
    assert found.bandwidth == pytest.approx(1e9)


@pytest.mark.parametrize("known", [A100, PERFECT, Contention(*[1.0] * 5)])
def test_overlaps_give_the_contention_again(known):
    found = []
    for a, b in itertools.combinations(STREAMS, 2):
        for alone in ((1e-2, 1e-2), (2e-2, 1e-2), (1e-2, 3e-2)):
            found.append(Overlap((a, b), alone, known.seconds(**{a: alone[0], b: alone[1]})))
    assert dataclasses.astuple(fit_contention(found)) == pytest.approx(dataclasses.astuple(known), abs=0.02)


def test_streams_take_about_as_long_as_wanted():
    machine = Machine("known", (KNOWN,), LEVELS[1])
    table = list(probes(ACCELERATOR, [("node", 2), ("gpu", 8)]))
    found = streams_of(table, samples_of(machine), seconds=0.05)
    assert list(found) == list(STREAMS)
    assert (found["compute"].flops, found["collectives"].nbytes) == (2 * 8192**3, 2**28)
    assert (found["compute"].about, found["compute"].chain) == ("bfloat16", round(0.05 / (2 * 8192**3 / 3e14 + 4e-6)))
    assert found["host_to_device"].elements == pytest.approx(0.05 * 3e10 / 4, rel=1e-6)


def collective_probes(chain):
    table = [p for p in probes(TINY, [("x", 4), ("y", 2)]) if p.kind in KINDS]
    return [dataclasses.replace(p, chain=chain) for p in table]


def test_collective_probes_are_what_they_say(make_mesh):
    mesh, axes = make_mesh(x=4, y=2), MeshAxes(("x", "y"), (4, 2))
    found = collective_probes(chain=3)
    assert {(p.kind, p.about) for p in found} == {(kind, axis) for kind in KINDS for axis in "xy"}
    for probe in found[::3]:
        expected = [Collective(probe.kind, (probe.about,), int(probe.nbytes), 3)]
        program = lowered([probe], mesh)
        assert stablehlo_collectives(program.as_text(), axes) == expected
        assert compiled_collectives(program.compile().as_text(), axes) == expected


@gpu
def test_gpus_keep_every_collective_of_a_probe():
    mesh, axes = Mesh(np.array(topology("h100:8")).reshape(4, 2), ("x", "y")), MeshAxes(("x", "y"), (4, 2))
    for probe in collective_probes(chain=3)[::3]:
        text = lowered([probe], mesh).compile(compiler_options=OFFLINE["gpu"]).as_text()
        found = [(c.kind, c.axes, c.count) for c in compiled_collectives(text, axes)]
        assert found == [(probe.kind, (probe.about,), 3)]


def test_matmul_probes_neither_overflow_nor_vanish():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    sharding = NamedSharding(mesh, jax.P("x"))
    for dtype in ("bfloat16", "float16", "float32"):
        for rows, width in ((64, 64), (8, 256), (512, 32)):
            probe = Probe("matmul", dtype, 0.0, 0.0, rows * width, 16, width)
            (found,) = lowered([probe], mesh).compile()(operands_of(probe, sharding))
            before, after = (jnp.abs(x.astype("float32")).max() for x in (operands_of(probe, sharding)[0], found))
            assert found.dtype == dtype and found.shape == (rows * width,)
            assert before / 100 < after < 100 * before


def test_effort():
    assert effort("cpu") == HOST and effort("gpu") == ACCELERATOR
    assert "float64" not in effort("tpu").dtypes


@pytest.fixture(scope="module")
def measured():
    seen = []

    def track(table):
        for entry in table:
            seen.append(entry)
            yield entry

    found = calibrate(wanted=TINY, track=track)
    probed, pairs = seen[: len(found.samples)], seen[len(found.samples) :]
    assert [(p.kind, p.about) for p in probed] == [(s.kind, s.about) for s in found.samples]
    assert pairs == [o.streams for o in found.overlaps]
    return found


def test_a_real_run(measured):
    assert {s.kind for s in measured.samples} == {*STEPS, *COPIES, *KINDS}
    assert all(s.seconds > 0 for s in measured.samples)
    device, (level,) = measured.machine.device, measured.machine.network
    assert {name for name, _ in device.peak_flops} == {"float32", "float64", "vector"}
    rates = [*dict(device.peak_flops).values(), device.memory_bandwidth, device.host_bandwidth, device.kernel_overhead]
    assert all(np.isfinite(rate) and rate > 0 for rate in (*rates, level.bandwidth))
    assert device.memory_bytes == Machine.preset("cpu:8").device.memory_bytes
    assert (level.name, level.size) == ("device", 8) and level.latency >= 0
    assert [o.streams for o in measured.overlaps] == list(itertools.combinations(STREAMS, 2))
    assert all(x > 0 for o in measured.overlaps for x in (*o.alone, o.together))
    assert device.contention == fit_contention(measured.overlaps)
    text = str(measured)
    assert text.startswith("cpu:8 measured: 8 devices, each while all do the same\n")
    assert "device      8 by s" in text and "all-reduce" in text and "by copies the other way" in text
    assert "compute and collectives" in text
    assert not jax.config.jax_enable_x64


def test_a_profile_plans(measured, tmp_path):
    measured.machine.save(tmp_path / "profile.json")
    machine = Machine.load(tmp_path / "profile.json")
    assert machine == measured.machine
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    step = unity.auto_shard(lambda w, x: jnp.tanh(x @ w), machine=machine, options=unity.Options(cache=None))
    assert step.plan(shape, shape).machine == "cpu:8 measured"
    assert step(jnp.ones((64, 64)), jnp.ones((64, 64))).shape == (64, 64)


def test_one_device_has_no_network():
    found = calibrate(jax.devices()[:1], TINY)
    assert not any(s.kind in KINDS for s in found.samples)
    assert found.machine.num_devices == 1
    assert {stream for o in found.overlaps for stream in o.streams} == {*STREAMS} - {"collectives"}
    assert "one device has nothing to measure collectives with" in str(found)


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A device of a kind without a preset."""

    id: int
    device_kind: str
    memory: int | None
    platform: str = "gpu"
    process_index: int = 0

    def memory_stats(self):
        return {"bytes_limit": self.memory} if self.memory else None


def test_a_kind_without_a_preset():
    found = structure([Unknown(i, "Quantum X1", 2**34) for i in range(4)])
    assert (found.name, found.device.compiler) == ("quantum x1:4", "gpu") and found.device.memory_bytes == 2**34
    assert found.network == (Level("device", 4, 1.0, 0.0),)
    fitted = Machine("known", (KNOWN,), (Level("device", 4, 1e10, 1e-6),))
    assert "device      4 by switch: 9.313 GiB/s, latency 1 us" in str(
        Calibration(fitted, tuple(samples_of(fitted, TINY)), ())
    )
    for devices in ([Unknown(0, "a", 1), Unknown(1, "b", 1)], [Unknown(0, "Quantum X1", None)]):
        with pytest.raises(ValueError, match="no machine preset"):
            structure(devices)


def test_every_kind_of_probe_is_predicted():
    machine = Machine("known", (KNOWN,), LEVELS[0])
    for s in samples_of(machine, HOST):
        assert s.seconds > 0
    assert predicted(Sample("stream", "float32", 1.0, 2e12, 0.0), machine) == pytest.approx(1 + 4e-6)
