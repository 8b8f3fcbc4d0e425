"""Unity's evaluation (OSDI 22, section 6): its seven models and GPT, planned for Summit, H100 and v5e.

    python -m experiments.tables.unity_table             # what is not in the file yet, smallest machines first
    python -m experiments.tables.unity_table --models dlrm,mlp --on v100-summit:1x6,v100-summit:2x6
    python -m experiments.tables.unity_table --rows 0    # only print what there is

Seconds of a step, all by the same simulation, with the paper's batch for each device (weak scaling), of the plans of
`experiments/baselines.py`: data parallel, FSDP, Megatron, split tables, the best expert, the best expert on the
rewritten program, the search without rewrites, sequential (rewritten for one device, then parallelized, as TASO in
front of FlexFlow) and joint, the planner's answer. Where six GPUs do not divide a weight, experts store it padded.

The first table is the paper's own: on nodes of six GPUs of Summit, in float32, joint over the baseline that the paper
compared that model with (`experiments/data/unity_published.csv`): an expert's split tables for DLRM, Megatron for BERT.
Its figure 14 shows throughputs by number of GPUs, and the text states the largest ratio of each model; that is what
stands in `published`. Theirs are measured, ours predicted.

A `!` marks a plan that needs more memory than a device has: its time is only computed, and it is in no mean or ratio.
On Summit everything is in float32, as Unity was; elsewhere in bfloat16. Rows are kept in
`experiments/results/unity.csv`.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import csv
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import models
from experiments.baselines import (
    BEST,
    REWRITTEN,
    SEARCH,
    checked,
    columns,
    joint,
    others,
    padded_program,
    program_of,
    sequential,
)
from experiments.made_by import PLANNED
from experiments.rows import Row, Rows
from experiments.summaries import NO_FIT, by_family, never, over, ratios
from unity_jax.machine.machine import Machine
from unity_jax.program import Program
from unity_jax.text import seconds

EXPERIMENTS = Path(__file__).parents[1]
RESULTS = EXPERIMENTS / "results" / "unity.csv"
SETTINGS = ("model", "machine", "batch per device")
CODE = (
    *PLANNED,
    *(
        f"experiments/tables/unity_table.py:{name}"
        for name in ("measure", "CASES", "program_on", "_optimizer", "_fields")
    ),
)


@dataclass(frozen=True)
class Case:
    """A model as the paper ran it, trained by SGD at 0.01 but for those of language (section 6).

    **Fields:** `batch`: for each device; `why`: why our ratio differs from the published one.
    """

    size: str
    batch: int
    why: str
    own_optimizer: bool = False


CASES = {
    "dlrm": Case(
        "unity",
        1024,
        "the expert's split tables still update every row of a shard; the plan updates only the rows that a step reads,"
        " which Unity does not, so the ratio counts an algebra that it did not have",
    ),
    "mlp": Case(
        "full",
        256,
        "a step sends 4 GB of gradients for little arithmetic; the more of the network is InfiniBand, the more there is"
        " to save by splitting layers. The benchmark of Unity's artifact times forward passes, these are whole steps",
    ),
    "xdl": Case(
        "full",
        1024,
        "the published ratio is over the best of them, and FlexFlow splits tables as here; what is left to gain is, as"
        " for dlrm, updating only the rows that a step reads",
    ),
    "candle_uno": Case(
        "full",
        256,
        "the best expert here already splits layers and shards state, which the paper's does not say of its own",
    ),
    "inception": Case(
        "full",
        64,
        "the paper also runs branches on devices of their own; here all devices take part in every operation, and most"
        " of a step is convolutions that no layout makes faster",
    ),
    "resnext": Case("full", 64, "the gain is what the simulation does not hide of 100 MB of gradients"),
    "bert": Case(
        "full",
        4,
        "the plan projects only masked positions onto the vocabulary where that pays; with layouts alone the two are"
        " near each other",
        own_optimizer=True,
    ),
    "gpt": Case("gpt3-1.3b", 4, "not in the paper", own_optimizer=True),
}
SUMMIT = tuple(f"v100-summit:{nodes}x6" for nodes in (1, 2, 4, 8, 16, 32))
OTHERS = ("h100:8", "h100:4x8", "h100:8x8", "h100:12x8")
TPUS = ("v5e:2x4", "v5e:4x8", "v5e:8x12", "v5e:16x16")
AGAINST = {
    "data parallel": "data parallelism",
    BEST: "the best expert",
    REWRITTEN: "the best expert on the rewritten program",
    SEARCH: "the search without rewrites",
    "sequential": "rewriting before parallelizing",
}
"""What joint is compared with."""


@functools.cache
def published() -> Mapping[str, Mapping[str, str]]:
    """What the paper states, by model."""
    with (EXPERIMENTS / "data" / "unity_published.csv").open(newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def program_on(model: str, machine: Machine, batch: int) -> Program:
    """The train step of a case, with so large a batch for each device of a machine."""
    return program_of(model, CASES[model].size, _optimizer(model), **_fields(machine, batch))


def _optimizer(model: str) -> optax.GradientTransformation | None:
    return None if CASES[model].own_optimizer else optax.sgd(0.01)


def _fields(machine: Machine, batch: int) -> dict[str, Any]:
    dtype = jnp.float32 if machine.device.kind == "v100" else None
    return {"batch_size": batch * machine.num_devices, "dtype": dtype}


def measure(model: str, on: str, batch: int) -> dict[str, Any]:
    """One row."""
    machine = Machine.preset(on)
    program, limit, many = program_on(model, machine, batch), machine.device.memory_bytes, machine.num_devices
    stored = padded_program(model, CASES[model].size, many, _optimizer(model), **_fields(machine, batch))
    row: dict[str, Any] = {"devices": many, "ops": sum(1 for _ in program.graph.walk())}
    together = joint(program, machine)
    compared = others(program, machine, together, stored=stored)
    for name, plan in compared.items():
        row |= columns(name, plan, limit)
    row["data parallel divides"] = checked(compared["data parallel"])
    for name, plan in (("sequential", sequential(program, machine, known=together)), ("joint", together)):
        row |= columns(name, plan, limit)
        row[f"{name} plan"] = f"{plan.label} on {plan.mesh}"
        row[f"{name} rewrites"] = "; ".join(f"{r.rule} x {r.count}" for r in plan.program.rewrites)
    return row


def paper(rows: Sequence[Row]) -> Table:
    """The paper's own comparison, published and ours side by side."""
    made = Table("model", "over", "published, largest", title="On nodes of six V100 (Summit): joint over its baseline")
    for on in SUMMIT:
        made.add_column(f"{Machine.preset(on).num_devices} GPUs", justify="right")
    made.caption = f"{NO_FIT}: one of the two needs too much memory; empty: no row, or none with this baseline yet"
    for model, said in published().items():
        own, name = {r["machine"]: r for r in rows if r["model"] == model}, said["baseline"]
        made.add_row(model, name, said["speed-up"], *(over(own.get(on, {}), "joint", name, 2) for on in SUMMIT))
    return made


def over_baseline(rows: Sequence[Row], model: str) -> list[float]:
    """The ratios over the paper's baseline on the paper's machines, of plans that fit."""
    own = [r for r in rows if r["model"] == model and r["machine"] in SUMMIT]
    return [ratio for _, ratio in ratios(own, "joint", published()[model]["baseline"])]


def table(rows: Sequence[Row], title: str) -> Table:
    made = Table("model", "on", "joint", *(f"/ {name}" for name in AGAINST), title=title, padding=(0, 0))
    made.caption = f"! does not fit; {NO_FIT}: one of the two does not"
    for row in sorted(rows, key=lambda r: (list(CASES).index(r["model"]), int(r["devices"]))):
        step = seconds(float(row["joint seconds"])) + "!" * (row["joint fits"] != "True")
        made.add_row(row["model"], row["machine"], step, *(over(row, "joint", name, 2) for name in AGAINST))
    return made


def verdicts(rows: Sequence[Row]) -> list[str]:
    """What the rows say about the paper's claims, one line each."""
    said = []
    for model, stated in published().items():
        found = over_baseline(rows, model)
        ours = f"{min(found):.2f} to {max(found):.2f}" if found else "no row of plans that fit"
        said.append(
            f"{model}: {ours}, where {stated['speed-up']} was published as the largest (the paper has one figure per "
            f"machine only in a picture), over {stated['baseline']} (the paper: "
            f"{stated['what the paper compared with']}): {CASES[model].why}"
        )
    for name, text in AGAINST.items():
        worse = [f"{r['model']} on {r['machine']} ({q:.3f})" for r, q in ratios(rows, "joint", name) if q < 1 - 1e-6]
        lost = [f"{r['model']} on {r['machine']}" for r in rows if r.get(f"{name} fits") == "True" != r["joint fits"]]
        said.append(f"joint is slower than {text}, or does not fit where that does: {never(worse + lost, rows, name)}")
    return said


def told(rows: Sequence[Row]) -> list[Table | str]:
    """All that is shown."""
    summary = by_family(rows, "joint", AGAINST, "All machines: how many times as fast joint is")
    by_kind = [
        table(some, kind)
        for kind in ("v100-summit", "h100", "v5e")
        if (some := [r for r in rows if r["machine"].startswith(kind)])
    ]
    return [paper(rows), summary, *by_kind, *verdicts(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(m for m in CASES if m in models.names()))
    parser.add_argument("--on", default=",".join((*SUMMIT, *OTHERS, *TPUS)))
    parser.add_argument("--rows", type=int, help="make at most so many")
    parser.add_argument("--stale", action="store_true", help="make again what another version of the code made")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    options = parser.parse_args()
    rows = Rows(options.out, SETTINGS, CODE)
    machines = sorted(options.on.split(","), key=lambda on: Machine.preset(on).num_devices)
    wanted = [
        {"model": model, "machine": on, "batch per device": CASES[model].batch}
        for on in machines
        for model in options.models.split(",")
    ]
    todo = rows.missing(wanted, options.stale)[: options.rows]
    rows.make_all(todo, lambda w: measure(*w.values()), "{model} on {machine}")
    console = Console(width=170, highlight=False)
    for part in told(rows.made(wanted)):
        console.print(part)


if __name__ == "__main__":
    main()
