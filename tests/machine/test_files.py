"""Machines in files: what is written comes back, and what is wrong is named."""

import copy
import dataclasses
import json

import pytest

from unity_jax.machine.machine import Machine
from unity_jax.machine.network import Matrix

SLOW = dataclasses.replace(Machine.preset("h100:4").device, kind="slow", memory_bytes=4e10)
MATRIX = Matrix(((0.0, 1e-3), (2e-3, 0.0)), ((0.0, 1e8), (2e8, 0.0)))
MACHINES = [
    *map(Machine.preset, ("cpu:8", "v5e:4x16", "tpu7x:2x2x1", "h100:2x8", "v100-summit:4x6")),
    Machine("mixed", (*Machine.preset("h100:4").devices * 3, SLOW), Machine.preset("h100:4").network),
    Machine("sites", (SLOW,), MATRIX),
]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_round_trip(machine, tmp_path):
    machine.save(tmp_path / "machine.json")
    found = Machine.load(tmp_path / "machine.json")
    assert found == machine
    assert hash(found) == hash(machine)


def changed(path, value, matrix=False):
    """A good file with one field changed, or removed where the value is None."""
    data = copy.deepcopy(json.loads(GOOD_MATRIX if matrix else GOOD))
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(data)


def text_of(machine, tmp):
    machine.save(tmp)
    return tmp.read_text()


@pytest.fixture(scope="module", autouse=True)
def _good(tmp_path_factory):
    global GOOD, GOOD_MATRIX
    tmp = tmp_path_factory.mktemp("machines") / "good.json"
    GOOD, GOOD_MATRIX = text_of(MACHINES[5], tmp), text_of(MACHINES[6], tmp)


MALFORMED = [
    (["name"], None, r"field name is missing"),
    (["name"], 3, r"field name is 3: give a name in quotes"),
    (["colour"], "red", r"field colour is unknown: the fields are format, version, name, devices, network"),
    (["devices"], [], r"field devices is \[\]: give a list with at least one entry"),
    (["devices", 0], 8, r"field devices\[0\] is 8: give an object"),
    (["devices", 1, "count"], 2, r"field devices counts 5, network joins 4: make them agree"),
    (["devices", 1, "count"], 10**12, r"make them agree"),
    (["devices", 1, "count"], 1.5, r"field devices\[1\].count is 1.5: give a whole number >= 1"),
    (["devices", 0, "memory_bytes"], -1, r"field devices\[0\].memory_bytes is -1: give a number > 0"),
    (["devices", 0, "memory_bytes"], "80GB", r"field devices\[0\].memory_bytes is '80GB': give a number > 0"),
    (["devices", 0, "host_bandwidth"], None, r"field devices\[0\].host_bandwidth is missing"),
    (["devices", 0, "kernel_overhead"], -1e-6, r"field devices\[0\].kernel_overhead is -1e-06: give a number >= 0"),
    (["devices", 0, "peak_flops"], {"bfloat16": 1e12}, r"field devices\[0\].peak_flops needs 'vector'"),
    (["devices", 0, "peak_flops", "vector"], True, r"field devices\[0\].peak_flops.vector is True: give a number"),
    (["network"], [8], r"field network is \[8\]: give an object"),
    (["network", "levels"], {}, r"field network.levels is \{\}: give a list"),
    (["network", "levels", 0, "size"], 0, r"field network.levels\[0\].size is 0: give a whole number >= 1"),
    (["network", "levels", 0, "links"], "mesh", r"field network.levels\[0\].links is 'mesh': give one of switch, ring"),
    (["network", "levels", 0, "bandwidth"], float("inf"), r"bandwidth is inf: give a number > 0"),
    (["network", "levels", 0, "latency"], None, r"field network.levels\[0\].latency is missing"),
    (["format"], "plan", r"is not a machine file: it needs format 'unity_jax machine'"),
    (["version"], 99, r"has machine version 99, this unity_jax reads version 1"),
]


@pytest.mark.parametrize(("path", "value", "message"), MALFORMED)
def test_malformed(path, value, message, tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(changed(path, value))
    with pytest.raises(ValueError, match=message) as error:
        Machine.load(file)
    assert "machine.json" in str(error.value)


MALFORMED_MATRIX = [
    (["network", "latency"], None, r"field network.latency is missing"),
    (["network", "bandwidth", 1], [1e8], r"network.bandwidth\[1\] has 1 entries: .* are 2 x 2 tables"),
    (["network", "latency"], [[0.0, 0.0]], r"latency and bandwidth are 2 x 2 tables"),
    (["network", "bandwidth", 0, 1], 0, r"field network.bandwidth\[0\]\[1\] is 0: give a number > 0"),
    (["network", "latency", 0, 1], -1, r"field network.latency\[0\]\[1\] is -1: give a number >= 0"),
]


@pytest.mark.parametrize(("path", "value", "message"), MALFORMED_MATRIX)
def test_malformed_matrix(path, value, message, tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(changed(path, value, matrix=True))
    with pytest.raises(ValueError, match=message):
        Machine.load(file)


def test_not_json_and_not_there(tmp_path):
    with pytest.raises(ValueError, match="there is no machine file"):
        Machine.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ValueError, match=r"is not a machine file: .*; write one with Machine.save"):
        Machine.load(tmp_path / "text.json")


def test_as_many_devices_as_positions():
    with pytest.raises(ValueError, match="machine 'm' has 3 devices on a network of 4: give one for each"):
        Machine("m", (SLOW, SLOW, SLOW), Machine.preset("h100:4").network)
