"""The scripts that print tables: rows that are made once, machines by number of devices, scaling, baselines."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import models
from experiments.baselines import (
    BEST,
    REWRITTEN,
    SEARCH,
    WHOLE,
    Experts,
    alone,
    baselines,
    divided,
    joint,
    others,
    padded_program,
    program_of,
    ringed,
    sequential,
)
from experiments.made_by import ROOT
from experiments.padded import padded
from experiments.rows import MADE_BY, Rows
from experiments.summaries import by_family, middle, ratios
from experiments.tables import together
from experiments.tables.mesh_sweep import batches, speed_up
from experiments.tables.rules_used import used
from experiments.tables.unity_table import CASES, paper, program_on, verdicts
from experiments.validation import agreement, confirmed, ranking
from experiments.validation.compiled import SETS
from unity_jax.cost.program import local_bytes
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
            made_by = {MADE_BY: rows.version(row)}
            assert row == {"model": "gpt", "devices": str(n), "seconds": f"{n / 3:.6g}", "label": "a, b"} | made_by
    assert made == [2, 4]
    assert [row["devices"] for row in rows.found] == ["2", "4"]


def test_rows_that_failed_are_made_again(tmp_path):
    rows = Rows(tmp_path / "rows.csv", settings=("n",))
    rows.make({"n": 1}, lambda: {"x": 1})
    with pytest.raises(ZeroDivisionError):
        rows.make({"n": 2}, lambda: {"x": 1 / 0})
    rows.make({"n": 2}, lambda: {"y": 5})  # rows may have other columns than those before
    assert [(r["n"], r["x"], r["y"]) for r in rows.found] == [("1", "1", ""), ("2", "", "5")]


def test_rows_of_another_script_are_not_touched(tmp_path):
    Rows(tmp_path / "rows.csv", settings=("n",)).make({"n": 1}, lambda: {"x": 1})
    with pytest.raises(ValueError, match="no column 'model'"):
        Rows(tmp_path / "rows.csv", settings=("model",)).make({"model": "gpt"}, dict)


def test_rows_are_replaced_in_their_place(tmp_path):
    rows = Rows(tmp_path / "rows.csv", settings=("n",))
    for n, x in ((1, 1), (2, 2), (1, 3)):
        rows.put({"n": n}, {"x": x})
    assert [(r["n"], r["x"]) for r in rows.found] == [("1", "3"), ("2", "2")]


def test_the_readme_says_what_the_rows_say():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.readme", "--check"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}run python -m experiments.readme"


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
    rows = [{"model": "a", "rules": "sum-of-dot-to-dot, back*3; neg-of-neg-cancels*1"}]
    rows += [{"model": m, "rules": f"neg-of-neg-cancels*{n}"} for m, n in (("a", 2), ("b", 4))]
    rows += [{"model": "c", "rules": ""}]
    assert used(rows) == {"sum-of-dot-to-dot, back": {"a": 3}, "neg-of-neg-cancels": {"a": 3, "b": 4}}


def made_row(model, on, joint, **others):
    """A row of `unity_table`; a time below zero is that of a plan that does not fit."""
    row = {"model": model, "machine": on, "devices": "6", "joint seconds": str(joint), "joint fits": "True"}
    for name, time in others.items():
        name = name.replace("_", " ")
        row |= {f"{name} seconds": str(abs(time)), f"{name} fits": str(time > 0)}
    return row


def test_verdicts_say_where_a_plan_is_slower():
    row = made_row("mlp", "v100-summit:1x6", 1.0, data_parallel=-2.0, expert=0.9, sequential=1.2)
    other = made_row("mlp", "v100-summit:2x6", 1.0, data_parallel=3.0, expert=1.0)
    said = verdicts([row, other])
    of = {line.split(":")[0]: line for line in said}
    assert of["mlp"].startswith("mlp: 3.00 to 3.00, where 2.0 was published"), "what does not fit is in no ratio"
    assert of["dlrm"].startswith("dlrm: no row of plans that fit, where 3.6 was published")
    compared = [line for line in said if line.startswith("joint is slower")]
    assert compared[0].endswith("never (2 rows)")
    assert compared[1].endswith("mlp on v100-summit:1x6 (0.900)")
    assert compared[2].endswith("no rows yet"), "of a baseline that no row has nothing is claimed"


def test_the_papers_comparison_has_the_papers_machines_and_baselines():
    rows = [made_row("dlrm", "v100-summit:2x6", 1.0, data_parallel=90.0, tables=2.5)]
    rows += [made_row("dlrm", "h100:8", 1.0, tables=7.0), made_row("mlp", "v100-summit:1x6", 1.0, data_parallel=-2.0)]
    shown = paper(rows)
    cells = {str(c.header): list(c.cells) for c in shown.columns}
    assert list(cells)[3:] == [f"{6 * 2**i} GPUs" for i in range(6)]
    assert cells["published, largest"][:2] == ["3.6", "2.0"]
    assert cells["12 GPUs"][0] == "2.50", "over split tables, as the paper's"
    assert cells["6 GPUs"][1] == "no fit"


def test_summaries_are_by_family_and_leave_out_what_does_not_fit():
    rows = [made_row("gpt", "a", 1.0, expert=1.0), made_row("bert", "a", 1.0, expert=2.0)]
    rows += [made_row("t5", "a", 1.0, expert=4.0), made_row("moe", "a", 1.0, expert=-100.0)]
    rows += [made_row("resnet", "a", 1.0, expert=1.5), made_row("xdl", "a", 1.0)]
    assert [q for _, q in ratios(rows, "joint", "expert")] == [1.0, 2.0, 4.0, 1.5]
    assert middle([1.0, 2.0, 4.0]) == "2.00 (median 2.00, of 3 plans)"
    shown = by_family(rows, "joint", {"expert": "the best expert"}, "")
    assert list(shown.columns[0].cells) == ["transformers", "convolutional", "recommenders", "all"]
    assert list(shown.columns[1].cells) == ["2.00 (2.00, 3)", "1.50 (1.50, 1)", "", "1.86 (1.75, 4)"]


def test_every_model_has_a_family():
    assert sorted(models.names()) == sorted(m for family in models.FAMILIES.values() for m in family)
    assert models.family("wgan") == "convolutional"


def test_equal_plans_are_no_agreement():
    equal = {"chosen predicted": "1", "other predicted": "1", "chosen judged": "2", "other judged": "2"}
    yes = equal | {"other predicted": "1.5", "other judged": "2.5"}
    no = equal | {"other predicted": "1.5", "other judged": "1.5"}
    near = equal | {"other predicted": "1.008", "other judged": "1.996"}
    said = together.verdict([equal, yes, no, near])
    assert said.startswith("1 of 2 pairs of different plans agree on which is faster; 1 differ by at most 1%")


def test_data_parallelism_is_compared_with_once():
    dp, fsdp = ranking.Candidate("dp", 1.0, 1.0), ranking.Candidate("fsdp", 2.0, 2.0)
    assert list(confirmed.against([dp, fsdp])) == ["data parallel"], "which is the best expert"
    assert list(confirmed.against([dp, ranking.Candidate("tp", 0.5, 0.5)])) == ["data parallel", "best expert"]


def test_what_is_not_compiled_is_counted():
    compiled = {"model": "vit", "topology": "h100:8", "plan": "dp", "predicted bytes": "70", "compiled bytes": "100"}
    compiled |= {"predicted seconds": "", "compiled seconds": ""}
    said = agreement.verdict([compiled])
    plans = 4 * len(SETS["validation"])
    assert "more than 25 % too low for 1" in said and f"{plans - 1} of these {plans} plans are not compiled" in said
    assert len(agreement.missing([compiled], ["vit"], ["h100:8"])) == 3


def test_tuning_and_validation_programs_are_apart():
    tuning, validation = (set(names) for names in SETS.values())
    assert not tuning & validation and len(validation) >= 12


def plans(model, machine, limit=None, **overrides):
    program, on = program_of(model, "tiny", **overrides), Machine.preset(machine)
    return program, on, baselines(program, on, limit)


SIZES = {"faster_rcnn": {"batch_size": 16}}


@pytest.mark.parametrize("model", models.names())
def test_data_parallelism_divides_the_work(model):
    """Of all matmuls and convolutions every device does an eighth."""
    program, machine = program_of(model, "tiny", **SIZES.get(model, {})), Machine.preset("h100:8")
    (plan,) = plans_of(program, machine, "data parallel")
    least = WHOLE if model == "lora" else 1 - 1e-6  # which multiplies its adapters, weights alone, on every device
    assert least <= divided(plan) <= 1 + 1e-9


def plans_of(program, machine, style):
    """The experts of a style on a mesh of one axis."""
    return [c for c in Experts(program, machine)(style, math.inf) if len(c.mesh.names) == 1]


@pytest.mark.parametrize(("model", "machine"), [("mlp", "h100:8"), ("xdl", "v100-summit:1x6")])
def test_no_baseline_is_better_than_the_chosen_plan(model, machine):
    program, on, found = plans(model, machine)
    chosen = joint(program, on)
    assert {"data parallel", "megatron", BEST} <= set(found)
    assert chosen.seconds <= min(c.seconds for c in found.values()) * (1 + 1e-9)
    assert found[BEST].seconds == min(c.seconds for c in found.values())


def test_experts_have_rings_where_they_gain_by_them():
    program, on = program_of("gpt", "tiny", hidden=1024, heads=8, length=128, batch_size=256), Machine.preset("v5e:2x4")
    plain = list(Experts(program, on)("megatron", math.inf))
    found = ringed(plain, math.inf)
    assert found.seconds < min(c.seconds for c in plain) and found.decisions.rings
    assert baselines(program, on)["megatron"].seconds == found.seconds


def test_a_mesh_on_which_nothing_fits_gathers_weights_again():
    program, on = program_of("mlp", "tiny"), Machine.preset("h100:8")
    kept = list(Experts(program, on)("fsdp", math.inf))
    assert len(list(Experts(program, on)("fsdp", 0.0))) > len(kept)


def test_the_rewritten_program_is_the_experts_too():
    program, on = program_of("xdl", "tiny", rows=(100_000,) * 4, batch_size=512), Machine.preset("h100:8")
    chosen = joint(program, on)
    found = others(program, on, chosen)
    assert chosen.program.rewrites
    assert chosen.seconds <= found[REWRITTEN].seconds * (1 + 1e-9) < found[BEST].seconds
    assert chosen.seconds <= found[SEARCH].seconds and not found[SEARCH].program.rewrites


def test_weights_that_no_device_count_divides_are_stored_padded():
    """Towers of 64 columns on 6 devices: FSDP pads to 66, gathers, and cuts the padding off."""
    on, fields = Machine.preset("v100-summit:1x6"), {"width": 1024, "batch_size": 48}
    stored = padded_program("mlp", "tiny", 6, **fields)
    kernels = {t.shape for t, name in zip(stored.leaves, stored.in_paths, strict=True) if "kernel" in name}
    assert all(any(n % 6 == 0 for n in shape) for shape in kernels), kernels
    (plain,) = plans_of(program_of("mlp", "tiny", **fields), on, "fsdp")
    (even,) = plans_of(stored, on, "fsdp")
    whole, shared = (sum(local_bytes(t, c.mesh) for t in c.graph.inputs if t.rank == 2) for c in (plain, even))
    assert shared < 0.25 * whole, "each device keeps a sixth of the weights, and its part of the batch"
    assert padded_program("mlp", "tiny", 8, **fields) is None, "nothing to pad"


def test_a_padded_step_is_the_step():
    """Losses and parameters, but for the padding, which stays zero."""
    plain = models.get("mlp", "tiny")
    model = padded(plain, 7)
    assert model.train_step is not None and model.num_parameters > plain.num_parameters
    batch, states = plain.make_batch(0), [m.make_state(0) for m in (plain, model)]
    steps = [jax.jit(m.train_step) for m in (plain, model)]
    for _ in range(2):
        states, metrics = zip(*(step(state, batch) for step, state in zip(steps, states, strict=True)), strict=True)
        assert jnp.allclose(metrics[0]["loss"], metrics[1]["loss"], rtol=1e-6)
    for w, stored in zip(*(jax.tree.leaves(state.params) for state in states), strict=True):
        assert jnp.allclose(jax.lax.slice(stored, [0] * w.ndim, w.shape), w, rtol=1e-5)
        assert jnp.isclose(jnp.abs(stored).sum(), jnp.abs(w).sum(), rtol=1e-5)


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


def test_never_worse_than_rewritten_first():
    """Once the gradients of tables are rows, they are split best over other axes than before."""
    machine = Machine.preset("v100-summit:2x6")
    program = program_on("xdl", machine, CASES["xdl"].batch)
    chosen = joint(program, machine)
    assert chosen.program.rewrites and chosen.seconds <= sequential(program, machine, known=chosen).seconds
