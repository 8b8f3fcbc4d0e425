"""Devices that differ: what can be counted on, and what is said of it."""

import dataclasses

import pytest

from unity_jax.machine.contention import Contention
from unity_jax.machine.device import Device, differences, weakest
from unity_jax.machine.machine import Machine

FAST = Device("fast", (("bfloat16", 1e14), ("vector", 1e12)), 16e9, 1e12, 1e10, 1e-6)
SLOW = dataclasses.replace(FAST, kind="slow", peak_flops=(("bfloat16", 4e13), ("vector", 1e12)), memory_bandwidth=2e12)
SMALL = dataclasses.replace(FAST, kind="small", memory_bytes=8e9, kernel_overhead=2e-6)


def test_the_least_of_everything():
    least = weakest((FAST, SLOW, SMALL))
    assert least == Device("fast, slow, small", (("bfloat16", 4e13), ("vector", 1e12)), 8e9, 1e12, 1e10, 2e-6)
    assert weakest((FAST,)) == FAST


def test_every_field_says_what_the_weakest_has_of_it():
    silent = [f.name for f in dataclasses.fields(Device) if not callable(f.metadata.get("weakest"))]
    assert not silent


HALF, QUARTER = Contention(0.5, 0.0, 0.5), Contention(0.25, 0.25)
FIELDS = {
    "kind": ("a", "b", "a, b"),
    "peak_flops": ((("vector", 2.0),), (("int8", 8.0), ("vector", 3.0)), (("vector", 2.0), ("int8", 2.0))),
    "memory_bytes": (2.0, 1.0, 1.0),
    "memory_bandwidth": (2.0, 1.0, 1.0),
    "host_bandwidth": (2.0, 1.0, 1.0),
    "kernel_overhead": (1.0, 2.0, 2.0),
    "matmul_efficiency": (0.9, 0.5, 0.5),
    "memory_efficiency": (0.9, 0.5, 0.5),
    "matmul_tile": ((8, 256, 1), (16, 128, 1), (16, 256, 1)),
    "matmul_units": (1, 132, 132),
    "results_per_second": (0.0, 2.0, 2.0),
    "unfused_per_second": (0.0, 2.0, 2.0),
    "gathered_rows_per_second": (3.0, 2.0, 2.0),
    "scattered_rows_per_second": (0.0, 2.0, 2.0),
    "layout_tile": ((0, 0), (8, 128), (8, 128)),
    "fast_bytes": (2.0, 0.0, 0.0),
    "fast_bandwidth": (0.0, 2.0, 2.0),
    "chip_bytes": (2.0, 0.0, 0.0),
    "fast_results_per_second": (3.0, 2.0, 2.0),
    "contention": (HALF, QUARTER, Contention(0.5, 0.25, 0.5)),
    "asynchronous": (("all_gather", "permute"), ("all_reduce", "permute"), ("permute",)),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Device) if f.name != "compiler"])
def test_what_the_weakest_has_of_a_field(field):
    """Whichever of the devices comes first."""
    first, second, expected = FIELDS[field]
    a, b = (dataclasses.replace(FAST, **{field: value}) for value in (first, second))
    assert weakest((a, b)) == dataclasses.replace(FAST, **{field: expected})
    found = getattr(weakest((b, a)), field)
    assert found == expected or set(found) == set(expected) or (found, expected) == ("b, a", "a, b")


def test_devices_of_different_compilers_are_no_machine():
    with pytest.raises(ValueError, match=r"machine 'm': one program runs on all .* compiler: gpu, tpu"):
        Machine("m", (FAST, dataclasses.replace(FAST, compiler="tpu")), Machine.preset("cpu:2").network)


def test_what_is_said():
    assert differences((FAST, FAST)) == ""
    assert differences((FAST, SLOW, FAST, SMALL)) == (
        "devices differ (2 fast, 1 slow, 1 small) and shards are equal: slow decides arithmetic; "
        "fast, small decides memory traffic; small decides the memory limit"
    )
    busy = dataclasses.replace(FAST, kernel_overhead=1e-3)
    assert differences((FAST, busy)) == "devices differ (2 fast) and shards are equal: they compute alike"


def test_equal_devices_are_one():
    network = Machine.preset("cpu:4").network
    assert Machine("m", (FAST,) * 4, network) == Machine("m", (FAST,), network)
