"""How a model scales with the number of devices: the plan that is chosen for each, beside what experts would run.

    python experiments/mesh_sweep.py --model gpt --size gpt3-6.7b --machine v5p --devices 8,16,32,64,128,256,512
    python experiments/mesh_sweep.py --model bert --machine h100 --devices 8,16,32 --batch-per-device 32  # weak scaling
    python experiments/mesh_sweep.py --model mlp --machine cluster.json --devices 2,4,8                   # your machine

Nothing is compiled or run, no accelerator is needed. Speed-up is in examples per second over one device of the same
kind, whose time is by the same cost model, whatever it can hold. A `!` marks a plan that needs more memory than a
device has: its time is only computed. Rows are kept in a CSV file, and those that are there are not made again; the
figure is drawn from it (extra `experiments`).
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baselines import alone, baselines, columns, joint, program_of
from families import machine_of
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rows import Row, Rows

import models
from unity_jax.planning import uncollected
from unity_jax.report.text import seconds, size

RESULTS = Path(__file__).parent / "results" / "sweep.csv"
SETTINGS = ("model", "size", "machine", "devices", "batch", "batch on one")
OTHERS = ("data parallel", "fsdp", "megatron")


def batches(fixed: int, per_device: int | None, devices: int) -> tuple[int, int]:
    """The batch of so many devices, and that of the one device they are compared with: the same one (strong scaling),
    or as much for each device (weak scaling)."""
    return (fixed, fixed) if per_device is None else (per_device * devices, per_device)


def speed_up(batch: int, step_seconds: float, batch_of_one: int, seconds_of_one: float) -> float:
    """Examples per second over those of one device."""
    return (batch / step_seconds) / (batch_of_one / seconds_of_one)


def measure(model: str, size: str, machine: str, devices: int, batch: int, batch_of_one: int) -> dict[str, Any]:
    """One row."""
    on = machine_of(machine, devices)
    program, limit = program_of(model, size, batch_size=batch), on.device.memory_bytes
    variant = joint(program, on)
    plan = variant.candidate
    row = columns("chosen", plan, limit)
    row["mesh"], row["order"] = str(plan.mesh), " ".join(map(str, plan.mesh.order))
    row["exposed seconds"] = plan.timeline.exposed_communication_seconds
    row["rewrites"] = len(variant.program.rewrites)
    row["one device seconds"] = _one(model, size, machine, batch_of_one)
    row["speed-up"] = speed_up(batch, plan.seconds, batch_of_one, row["one device seconds"])
    row["efficiency"] = row["speed-up"] / devices
    for name, found in baselines(program, on).items():
        row |= columns(name, found, limit)
    return row


@functools.cache
def _one(model: str, size: str, machine: str, batch: int) -> float:
    return alone(program_of(model, size, batch_size=batch), machine_of(machine, 1)).seconds


def table(rows: Sequence[Row], title: str) -> Table:
    head = ("devices", "batch", "mesh", "plan", "step", "exposed", "memory", "speed-up", "efficiency", *OTHERS)
    made = Table(*head, title=title, padding=(0, 0))
    for row in rows:
        made.add_row(
            row["devices"],
            row["batch"],
            row["mesh"],
            row["chosen plan"],
            _step(row, "chosen"),
            seconds(float(row["exposed seconds"])),
            size(float(row["chosen bytes"])),
            f"{float(row['speed-up']):.1f}",
            f"{float(row['efficiency']):.0%}",
            *(_step(row, name) for name in OTHERS),
        )
    return made


def _step(row: Row, name: str) -> str:
    if not row.get(f"{name} seconds"):
        return "none"
    return seconds(float(row[f"{name} seconds"])) + "!" * (row[f"{name} fits"] != "True")


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Speed-up and step time against devices, of the chosen plans and of the experts; hollow where it does not fit.

    As wide as a README shows it, 800 px, at twice the resolution.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), dpi=200, layout="constrained")
    time, speed = figure.subplots(1, 2)
    for name, color, marker in zip(("chosen", *OTHERS), ("C3", "C0", "C1", "C2"), "osD^", strict=True):
        made = [row for row in rows if row.get(f"{name} seconds")]
        devices = [int(row["devices"]) for row in made]
        steps = [float(row[f"{name} seconds"]) for row in made]
        one = [
            speed_up(int(r["batch"]), s, int(r["batch on one"]), float(r["one device seconds"]))
            for r, s in zip(made, steps, strict=True)
        ]
        fill = [color if row[f"{name} fits"] == "True" else "white" for row in made]
        for axes, values in ((time, steps), (speed, one)):
            axes.plot(devices, values, color=color, zorder=2 if name == "chosen" else 1)
            axes.scatter(devices, values, c=fill, edgecolors=color, marker=marker, zorder=3, label=name)
    every = [int(row["devices"]) for row in rows]
    speed.plot(every, every, color="0.6", linestyle=":", label="linear")
    for axes, label in ((time, "seconds per step"), (speed, "examples per second over one device")):
        axes.set(xscale="log", yscale="log", xlabel="devices", ylabel=label)
        axes.set_xticks(every, [str(n) for n in every])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    speed.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt", choices=models.names())
    parser.add_argument("--size", default="full", help="one of the model's sizes")
    parser.add_argument("--machine", default="v5p", help="v5e, v5p, h100, v100-summit, ..., or a machine file (.json)")
    parser.add_argument("--devices", default="8,16,32,64", help="how many, separated by commas")
    parser.add_argument("--batch", type=int, help="examples in a step, whatever the devices; default: the model's own")
    parser.add_argument("--batch-per-device", type=int, help="instead: so many for each device (weak scaling)")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw it; needs the extra experiments")
    options = parser.parse_args()
    sizes = [int(n) for n in options.devices.split(",")]
    try:
        made = models.get(options.model, options.size)
        for n in sizes:
            machine_of(options.machine, n)
    except ValueError as error:
        parser.error(str(error))
    fixed = options.batch or made.config.batch_size
    rows, wanted = Rows(options.out, SETTINGS), []
    for n in sizes:
        batch, one = batches(fixed, options.batch_per_device, n)
        wanted.append(dict(zip(SETTINGS, (options.model, options.size, options.machine, n, batch, one), strict=True)))
    shown = []
    columns_shown = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns_shown, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(wanted))
        for what in wanted:
            progress.update(task, description=f"{what['devices']} devices")
            with uncollected():
                shown.append(rows.make(what, lambda w=what: measure(*w.values())))
            progress.advance(task)
    each = f"{options.batch_per_device} per device" if options.batch_per_device else f"batch {fixed}"
    title = f"{options.model} {options.size} on {options.machine}, {each}"
    console = Console(width=150)
    console.print(table(shown, title))
    first = shown[0]
    console.print(f"one device, whatever it holds: {seconds(float(first['one device seconds']))} per step of {one}")
    if options.figure:
        draw(shown, title, options.figure)
        console.print(f"drawn: {options.figure}")


if __name__ == "__main__":
    main()
