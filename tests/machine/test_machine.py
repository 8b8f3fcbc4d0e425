"""Presets, their grammar, and detection from devices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unity_jax.cost.compute import op_seconds
from unity_jax.machine.machine import Machine

pytestmark = pytest.mark.slow  # the same numbers on every JAX version

PRESETS = {"cpu:8": 8, "v5e:2x4": 8, "v5e:16x16": 256, "h100:8": 8, "h100:2x8": 16, "v100-summit:4x6": 24}


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


def test_networks():
    assert [(lv.size, lv.links) for lv in Machine.preset("v5e:4x16").network] == [(4, "line"), (16, "ring")]
    nodes, gpus = Machine.preset("h100:2x8").network
    assert (nodes.size, gpus.size) == (2, 8)
    assert nodes.bandwidth < gpus.bandwidth
    assert Machine.preset("h100:8").network == (gpus,)


BAD = ["", "cpu", "cpu:", "cpu:0", "cpu:2x4", "v5e:8", "v5e:2x", "h100:1x2x3", "h100:-8", "tpu:4"]


@pytest.mark.parametrize("spec", BAD)
def test_bad_presets_say_what_is_known(spec):
    with pytest.raises(ValueError, match=r"cpu:N; v5e:XxY; h100:GPUS or h100:NODESxGPUS; v100-summit:") as error:
        Machine.preset(spec)
    assert repr(spec) in str(error.value)


def device(platform, kind, process=0, coords=None):
    return SimpleNamespace(platform=platform, device_kind=kind, process_index=process, coords=coords)


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ([device("gpu", "NVIDIA H100 80GB HBM3")] * 8, "h100:8"),
        ([device("gpu", "NVIDIA H100 80GB HBM3", i // 4) for i in range(8)], "h100:2x4"),
        ([device("gpu", "Tesla V100-SXM2-16GB", i // 6) for i in range(12)], "v100-summit:2x6"),
        ([device("tpu", "TPU v5 lite", 0, (x, y, 0)) for y in range(4) for x in range(2)], "v5e:4x2"),
        ([device("tpu", "TPU v5e", 0, (x, 0, 0)) for x in range(3)], "v5e:1x3"),
        ([device("gpu", "NVIDIA H100", i // 4) for i in range(7)], "h100:7"),
    ],
)
def test_detect(devices, name):
    assert Machine.detect(devices).name == name


def test_detect_cpu():
    assert Machine.detect(jax.devices("cpu")[:3]).name == "cpu:3"


H100 = device("gpu", "NVIDIA H100")


@pytest.mark.parametrize("devices", [[], [device("gpu", "GeForce")], [device("cpu", "cpu"), H100]])
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


def test_roofline():
    machine = Machine.preset("h100:8")
    n = 4096
    assert op_seconds(machine, 2 * n**3, 3 * n * n * 2, "bfloat16") == pytest.approx(4e-6 + 2 * n**3 / 9.89e14)
    assert op_seconds(machine, n, 1e9, "bfloat16") == pytest.approx(4e-6 + 1e9 / 3.35e12)
    assert op_seconds(machine, 0, 0, "float32") == machine.device.kernel_overhead
    matmul = [op_seconds(machine, 2 * n**3, 0, d) for d in ("bfloat16", "float32", "float64")]
    assert matmul == sorted(matmul)
