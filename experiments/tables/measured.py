"""Seconds of a step on the devices at hand: one device, data parallelism, FSDP, and the planner's plan, side by side.

    python -m experiments.tables.measured                           # calibrates, then measures; 20 minutes on two cores
    python -m experiments.tables.measured --models mlp,gpt --size tiny --rounds 40
    python -m experiments.tables.measured --machine profile.json    # measured before, by `unity calibrate --out`

Data parallelism and FSDP are what a user writes for plain `jax.jit`: `NamedSharding`s of arguments and results, the
rest left to XLA's own partitioner. The planner prices with constants that were measured on these devices. All four run
in turns (A B C D A B C D ...), and ratios are those of neighbours in time, so that a busy machine slows all of them
alike. Without an accelerator eight virtual CPU devices share this host, and one device, which may use all of its cores,
is often fastest.

Rows are kept in the CSV file, and made once; delete a row to measure it again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unity_jax.aot.flags import EIGHT_DEVICES, appended

os.environ["XLA_FLAGS"] = appended("XLA_FLAGS", EIGHT_DEVICES)

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.table import Table

import models
import unity_jax as unity
from experiments.rows import Row, Rows
from unity_jax.calibration import calibrate
from unity_jax.text import seconds

console = Console(width=130, highlight=False, markup=False)
RESULTS = Path(__file__).parents[1] / "results"
SETTINGS = ("model", "size", "on")
WAYS = ("one device", "data parallel", "fsdp", "plan")
REFERENCE = "data parallel"
CASES: dict[str, dict[str, Any]] = {
    "mlp": {"batch_size": 512},
    "gpt": {"layers": 2, "hidden": 128, "length": 64, "batch_size": 32},
    "dlrm": {"batch_size": 512},
    "lstm_lm": {"batch_size": 32},
}
"""What is changed of the size `tiny`: enough work for eight devices, little enough for a laptop."""

WARM_UP = 2
"""Rounds that do not count."""


@dataclass
class Way:
    """One way to run the step: how to make its state, place a batch, and step."""

    name: str
    step: Callable[[Any, Any], Any]
    make_state: Callable[[], Any]
    place: Callable[[Any], Any]


def one_device(model: models.Model, device: Any) -> Way:
    step = jax.jit(model.train_step, donate_argnums=0)
    return Way(
        "one device",
        step,
        lambda: jax.device_put(jax.jit(model.make_state)(jax.random.key(0)), device),
        lambda batch: jax.device_put(batch, device),
    )


def partitioned(model: models.Model, mesh: Mesh, name: str, spec: Callable[[Sequence[int]], P]) -> Way:
    """Plain `jax.jit` with a sharding for each leaf of the state, and the batch split over its first dimension."""

    def sharding(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, spec(leaf.shape))

    def rows(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, P("data") if leaf.ndim and leaf.shape[0] % mesh.size == 0 else P())

    state = jax.tree.map(sharding, model.abstract_state())
    batch = jax.tree.map(rows, model.abstract_batch())
    step = jax.jit(model.train_step, donate_argnums=0, in_shardings=(state, batch), out_shardings=(state, None))
    make = jax.jit(model.make_state, out_shardings=state)
    return Way(name, step, lambda: make(jax.random.key(0)), lambda b: jax.device_put(b, batch))


def largest(devices: int) -> Callable[[Sequence[int]], P]:
    """FSDP's usual rule: each leaf is split over its largest dimension that the devices divide."""

    def spec(shape: Sequence[int]) -> P:
        dims = [d for d, n in enumerate(shape) if n % devices == 0]
        return P(*[None] * max(dims, key=lambda d: shape[d]), "data") if dims else P()

    return spec


def planned(model: models.Model, machine: unity.Machine) -> tuple[Way, unity.Plan]:
    step = unity.auto_shard(model.train_step, donate_argnums=0, machine=machine, options=unity.Options(cache=None))
    plan = step.plan(model.abstract_state(), model.abstract_batch())
    return Way("plan", step, lambda: step.init(model.make_state, jax.random.key(0)), step.shard), plan


def measure(name: str, size: str, rounds: int, machine: unity.Machine) -> Mapping[str, Any]:
    """One row: median seconds of each way, quartiles of its ratio to the reference in the same round, and the plan."""
    model = models.get(name, size, **(CASES.get(name, {}) if size == "tiny" else {}))
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("data",))
    ours, plan = planned(model, machine)
    ways = [
        one_device(model, devices[0]),
        partitioned(model, mesh, "data parallel", lambda shape: P()),
        partitioned(model, mesh, "fsdp", largest(len(devices))),
        ours,
    ]
    taken, losses = run(ways, model, rounds)
    kinds = sorted({f"{c.count} {c.kind.replace('_', '-')}({','.join(c.axes)})" for c in plan.predicted.collectives})
    row: dict[str, Any] = {
        "devices": len(devices),
        "kind": devices[0].device_kind,
        "parameters": model.num_parameters,
        "mesh": str(plan.axes),
        "collectives": "; ".join(kinds),
        "rewrites": "; ".join(r.rule for r in plan.rewrites),
        "predicted seconds": plan.predicted.step_seconds,
        "loss difference": max(abs(loss / losses["one device"] - 1) for loss in losses.values()),
    }
    for way in WAYS:
        ratios = [mine / theirs for mine, theirs in zip(taken[way], taken[REFERENCE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        row |= {f"{way} seconds": statistics.median(taken[way]), f"{way} ratio": middle}
        row |= {f"{way} low": low, f"{way} high": high}
    return row


def run(ways: Sequence[Way], model: models.Model, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each step by way, all in turns on the same batch, and the loss of each after the warm-up."""
    states = {way.name: way.make_state() for way in ways}
    batches = {way.name: way.place(model.make_batch(0)) for way in ways}
    taken: dict[str, list[float]] = {way.name: [] for way in ways}
    losses = {}
    for i in track(range(rounds + WARM_UP), "steps", console=Console(stderr=True), transient=True):
        for way in ways:
            start = time.perf_counter()
            states[way.name], metrics = way.step(states[way.name], batches[way.name])
            jax.block_until_ready((states[way.name], metrics))
            if i >= WARM_UP:
                taken[way.name].append(time.perf_counter() - start)
            else:
                losses[way.name] = float(metrics["loss"])
    return taken, losses


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="Seconds of a step, and the ratio to data parallelism: median [quartiles] of the same rounds")
    for column in ("model", "devices", *WAYS, "mesh and collectives of the plan", "predicted"):
        shown.add_column(column, overflow="fold")
    for row in rows:
        cells = []
        for way in WAYS:
            low, middle, high = (float(row[f"{way} {what}"]) for what in ("low", "ratio", "high"))
            cells.append(f"{seconds(float(row[f'{way} seconds']))}\n{middle:.2f} [{low:.2f}, {high:.2f}]")
        plan = f"{row['mesh']}: {row['collectives'] or 'none'}"
        where = f"{row['devices']} {row['kind']}"
        shown.add_row(f"{row['model']} ({row['size']})", where, *cells, plan, seconds(float(row["predicted seconds"])))
    return shown


def profile(path: Path | None) -> unity.Machine:
    """A machine measured before, or measured now and kept for the next time."""
    path = path or RESULTS / f"{jax.devices()[0].device_kind}-{len(jax.devices())}.json"
    if not path.exists():
        columns = (TextColumn("calibrating"), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            found = calibrate(track=lambda probes: progress.track(probes, total=len(probes)))
        path.parent.mkdir(parents=True, exist_ok=True)
        found.machine.save(path)
        console.print(str(found).split("\n\n")[0])
    return unity.Machine.load(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--rounds", type=int, default=60, help="steps that are timed of each way")
    parser.add_argument("--machine", type=Path, help="a profile of these devices (default: calibrate, once)")
    parser.add_argument("--out", type=Path, default=RESULTS / "measured.csv", metavar="CSV")
    options = parser.parse_args()
    machine = profile(options.machine)
    rows = Rows(options.out, SETTINGS)
    found = []
    for name in options.models.split(","):
        settings = {"model": name, "size": options.size, "on": machine.name}
        console.print(f"{name} ...", style="dim")
        found.append(rows.make(settings, lambda n=name: measure(n, options.size, options.rounds, machine)))
        console.print(table(found[-1:]))
    console.print(table(found))


if __name__ == "__main__":
    main()
