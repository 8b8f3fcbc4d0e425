"""Presets, their grammar, and detection from devices."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unity_jax.machine.machine import Machine

pytestmark = pytest.mark.slow  # the same numbers on every JAX version

PRESETS = {
    "cpu:8": 8,
    "v4:2x2x1": 4,
    "v4-cores:2x2x1": 8,
    "v5e:2x4": 8,
    "v5e:16x16": 256,
    "v5p:2x2x2": 8,
    "v6e:4x4": 16,
    "tpu7x:2x2x1": 8,
    "tpu7x:4x4x4": 128,
    "tpu7x:1x1x1x1": 1,
    "a100:2x8": 16,
    "a100-40gb:8": 8,
    "h100:8": 8,
    "h100:2x8": 16,
    "h200:4x8": 32,
    "l4:4": 4,
    "l4:2x8": 16,
    "v100-summit:4x6": 24,
}


@pytest.mark.parametrize(("spec", "devices"), PRESETS.items())
def test_preset(spec, devices):
    machine = Machine.preset(spec)
    assert machine.name == spec
    assert machine.num_devices == devices
    assert hash(machine) == hash(Machine.preset(spec))
    rates = [machine.device.flops_per_second(d) for d in ("bfloat16", "float32", "float64")]
    assert all(r > 0 for r in rates)
    assert rates[2] <= rates[1]  # bf16 may be slower than f32, where it is emulated
    assert machine.device.memory_bytes > 1e9
    assert machine.device.host_bandwidth <= machine.device.memory_bandwidth


def links(spec):
    return "".join(level.links[0] for level in Machine.preset(spec).network)


def test_wrap_around():
    """A ring takes a full side of 16 on v5e and v6e, and whole cubes of 4 x 4 x 4 on the others."""
    assert [links(s) for s in ("v5e:16x16", "v6e:8x16", "v5e:4x8")] == ["rr", "lr", "ll"]
    assert [links(s) for s in ("v4:4x4x4", "v5p:8x4x12", "v5p:2x4x4", "tpu7x:4x4x8")] == ["rrr", "rrr", "lll", "rrrs"]


def test_two_devices_of_a_chip_share_its_links():
    cores, chips = Machine.preset("v4-cores:2x2x1"), Machine.preset("v4:2x2x1")
    assert [level.name for level in cores.network] == ["x", "y", "z", "core"]
    assert cores.network[0].bandwidth == chips.network[0].bandwidth / 2
    assert 2 * cores.device.memory_bytes == chips.device.memory_bytes


def test_networks():
    assert [(lv.size, lv.links) for lv in Machine.preset("v5e:4x16").network] == [(4, "line"), (16, "ring")]
    nodes, gpus = Machine.preset("h100:2x8").network
    assert (nodes.size, gpus.size) == (2, 8)
    assert nodes.bandwidth < gpus.bandwidth
    assert Machine.preset("h100:8").network == (gpus,)


BAD = [
    "",
    "cpu",
    "cpu:",
    "cpu:0",
    "cpu:2x4",
    "v5e:8",
    "v5e:2x",
    "h100:1x2x3",
    "h100:-8",
    "tpu:4",
    "v4:2x2",
    "v5p:2x2x2x2",
]


@pytest.mark.parametrize("spec", BAD)
def test_bad_presets_say_what_is_known(spec):
    with pytest.raises(ValueError, match=r"cpu:N; v4:XxYxZ; .*v5e:XxY; .*h100:GPUS or h100:NODES") as error:
        Machine.preset(spec)
    assert repr(spec) in str(error.value)


def device(kind, process=0, coords=None, core=0, **more):
    return SimpleNamespace(device_kind=kind, process_index=process, coords=coords, core_on_chip=core, **more)


def tpus(kind, *extents, cores=1):
    """A slice as JAX lists it: x varies fastest, then y, then z; the cores of a chip are neighbours."""
    coords = itertools.product(*map(range, reversed(extents)))
    return [device(kind, 0, (*c[::-1], 0)[:3], core) for c in coords for core in range(cores)]


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        (tpus("TPU v4", 2, 2, 1), "v4:2x2x1"),
        (tpus("TPU v4", 2, 2, 1, cores=2), "v4-cores:2x2x1"),
        (tpus("TPU v5 lite", 2, 4), "v5e:2x4"),
        (tpus("TPU v5", 2, 2, 2), "v5p:2x2x2"),
        (tpus("TPU v5p", 4, 4, 8), "v5p:4x4x8"),
        (tpus("TPU v6 lite", 4, 4), "v6e:4x4"),
        (tpus("TPU7x", 2, 2, 1, cores=2), "tpu7x:2x2x1"),
        (tpus("TPU7x", 2, 2, 1, cores=2)[:3], "tpu7x:3x1x1x1"),
        ([device("NVIDIA A100-SXM4-80GB")] * 8, "a100:8"),
        ([device("NVIDIA A100-SXM4-40GB", i // 8) for i in range(16)], "a100-40gb:2x8"),
        ([device("NVIDIA H200", i // 8) for i in range(32)], "h200:4x8"),
        ([device("NVIDIA H100 80GB HBM3", i, slice_index=i // 8) for i in range(16)], "h100:2x8"),
        ([device("NVIDIA H100 80GB HBM3", i, slice_index=0) for i in range(8)], "h100:8"),
        ([device("NVIDIA H100 80GB HBM3")] * 8, "h100:8"),
        ([device("NVIDIA H100 80GB HBM3", i // 4) for i in range(8)], "h100:2x4"),
        ([device("Tesla V100-SXM2-16GB", i // 6) for i in range(12)], "v100-summit:2x6"),
        ([device("NVIDIA L4")] * 8, "l4:8"),
        ([device("TPU v5e", 0, (x, 0, 0)) for x in range(3)], "v5e:3x1"),
        ([device("NVIDIA H100", i // 4) for i in range(7)], "h100:7x1"),  # no fast link is promised
    ],
)
def test_detect(devices, name):
    assert Machine.detect(devices).name == name


def test_detect_cpu():
    assert Machine.detect(jax.devices("cpu")[:3]).name == "cpu:3"


H100 = device("NVIDIA H100")


@pytest.mark.parametrize("devices", [[], [device("GeForce")], [device("TPU v4 lite")], [device("cpu"), H100]])
def test_detect_unknown(devices):
    with pytest.raises(ValueError, match="pass machine="):
        Machine.detect(devices)


def test_dtypes():
    machine = Machine.preset("h100:8")
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)):
        assert machine.device.flops_per_second(dtype) == 9.89e14
    assert machine.device.flops_per_second(jnp.float64) == 6.7e13
    for dtype in (jnp.int32, jnp.bool_, jax.random.key(0).dtype):
        assert machine.device.flops_per_second(dtype) == dict(machine.device.peak_flops)["vector"]
