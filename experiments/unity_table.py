"""Unity's evaluation (OSDI 22, section 6): its seven models and GPT, planned for Summit, H100 and v5e.

    python experiments/unity_table.py                # what is not in the file yet, smallest machines first
    python experiments/unity_table.py --models dlrm,mlp --on v100-summit:1x6,v100-summit:2x6
    python experiments/unity_table.py --rows 0       # only print what there is

Seconds of a step, all by the same simulation, with the paper's batch for each device (weak scaling):

    additive       data parallelism of the program as written with nothing hidden (`baselines.additive_seconds`)
    data parallel  the same plan, simulated
    expert         the best of data parallel, ZeRO-1, FSDP, Megatron, their products, and split tables
    sequential     rewritten for one device, then parallelized
    joint          the planner's answer: rewritten and parallelized together

A `!` marks a plan that needs more memory than a device has: its time is only computed. The published ratios are over
the best that existed then, on up to 192 GPUs. On Summit everything is in float32, as Unity was; elsewhere in bfloat16.
Rows are kept in `experiments/results/unity.csv`; delete one to have it made again.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
from baselines import additive_seconds, baselines, columns, joint, program_of, sequential
from rich.console import Console
from rich.table import Table
from rows import Row, Rows

import models
from unity_jax.machine.machine import Machine
from unity_jax.program import Program
from unity_jax.report.text import seconds

RESULTS = Path(__file__).parent / "results" / "unity.csv"
SETTINGS = ("model", "machine", "batch per device")
MANY = 1.1
"""How much faster than the sequential plan counts as better."""


@dataclass(frozen=True)
class Case:
    """A model as the paper ran it, trained by SGD at 0.01 but for those of language (section 6).

    **Fields:** `batch`: for each device; `published`: throughput over the best that existed, None where it was not run;
    `why`: why our ratio differs from that.
    """

    size: str
    batch: int
    published: float | None
    why: str
    own_optimizer: bool = False


CASES = {
    "dlrm": Case(
        "unity",
        1024,
        3.6,
        "additive data parallelism sends 8 GB of table gradients, of which a step fills a few thousand rows; the"
        " paper's best baseline splits the tables, as the expert here does",
    ),
    "mlp": Case(
        "full",
        256,
        2.0,
        "a step sends 4 GB of gradients for little arithmetic; the more of the network is InfiniBand, the more there is"
        " to save by splitting layers",
    ),
    "xdl": Case("full", 1024, 1.9, "as dlrm: nothing but rows that a step fills is worth sending"),
    "candle_uno": Case(
        "full", 256, 1.6, "as mlp: its towers are dense layers with more gradients than their batches have activations"
    ),
    "inception": Case(
        "full",
        64,
        1.3,
        "the paper also runs branches on devices of their own; here all devices take part in every operation, and most"
        " of a step is convolutions that no layout makes faster",
    ),
    "resnext": Case("full", 64, 1.0, "the gain is what the simulation does not hide of 100 MB of gradients"),
    "bert": Case(
        "full",
        4,
        1.0,
        "the paper's baseline is Megatron, as tuned; here it is additive data parallelism, and the plan also projects"
        " only masked positions onto the vocabulary where that pays",
        own_optimizer=True,
    ),
    "gpt": Case("gpt3-1.3b", 4, None, "not in the paper", own_optimizer=True),
}
SUMMIT = tuple(f"v100-summit:{nodes}x6" for nodes in (1, 2, 4, 8, 16, 32))
OTHERS = ("v100-summit:2x4", "v100-summit:8x4", "h100:8", "h100:4x8", "h100:8x8", "h100:12x8")
TPUS = ("v5e:2x4", "v5e:4x8", "v5e:8x12", "v5e:16x16")
PLANS = ("data parallel", "expert", "sequential", "joint")


def program_on(model: str, machine: Machine, batch: int) -> Program:
    """The train step of a case, with so large a batch for each device of a machine."""
    case, dtype = CASES[model], jnp.float32 if machine.device.kind == "v100" else None
    optimizer = None if case.own_optimizer else optax.sgd(0.01)
    return program_of(model, case.size, optimizer, batch_size=batch * machine.num_devices, dtype=dtype)


def measure(model: str, on: str, batch: int) -> dict[str, Any]:
    """One row."""
    machine = Machine.preset(on)
    program, limit = program_on(model, machine, batch), machine.device.memory_bytes
    found = baselines(program, machine)
    row: dict[str, Any] = {"devices": machine.num_devices, "ops": sum(1 for _ in program.graph.walk())}
    row["additive seconds"] = additive_seconds(found["data parallel"])
    for name, plan in found.items():
        row |= columns(name, plan, limit)
    together = joint(program, machine)
    for name, plan in (("sequential", sequential(program, machine, known=together)), ("joint", together)):
        row |= columns(name, plan, limit)
        row[f"{name} plan"] = f"{plan.label} on {plan.mesh}"
        row[f"{name} rewrites"] = "; ".join(f"{r.rule} x {r.count}" for r in plan.program.rewrites)
    return row


def over(row: Row, name: str) -> float:
    """How many times as fast as another plan the joint one is."""
    return float(row[f"{name} seconds"]) / float(row["joint seconds"])


def comparable(row: Row, name: str) -> bool:
    """Whether both plans fit, or neither does; else they answer different questions."""
    return row[f"{name} fits"] == row["joint fits"]


def table(rows: Sequence[Row], title: str) -> Table:
    made = Table(
        *("model", "on", "additive", *PLANS, "/ additive", "published", "/ data p.", "/ expert", "/ sequential"),
        title=title,
        padding=(0, 0),
    )
    for row in sorted(rows, key=lambda r: (list(CASES).index(r["model"]), int(r["devices"]))):
        times = [seconds(float(row["additive seconds"]))]
        times += [seconds(float(row[f"{p} seconds"])) + "!" * (row[f"{p} fits"] != "True") for p in PLANS]
        published = CASES[row["model"]].published
        ratios = [f"{over(row, name):.2f}" for name in ("additive", "data parallel", "expert", "sequential")]
        made.add_row(row["model"], row["machine"], *times, ratios[0], str(published or ""), *ratios[1:])
    return made


def verdicts(rows: Sequence[Row]) -> list[str]:
    """What the rows say about the paper's claims, one line each."""
    said = []
    on_summit = [r for r in rows if r["machine"].startswith("v100-summit")]
    ratios = most(on_summit, lambda r: over(r, "additive"))
    published = {m: c.published for m, c in CASES.items() if c.published and m in ratios}
    met = [m for m, ratio in published.items() if ratios[m] >= ratio]
    each = ", ".join(f"{m} {ratios[m]:.2f} ({p})" for m, p in published.items())
    said.append(f"on Summit over additive data parallelism (published): {each}; met by {len(met)} of {len(published)}")
    said += [f"{m}, {ratios[m]:.2f} where {published[m]} was published: {CASES[m].why}" for m in published]
    for name in PLANS[:-1]:
        worse = [r for r in rows if comparable(r, name) and over(r, name) < 1 - 1e-6]
        lost = [r for r in rows if r[f"{name} fits"] == "True" != r["joint fits"]]
        where = ", ".join(f"{r['model']} on {r['machine']} ({over(r, name):.3f})" for r in worse + lost)
        said.append(f"joint is slower than {name}, or does not fit where that does: {where or 'never'}")
    best = most([r for r in rows if comparable(r, "sequential")], lambda r: over(r, "sequential"))
    better = ", ".join(f"{m} {ratio:.2f}" for m, ratio in best.items())
    count = sum(ratio >= MANY for ratio in best.values())
    said.append(f"joint over sequential, the most: {better}; at least {MANY} on {count} models")
    return said


def most(rows: Sequence[Row], ratio: Callable[[Row], float]) -> dict[str, float]:
    """By model, the largest ratio of any of its rows."""
    return {m: max(ratio(r) for r in rows if r["model"] == m) for m in CASES if any(r["model"] == m for r in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(m for m in CASES if m in models.names()))
    parser.add_argument("--on", default=",".join((*SUMMIT, *OTHERS, *TPUS)))
    parser.add_argument("--rows", type=int, help="make at most so many")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    options = parser.parse_args()
    rows = Rows(options.out, SETTINGS)
    machines = sorted(options.on.split(","), key=lambda on: Machine.preset(on).num_devices)
    wanted = [
        {"model": model, "machine": on, "batch per device": CASES[model].batch}
        for on in machines
        for model in options.models.split(",")
    ]
    rows.make_all(rows.missing(wanted)[: options.rows], lambda w: measure(*w.values()), "{model} on {machine}")
    console = Console(width=150)
    shown = rows.made(wanted)
    for kind in ("v100-summit", "h100", "v5e"):
        if some := [r for r in shown if r["machine"].startswith(kind)]:
            console.print(table(some, kind))
    for line in verdicts(shown):
        console.print(line, highlight=False)


if __name__ == "__main__":
    main()
