"""The scripts that print tables: rows that are made once, machines by number of devices, scaling, baselines."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))  # scripts import each other by name

from baselines import BEST, additive_seconds, alone, baselines, joint, program_of
from mesh_sweep import batches, speed_up
from rows import Rows
from rules_used import used
from unity_table import verdicts

from unity_jax.machine.family import first_devices, machine_of, spec
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.search.experts import experts
from unity_jax.search.placement import mesh_candidates


def test_rows_are_made_once_and_kept(tmp_path):
    path, made = tmp_path / "deep" / "rows.csv", []

    def measure(n):
        made.append(n)
        return {"seconds": n / 3, "label": "a, b"}

    for _ in range(2):
        rows = Rows(path, settings=("model", "devices"))
        for n in (2, 4):
            row = rows.make({"model": "gpt", "devices": n}, lambda n=n: measure(n))
            assert row == {"model": "gpt", "devices": str(n), "seconds": f"{n / 3:.6g}", "label": "a, b"}
    assert made == [2, 4]
    assert [row["devices"] for row in rows.found] == ["2", "4"]


def test_rows_that_failed_are_made_again(tmp_path):
    rows = Rows(tmp_path / "rows.csv", settings=("n",))
    rows.make({"n": 1}, lambda: {"x": 1})
    with pytest.raises(ZeroDivisionError):
        rows.make({"n": 2}, lambda: {"x": 1 / 0})
    rows.make({"n": 2}, lambda: {"y": 5})  # rows may have other columns than those before
    assert rows.found == [{"n": "1", "x": "1", "y": ""}, {"n": "2", "x": "", "y": "5"}]


def test_rows_of_another_script_are_not_touched(tmp_path):
    Rows(tmp_path / "rows.csv", settings=("n",)).make({"n": 1}, lambda: {"x": 1})
    with pytest.raises(ValueError, match="no column 'model'"):
        Rows(tmp_path / "rows.csv", settings=("model",)).make({"model": "gpt"}, dict)


def test_rows_are_replaced_in_their_place(tmp_path):
    rows = Rows(tmp_path / "rows.csv", settings=("n",))
    for n, x in ((1, 1), (2, 2), (1, 3)):
        rows.put({"n": n}, {"x": x})
    assert rows.found == [{"n": "1", "x": "3"}, {"n": "2", "x": "2"}]


def test_the_readme_says_what_the_rows_say():
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[2] / "experiments" / "readme.py", "--check"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}run python experiments/readme.py"


@pytest.mark.parametrize(
    ("family", "devices", "preset"),
    [
        ("v5e", 8, "v5e:2x4"),
        ("v5e", 96, "v5e:8x12"),
        ("v5e", 256, "v5e:16x16"),
        ("v5p", 512, "v5p:8x8x8"),
        ("v5p", 32, "v5p:2x4x4"),
        ("tpu7x", 16, "tpu7x:2x2x2"),
        ("h100", 4, "h100:4"),
        ("h100", 512, "h100:64x8"),
        ("v100-summit", 192, "v100-summit:32x6"),
        ("cpu", 24, "cpu:24"),
    ],
)
def test_machines_by_number_of_devices(family, devices, preset):
    assert spec(family, devices) == preset
    assert machine_of(family, devices).num_devices == devices


@pytest.mark.parametrize(("family", "devices"), [("v5e", 512), ("h100", 12), ("tpu7x", 3), ("v1", 8)])
def test_machines_that_do_not_exist(family, devices):
    with pytest.raises(ValueError, match=family):
        machine_of(family, devices)


def test_the_first_devices_of_a_machine_file(tmp_path):
    Machine.preset("h100:4x8").save(tmp_path / "cluster.json")
    for n, sizes in ((2, (1, 2)), (8, (1, 8)), (16, (2, 8)), (32, (4, 8))):
        assert tuple(level.size for level in machine_of(str(tmp_path / "cluster.json"), n).network) == sizes
    for n in (12, 64):
        with pytest.raises(ValueError, match=f"{n}"):
            first_devices(Machine.preset("h100:4x8"), n)


def test_scaling():
    assert batches(1024, None, 8) == (1024, 1024)
    assert batches(1024, 4, 8) == (32, 4)
    assert speed_up(1024, 0.25, 1024, 2.0) == 8.0  # strong: an eighth of the time
    assert speed_up(32, 2.0, 4, 2.0) == 8.0  # weak: eight times the work in the same time


def test_rules_are_counted_by_model():
    rows = [{"model": "a", "rules": "sum-dot-1, back*3; f-1*1"}, {"model": "a", "rules": "f-1*2"}]
    rows += [{"model": "b", "rules": "f-1*4"}, {"model": "c", "rules": ""}]
    assert used(rows) == {"sum-dot-1, back": {"a": 3}, "f-1": {"a": 3, "b": 4}}


def test_verdicts_say_where_a_plan_is_slower():
    row = {"model": "mlp", "machine": "v100-summit:1x6", "devices": "6", "additive seconds": "3.0"}
    for name, seconds, fits in (("data parallel", 2, False), ("expert", 0.9, True), ("sequential", 1.2, True)):
        row |= {f"{name} seconds": str(seconds), f"{name} fits": str(fits)}
    said = verdicts([row | {"joint seconds": "1.0", "joint fits": "True"}])
    assert "mlp 3.00 (2.0); met by 1 of 1" in said[0]
    assert said[1].startswith("mlp, 3.00 where 2.0 was published: ")
    assert said[2].endswith("never")
    assert said[3].endswith("mlp on v100-summit:1x6 (0.900)")
    assert said[5].endswith("at least 1.1 on 1 models")


def plans(model, machine, limit=None, **overrides):
    program, on = program_of(model, "tiny", **overrides), Machine.preset(machine)
    return program, on, baselines(program, on, limit)


@pytest.mark.parametrize(("model", "machine"), [("mlp", "h100:8"), ("xdl", "v100-summit:1x6")])
def test_no_baseline_is_better_than_the_chosen_plan(model, machine):
    program, on, found = plans(model, machine)
    chosen = joint(program, on)
    assert {"data parallel", "megatron", BEST} <= set(found)
    assert chosen.seconds <= min(c.seconds for c in found.values()) * (1 + 1e-9)
    assert found[BEST].seconds == min(c.seconds for c in found.values())
    assert additive_seconds(found["data parallel"]) >= found["data parallel"].seconds


def test_tables_that_all_devices_do_not_divide_are_split_over_some():
    program, on, found = plans("xdl", "v100-summit:1x6", rows=(1_000_000,) * 2, batch_size=6144)
    assert "x tables(" in found[BEST].label  # over 2 of 2 x 3: neither the rows nor the columns divide by 3
    assert joint(program, on).seconds <= found[BEST].seconds * (1 + 1e-9)


def test_one_device_is_rewritten_too():
    """Of a projection of all positions a few are needed."""

    def step(w, x, positions):
        return w, jnp.take_along_axis(jnp.tanh(x) @ w, positions[:, :, None], axis=1)

    shapes = jax.ShapeDtypeStruct((512, 4096), jnp.float32), jax.ShapeDtypeStruct((32, 256, 512), jnp.float32)
    program = trace(step, (*shapes, jax.ShapeDtypeStruct((32, 8), jnp.int32)), {})
    assert alone(program, Machine.preset("h100:8")).program.rewrites


def test_experts_split_tables_over_all_data_axes_or_one():
    (one, *_, two) = mesh_candidates(8, Machine.preset("h100:8"))
    assert [e.name for e in experts(one) if e.tables] == ["dp(x) x tables(x)"]
    assert [e.tables for e in experts(two) if e.tables] == [("x", "y"), ("x",), ("y",)]
    assert [e.is_combined for e in experts(two) if e.tables] == [False, True, True]
