"""How a model scales with the number of devices: the plan that is chosen for each, beside what experts would run.

    python -m experiments.tables.mesh_sweep --model gpt --size gpt3-6.7b --machine v5p --devices 8,16,32,64,128,256,512
    python -m experiments.tables.mesh_sweep --model bert --machine h100 --devices 8,16,32 --batch-per-device 32
    python -m experiments.tables.mesh_sweep --model mlp --machine cluster.json --devices 2,4,8    # your machine

With a batch for each device it is weak scaling. Nothing is compiled or run, no accelerator is needed. Speed-up is in
examples per second over one device of the same kind, whose time is by the same cost model, whatever it can hold. A `!`
marks a plan that needs more memory than a device has: its time is only computed. The others are those of
`experiments/baselines.py`. Rows are kept in a CSV file, and those that are there are not made again; the figure is
drawn from it (extra `experiments`).
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import models
from experiments.baselines import BEST, REWRITTEN, SEARCH, alone, columns, joint, others, padded_program, program_of
from experiments.made_by import PLANNED
from experiments.rows import Row, Rows
from unity_jax.machine.family import machine_of
from unity_jax.text import seconds, size

RESULTS = Path(__file__).parents[1] / "results" / "sweep.csv"
SETTINGS = ("model", "size", "machine", "devices", "batch", "batch on one")
CODE = (*PLANNED, *(f"experiments/tables/mesh_sweep.py:{name}" for name in ("measure", "_one")))
OTHERS = ("data parallel", "fsdp", "megatron")
"""What is drawn beside the plan."""
ALL = (*OTHERS, BEST, REWRITTEN, SEARCH)


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
    plan = joint(program, on)
    row = columns("chosen", plan, limit)
    row["mesh"], row["order"] = str(plan.mesh), " ".join(map(str, plan.mesh.order))
    row["exposed seconds"] = plan.timeline.exposed_communication_seconds
    row["rewrites"] = len(plan.program.rewrites)
    row["one device seconds"] = _one(model, size, machine, batch_of_one)
    row["speed-up"] = speed_up(batch, plan.seconds, batch_of_one, row["one device seconds"])
    row["efficiency"] = row["speed-up"] / devices
    stored = padded_program(model, size, devices, batch_size=batch)
    for name, found in others(program, on, plan, stored=stored).items():
        row |= columns(name, found, limit)
    return row


@functools.cache
def _one(model: str, size: str, machine: str, batch: int) -> float:
    return alone(program_of(model, size, batch_size=batch), machine_of(machine, 1)).seconds


def table(rows: Sequence[Row], title: str) -> Table:
    head = ("devices", "batch", "mesh", "plan", "step", "exposed", "memory", "speed-up", "efficiency", *ALL)
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
            *(_step(row, name) for name in ALL),
        )
    return made


def _step(row: Row, name: str) -> str:
    if not row.get(f"{name} seconds"):
        return ""
    return seconds(float(row[f"{name} seconds"])) + "!" * (row[f"{name} fits"] != "True")


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Step time and efficiency against devices, of the chosen plans and of the experts; hollow where it does not fit.

    As wide as a README shows it, 800 px, at twice the resolution.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, PercentFormatter

    figure = Figure(figsize=(8, 3.4), dpi=200, layout="constrained")
    time, efficiency = figure.subplots(1, 2)
    for name, color, marker in zip(("chosen", *OTHERS), ("C3", "C0", "C1", "C2"), "osD^", strict=True):
        made = [row for row in rows if row.get(f"{name} seconds")]
        devices, steps = [int(row["devices"]) for row in made], [float(row[f"{name} seconds"]) for row in made]
        shares = [_efficiency(row, step) for row, step in zip(made, steps, strict=True)]
        hollow = [i for i, row in enumerate(made) if row[f"{name} fits"] != "True"]
        front = 5 if name == "chosen" else 3
        for axes, values in ((time, steps), (efficiency, shares)):
            axes.plot(devices, values, color=color, marker=marker, label=name, zorder=front)
            over = [devices[i] for i in hollow], [values[i] for i in hollow]
            axes.plot(*over, color=color, marker=marker, markerfacecolor="white", linestyle="", zorder=front)
    every = [int(row["devices"]) for row in rows]
    for axes, label in ((time, "seconds per step"), (efficiency, "speed-up over one device, per device")):
        axes.set(xscale="log", xlabel="devices", title=label)
        axes.set_xticks(every, [str(n) for n in every])
        axes.grid(alpha=0.3)
    time.set_yscale("log")
    for axes in (time, efficiency):
        axes.minorticks_off()
    time.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    time.yaxis.set_major_formatter("{x:g}")
    efficiency.yaxis.set_major_formatter(PercentFormatter(1))
    efficiency.set_ylim(bottom=0)
    efficiency.legend(loc="lower left")
    figure.suptitle(title + " (hollow: more memory than there is)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _efficiency(row: Row, step_seconds: float) -> float:
    one = int(row["batch on one"]), float(row["one device seconds"])
    return speed_up(int(row["batch"]), step_seconds, *one) / int(row["devices"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt", choices=models.names())
    parser.add_argument("--size", default="full", help="one of the model's sizes")
    parser.add_argument("--machine", default="v5p", help="v5e, v5p, h100, v100-summit, ..., or a machine file (.json)")
    parser.add_argument("--devices", default="8,16,32,64", help="how many, separated by commas")
    parser.add_argument("--batch", type=int, help="examples in a step, whatever the devices; default: the model's own")
    parser.add_argument("--batch-per-device", type=int, help="instead: so many for each device (weak scaling)")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    parser.add_argument("--stale", action="store_true", help="make again what another version of the code made")
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
    rows, wanted = Rows(options.out, SETTINGS, CODE), []
    for n in sizes:
        batch, one = batches(fixed, options.batch_per_device, n)
        wanted.append(dict(zip(SETTINGS, (options.model, options.size, options.machine, n, batch, one), strict=True)))
    rows.make_all(rows.missing(wanted, options.stale), lambda w: measure(*w.values()), "{devices} devices")
    shown = rows.made(wanted)
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
