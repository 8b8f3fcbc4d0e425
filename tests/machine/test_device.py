"""Devices that differ: what can be counted on, and what is said of it."""

import dataclasses

from unity_jax.machine.device import Device, differences, weakest
from unity_jax.machine.machine import Machine

FAST = Device("fast", (("bfloat16", 1e14), ("vector", 1e12)), 16e9, 1e12, 1e10, 1e-6)
SLOW = dataclasses.replace(FAST, kind="slow", peak_flops=(("bfloat16", 4e13), ("vector", 1e12)), memory_bandwidth=2e12)
SMALL = dataclasses.replace(FAST, kind="small", memory_bytes=8e9, kernel_overhead=2e-6)


def test_the_least_of_everything():
    least = weakest((FAST, SLOW, SMALL))
    assert least == Device("fast, slow, small", (("bfloat16", 4e13), ("vector", 1e12)), 8e9, 1e12, 1e10, 2e-6)
    assert weakest((FAST,)) == FAST
    assert weakest((FAST, dataclasses.replace(SLOW, workspace_bytes=2**20))).workspace_bytes == 2**20


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
