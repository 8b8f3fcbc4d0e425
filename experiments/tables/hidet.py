"""Hidet's headline (Ding et al., ASPLOS 2023) beside ours: whole models, and the kernels that the package has.

    python -m experiments.tables.hidet                     # minutes; needs the extra tpu-aot

Hidet compiles five models for an RTX 3090, to answer one example each in float32: on average 1.22 times as fast as the
best of four others, at most 1.48 times. *XLA:TPU*: four of these models under plain `jax.jit`, the forward pass of one
example and its loss, milliseconds of one device as judged of what XLA:TPU compiled (`experiments/validation/judge/`):
the cycles that it estimates, and weights that are copied onto the chip in the meantime. *Ours*: as they are planned.
Where a plan changes nothing, ours is the user's own program and is not compiled again.

The second table is of the kernels there are, forward and backward: how many times as fast as the best of what else
there is for the same device, over all shapes of `kernels.py`, `recurrent.py`, `rows.py` and `bags.py`, whose rows it
reads, stale ones too. What JAX's kernel takes with a mask no schedule tells.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import models
from experiments.baselines import joint
from experiments.made_by import COMPILED
from experiments.one_device import plain, planned
from experiments.published import figures
from experiments.rows import Row, Rows
from experiments.scheduled import arguments, tabulate
from experiments.tables import bags, kernels, recurrent
from experiments.tables import rows as split_tables
from experiments.validation.judge import judge
from unity_jax.aot.bundles import empty, schedules, with_schedules
from unity_jax.aot.cycles import CLOCKS, estimated_cycles
from unity_jax.aot.hlo import parse
from unity_jax.aot.topologies import compiled_for
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.search.joint import one_device

RESULTS = Path(__file__).parents[1] / "results" / "hidet.csv"
SETTINGS = ("topology", "model")
CODE = (
    *COMPILED,
    "experiments/one_device.py",
    *(f"experiments/tables/hidet.py:{name}" for name in ("measure", "milliseconds", "MODELS")),
)
TOPOLOGIES = ("v5e:2x4",)
MODELS: dict[str, dict[str, Any]] = {
    "resnet": {"size": "full"},
    "inception": {"size": "full"},
    "bert": {"size": "base", "length": 128, "predictions": 20},
    "gpt": {"size": "gpt2", "length": 128, "scan": False},
}
"""ResNet-50, Inception-v3, BERT and GPT-2; of MobileNet-v2 there is no model here. 20 predictions are 15 % of 128."""


def measure(on: str, model: str) -> dict[str, Any]:
    """One row: milliseconds by XLA:TPU and as planned, by the compiler and by the planner; what the plan changes."""
    made = models.get(model, **MODELS[model], batch_size=1, dtype=jnp.float32)
    shapes = made.abstract_state()._replace(opt_state=()), made.abstract_batch()
    plan = joint(trace(made.eval_step, shapes, {}), one_device(Machine.preset(on)))
    changes = len(plan.program.implementations) + len(plan.program.rewrites)
    by_xla = milliseconds(plain(made.eval_step, shapes, on), on)
    ours = milliseconds(planned(plan, on), on) if changes else by_xla
    return {"XLA ms": by_xla, "ours ms": ours, "predicted ms": 1e3 * plan.seconds, "changes": changes}


def milliseconds(lowered: jax.stages.Lowered, on: str) -> float:
    """Of one example: what computes, kernels too, or as judged, with copies of weights onto the chip, if that is
    longer."""
    empty()
    module = parse(compiled_for(lowered, "tpu").as_text() or "")
    module = with_schedules(module, schedules(module))
    return 1e3 * max(judge(module, on), estimated_cycles(module).total / CLOCKS[on.partition(":")[0]])


def faster(rows: Sequence[Row]) -> list[float]:
    """How many times as fast whole models are as planned."""
    return [float(row["XLA ms"]) / float(row["ours ms"]) for row in rows]


def summary(ratios: Sequence[float]) -> tuple[str, str]:
    """The geometric mean and the largest."""
    return f"{statistics.geometric_mean(ratios):.2f}", f"{max(ratios):.2f}"


def table(rows: Sequence[Row]) -> Table:
    """Whole models."""
    shown = Table("model", "on", title="One example in float32: Hidet on an RTX 3090, and XLA:TPU")
    for name in ("Hidet", "XLA:TPU", "ours", "predicted", "changes of the plan", "XLA:TPU / ours"):
        shown.add_column(name, justify="right")
    said = {row["what"]: row["value"] for row in figures("Hidet")}
    for row, ratio in zip(rows, faster(rows), strict=True):
        times = (f"{float(row[f'{name} ms']):.3f} ms" for name in ("XLA", "ours", "predicted"))
        theirs = f"{said[row['model'] + ' ms']} ms"
        shown.add_row(row["model"], row["topology"], theirs, *times, row["changes"], f"{ratio:.2f}")
    shown.add_row("mobilenet", "", f"{said['mobilenet ms']} ms", *[""] * 5)
    return shown


KERNELS: dict[str, tuple[Any, Callable[[Row], float]]] = {
    "attention, over the better of XLA and, without a mask, JAX's kernel": (
        kernels,
        lambda row: (
            min(float(row[f"{by} ms"]) for by in ("XLA", "JAX's kernel") if row.get(f"{by} ms")) / float(row["ours ms"])
        ),
    ),
    "recurrent layers, over XLA's scan": (recurrent, lambda row: float(row["written ms"]) / float(row["kernels ms"])),
    "gradients of split tables, over all rows by XLA": (
        split_tables,
        lambda row: float(row["all cycles"]) / float(row["own cycles"]),
    ),
    "bags of rows, over rows and their sum": (
        bags,
        lambda row: float(row["written cycles"]) / float(row["bags cycles"]),
    ),
}
"""Of each kind of kernels, the script whose rows tell of it, and how many times as fast as the best other one."""


class Kind(NamedTuple):
    """Kernels of a kind on a device: what they are `over`, how many times as fast at each shape, and how many rows of
    that table are `stale`."""

    what: str
    over: str
    on: str
    ratios: Sequence[float]
    stale: int


def of_kernels() -> Iterator[Kind]:
    """All that the other tables tell."""
    for what, (script, ratio) in KERNELS.items():
        rows = Rows(script.RESULTS, script.SETTINGS, script.CODE)
        name, _, over = what.partition(", over ")
        for on in dict.fromkeys(row["topology"] for row in rows.found):
            here = [row for row in rows.found if row["topology"] == on]
            yield Kind(name, over, on, list(map(ratio, here)), sum(map(rows.is_stale, here)))


def headline(rows: Sequence[Row]) -> Table:
    """Times as fast, theirs and ours."""
    shown = Table("", "over", "on", "of", title="Times as fast as the best other")
    for name in ("average", "at most"):
        shown.add_column(name, justify="right")
    said = {row["what"]: row for row in figures("Hidet")}
    theirs = [said[name]["value"] for name in ("average", "at most")]
    shown.add_row("Hidet, whole models", said["average"]["over"], "RTX 3090", "5 models", *theirs)
    for on in dict.fromkeys(row["topology"] for row in rows):
        here = [row for row in rows if row["topology"] == on]
        shown.add_row("ours, whole models", "XLA:TPU", on, f"{len(here)} models", *summary(faster(here)))
    for kind in of_kernels():
        many = f"{len(kind.ratios)} shapes" + f", {kind.stale} stale" * bool(kind.stale)
        shown.add_row(f"ours, {kind.what}", kind.over, kind.on, many, *summary(kind.ratios))
    return shown


DIFFERENCES = (
    "Machine: theirs is measured on an RTX 3090; ours is read from what XLA:TPU compiled for a chip that is not there, "
    "so that milliseconds are of different machines, and only ratios on one of them can be set side by side. Products "
    "in float32 are of bfloat16 on TPUs, by default.",
    "Whole models: Hidet makes every kernel of a model itself; here matmuls and convolutions stay the compiler's, and "
    "at one example of 128 tokens or one image there is no operation that a kernel of ours is faster for.",
    "Kernels: Hidet's gain is over frameworks and tuners with kernels of their own for the same matmuls and "
    "convolutions; ours is at what XLA has no kernel for, scores that it writes to memory and weights that it reads in "
    "each step, which is why it is larger, and in fewer programs.",
    "Average: theirs is of five models, ours, a geometric mean, of the shapes that the tables have.",
)
"""A sentence on each difference."""


def told(rows: Sequence[Row]) -> list[Table | str]:
    return [headline(rows), table(rows), *DIFFERENCES]


def verdict(rows: Sequence[Row]) -> str:
    """Whole models and kernels, beside what was published."""
    if not rows:
        return ""
    said = {row["what"]: row for row in figures("Hidet")}
    average, most = summary(faster(rows))
    by_kind: dict[str, list[float]] = {}
    for kind in of_kernels():
        by_kind.setdefault(f"{kind.what} over {kind.over}", []).extend(kind.ratios)
    each = "; ".join(f"{what}: {' (at most '.join(summary(ratios))})" for what, ratios in by_kind.items())
    theirs = f"{said['average']['value']} (at most {said['at most']['value']}) over {said['average']['over']}"
    return (
        f"times as fast: {len(rows)} whole models, one example, {average} (at most {most}) over XLA:TPU (Hidet, five "
        f"models on an RTX 3090: {theirs}); kernels: {each}"
    )


def main() -> None:
    options = arguments(__doc__, TOPOLOGIES, RESULTS).parse_args()
    wanted = [dict(zip(SETTINGS, (on, model), strict=True)) for on in options.on.split(",") for model in MODELS]
    rows, console = Rows(options.out, SETTINGS, CODE), Console(width=150, highlight=False)
    tabulate(rows, wanted, options.stale, measure, table, verdict)
    console.print(headline(rows.made(wanted)))
    console.print("\n".join(DIFFERENCES))


if __name__ == "__main__":
    main()
