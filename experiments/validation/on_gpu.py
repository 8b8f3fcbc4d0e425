"""Predicted and measured seconds and bytes of train steps on one device: a command for a machine with one GPU.

    python -m experiments.validation.on_gpu              # nine minutes, without a network
    python -m experiments.validation.on_gpu --models gpt,resnet --budget 300
    JAX_PLATFORMS=cpu python -m experiments.validation.on_gpu --small --models mlp,gpt
    python -m experiments.validation.on_gpu --predict    # no GPU: what was measured, predicted as it is now

It needs JAX with its GPU plugin, numpy, scipy and rich, flax and optax for the models, and matplotlib for nothing; this
package need not be installed. First the device is calibrated (matmuls by shape and dtype, memory, host link, overlap of
copies and compute; a profile that is there from an earlier run is used again). Then each model's train step, with its
own optimizer, is planned for the device at a batch that makes the predicted peak 60 to 80 % of its memory, or of a part
of it (`Case.part`), predicted with the constants of the preset and of the calibration, compiled, and timed; at last the
same steps under plain `jax.jit`. Each has a process of its own, which has the device to itself while it compiles and
runs; meanwhile others plan.

Rows are written as soon as there is something in them, to `gpu.csv` and `calibration.csv` in the folder of results. Run
again, it does what is missing; delete a row to measure it again. What the budget leaves no time for is left out, and
named at the end. `--small`: tiny models that fill 8 MiB; their rows go to a folder of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.made_by import PLANNED, ROOT
from experiments.rows import Row, Rows
from unity_jax.text import seconds, size

RESULTS = ROOT / "experiments" / "results"
STEPS, CALIBRATION = "gpu.csv", "calibration.csv"
SETTINGS = ("on", "model", "size")
CODE = PLANNED
"""Predictions follow from it; what was measured of a step was measured."""
MEASURING = ("unity_jax/calibration/measure.py", "unity_jax/calibration/overlap.py")
"""Of a calibration."""
CHILD = "experiments.validation.one_step"
console = Console(width=150, highlight=False, markup=False)


@dataclass(frozen=True)
class Case:
    """A model: its size, what is changed of it, and the batch to begin with, which fills an H200; of `--small`, too.

    **Fields:** `part`: of the memory, where a step that fills all of it is not to be measured: kernels of convolutions
    are tried for too long, or no room is left beside the state for what XLA takes in one piece.
    """

    size: str
    batch: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    small: int = 16
    part: float = 1.0


CASES = {
    "gpt": Case("gpt3-6.7b", 8, {"layers": 24}),
    "llama": Case("llama3.2-3b", 16, {"length": 2048}),
    "bert": Case("full", 288, {"layers": 6}),
    "transformer": Case("full", 1280),
    "mlp": Case("full", 294_912, small=1024),
    "vit": Case("full", 192, {"remat": False}),
    "moe": Case("8x7b", 2, {"layers": 3}),
    "t5": Case("v1.1-xxl", 64, {"layers": 20}),
    "lstm_lm": Case("full", 11_776),
    "dlrm": Case("terabyte", 2_621_440, part=0.75),
    "unet": Case("full", 16, part=0.09),
    "resnet": Case("full", 256, part=0.1),
}
"""Deep models are cut to layers that fit with their optimizer: large weights fill the memory at a short step.
Convolutions come last: XLA:GPU tries out kernels for over two minutes before it has compiled a ResNet of batch 2304."""

SMALL_MEMORY = 8 * 2**20
MARGIN = 5.0
"""Seconds of the budget that are kept for the table."""

FIRST, LIMIT = 25.0, 120.0
"""Seconds that a step needs of the device, as long as none has been measured, and that it may have it at most."""


class Session:
    """Processes until a deadline, and the rows that come of them."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.deadline = time.monotonic() + options.budget - MARGIN
        self.held: list[float] = []  # seconds that each step had the device
        self.left_out: list[str] = []
        self.on = ""
        self.profile = ""
        self.rows = Rows(options.out / STEPS, SETTINGS, CODE)
        self.samples = Rows(options.out / CALIBRATION, ("on", "what", "of", "bytes"), MEASURING)
        self.writing = threading.Lock()
        self.known = threading.Event()  # which device it is
        self.ready, self.lock = work / "ready", work / "lock"

    def child(self, task: Mapping[str, Any], hear: Callable[[dict[str, Any]], None], part: float = 1.0) -> str:
        """Run a process, for at most a part of the time that is left, handing on what it says. Returns why it failed,
        in a line; nothing if it did not."""
        until = (1 - part) * time.monotonic() + part * self.deadline
        log = self.work / f"{task['way']}-{task.get('model', '')}.log"
        given = os.environ.get("PYTHONPATH", "")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), given))),
            "UNITY_JAX_CACHE": "",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # processes that plan hold nothing
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
            "JAX_COMPILATION_CACHE_DIR": str(self.work / "cache"),  # both ways use the kernels that one of them tried
        }
        command = [sys.executable, "-m", CHILD, json.dumps({**task, "small": self.options.small})]
        pipes = {"stdout": subprocess.PIPE, "text": True, "env": environment}
        with log.open("w") as errors, subprocess.Popen(command, stderr=errors, **pipes) as process:
            stops = [threading.Timer(max(0.0, until - time.monotonic()), process.kill)]
            stops[0].start()
            assert process.stdout is not None
            for found in (json.loads(line) for line in process.stdout if line.startswith("{")):
                if found.pop("holds", False):
                    stops.append(threading.Timer(LIMIT, process.kill))
                    stops[1].start()
                hear(found)
            code = process.wait()
            for stop in stops:
                stop.cancel()
        if code == 0:
            return ""
        if code == -signal.SIGKILL:
            return "the time was up" if time.monotonic() >= until else f"killed (limit {LIMIT:.0f} s)"
        said = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        wrong = [line for line in said if "RESOURCE_EXHAUSTED" in line or "Error" in line.partition(":")[0]]
        return (wrong or said or [f"exit status {code}"])[-1][:300]

    def calibrate(self) -> None:
        def hear(found: dict[str, Any]) -> None:
            if "on" in found:
                self.on, self.profile = found["on"], found["profile"]
                self.known.set()
            else:
                with self.writing:
                    about = {"on": self.on, "what": found.pop("what"), "of": found.pop("of", "")}
                    self.samples.put({**about, "bytes": float(found.pop("bytes", 0.0))}, found)

        begun = time.monotonic()
        failure = self.child({"way": "calibrate", "folder": str(self.options.out)}, hear, part=0.4)
        if failure:
            self.left_out.append(f"calibration ({failure})")
        console.print(f"calibration: {failure or 'done'} ({time.monotonic() - begun:.0f} s)")
        self.ready.touch()
        self.known.set()

    def step(self, model: str, way: str, first: Future[None] | None = None) -> None:
        """One way of one model; `plain` jit follows the plan, whose batch it takes."""
        if first is not None:
            first.result()
        case = Case("tiny", CASES[model].small) if self.options.small else CASES[model]
        settings = {"on": self.on, "model": model, "size": case.size}
        with self.writing:
            known = self.rows.get(settings) or {}
        row: dict[str, Any] = {**known, "changes": " ".join(f"{k}={v}" for k, v in case.changes.items())}
        if row.get(f"{way} seconds"):
            return
        no_plan = way == "plain" and not row.get("batch")
        if no_plan or self.deadline - time.monotonic() < statistics.median(self.held or [FIRST]):
            self.left_out.append(f"{model} ({way}: {'no plan' if no_plan else 'no time'})")
            return

        def hear(found: dict[str, Any]) -> None:
            if "held" in found:
                self.held.append(found.pop("held"))
            row.update(found)
            with self.writing:
                self.rows.put(settings, row)

        task = {"way": way, "model": model, "size": case.size, "changes": dict(case.changes)}
        task |= {"batch": int(row["batch"]) if way == "plain" else case.batch, "part": case.part}
        task |= {"profile": self.profile}
        task |= {"memory": SMALL_MEMORY if self.options.small else 0, "ready": str(self.ready), "lock": str(self.lock)}
        row.pop(f"{way} error", None)
        failure = self.child(task, hear)
        if failure:
            hear({f"{way} error": failure})
            self.left_out.append(f"{model} ({way}: {failure})")
        done = seconds(float(row[f"{way} seconds"])) if row.get(f"{way} seconds") else "not measured"
        console.print(f"{model} {way}: batch {row.get('batch', '?')}, {failure or done}")

    def predict(self, wanted: Sequence[str]) -> None:
        """The predictions of the rows that there are of these models, made again. Needs no device."""
        for row in [dict(r) for r in self.rows.found if r["model"] in wanted]:
            task = {name: row.get(name, "") for name in (*SETTINGS, "batch", "profile")} | {"way": "predict"}
            task |= {
                "changes": dict(part.split("=") for part in row["changes"].split()),
                "folder": str(self.options.out),
            }
            failure = self.child(task, row.update)
            self.rows.put(row, row)
            console.print(f"{row['model']}: {failure or 'predicted'}")

    def all(self, wanted: Sequence[str]) -> None:
        """Calibrate, then every model as planned, then every model under plain jit."""
        calibrating = threading.Thread(target=self.calibrate)
        calibrating.start()
        self.known.wait()
        if self.on:
            with ThreadPoolExecutor(max_workers=max(1, min(4, (os.cpu_count() or 2) // 2))) as pool:
                plans = {m: pool.submit(self.step, m, "plan") for m in wanted}
                ends = [*plans.values(), *(pool.submit(self.step, m, "plain", plans[m]) for m in wanted)]
            for end in ends:
                end.result()
        calibrating.join()


# What the rows say


def ratio(row: Row, prediction: str, measured: str) -> float | None:
    """Predicted over measured, where both are there."""
    a, b = row.get(prediction), row.get(measured)
    return float(a) / float(b) if a and b else None


def table(rows: Sequence[Row], title: str = "") -> Table:
    shown = Table(title=title or "Seconds and peak bytes of a step; in brackets, predicted over measured")
    right = ("seconds", "by preset", "calibrated", "plain jit", "peak", "predicted", "compiled", "plain peak")
    for column in ("model", "batch", *right, "wrong"):
        shown.add_column(column, justify="right" if column in right else "left", overflow="fold")

    def cell(row: Row, name: str, measured: str, text: Callable[[float], str]) -> str:
        if not row.get(name):
            return ""
        part = ratio(row, name, measured) if measured else None
        return text(float(row[name])) + (f" ({part:.2f})" if part else "")

    for row in rows:
        wrong = "; ".join(f"{way}: {row[f'{way} error']}" for way in ("plan", "plain") if row.get(f"{way} error"))
        peak = "plan peak bytes" if row.get("plan peak bytes") else "plan compiled bytes"  # a CPU does not tell
        shown.add_row(
            f"{row['model']} ({row['size']}{', ' * bool(row['changes'])}{row['changes']})",
            row.get("batch", ""),
            cell(row, "plan seconds", "", seconds),
            cell(row, "predicted seconds", "plan seconds", seconds),
            cell(row, "calibrated seconds", "plan seconds", seconds),
            cell(row, "plain seconds", "", seconds),
            cell(row, "plan peak bytes", "", size),
            cell(row, "predicted bytes", peak, size),
            cell(row, "plan compiled bytes", peak, size),
            cell(row, "plain peak bytes", "", size),
            wrong,
        )
    return shown


def tables(rows: Sequence[Row]) -> list[Table | str]:
    """A table of each device."""
    kinds = dict.fromkeys(r["on"] for r in rows)
    return [table([r for r in rows if r["on"] == on], f"{on}; in brackets, predicted over measured") for on in kinds]


def verdict(rows: Sequence[Row]) -> str:
    """Medians of what was predicted over what was measured, of each device."""
    said = []
    for on in dict.fromkeys(r["on"] for r in rows):
        here = [r for r in rows if r["on"] == on]
        parts = []
        for what, name, measured in (
            ("seconds by the preset", "predicted seconds", "plan seconds"),
            ("seconds calibrated", "calibrated seconds", "plan seconds"),
            ("peak memory", "predicted bytes", "plan peak bytes"),
        ):
            if found := [x for r in here if (x := ratio(r, name, measured)) is not None]:
                span = f"median {statistics.median(found):.2f}, {min(found):.2f} to {max(found):.2f}"
                parts.append(f"{what} {span} of {len(found)} models")
        if both := [x for r in here if (x := ratio(r, "plan seconds", "plain seconds")) is not None]:
            parts.append(f"our step's seconds over plain jit's {statistics.median(both):.2f}")
        said.append(f"{on}, predicted over measured: {'; '.join(parts) or 'nothing measured yet'}")
    return ". ".join(said)


def reached(rows: Sequence[Row]) -> list[Table | str]:
    """What calibration measured of each device."""
    found: list[Table | str] = []
    for on in dict.fromkeys(r["on"] for r in rows):
        shown = Table(title=f"{on}: rates that were reached; two streams together, and each of them alone")
        for column in ("what", "of", "bytes", "seconds", "of the preset's rate", "per second", "alone"):
            shown.add_column(column)
        for row in (r for r in rows if r["on"] == on):
            part = f"{float(row['expected']) / float(row['seconds']):.2f}" if row.get("expected") else ""
            rates = [f"{float(row[r]):.3g} {r.split()[0]}" for r in RATES if row.get(r)]
            apart = [seconds(float(row[name])) for name in ("first", "second") if row.get(name)]
            nbytes = size(float(row["bytes"])) if float(row["bytes"]) else ""
            what = row["what"].replace("_", "-")
            shown.add_row(
                what, row["of"], nbytes, seconds(float(row["seconds"])), part, ", ".join(rates), ", ".join(apart)
            )
        found.append(shown)
    return found


RATES = ("flops per second", "bytes per second")


def best(rows: Sequence[Row]) -> str:
    """Of each device, the largest part of the preset's rate that any sample reached, by what was measured."""
    said = []
    for on in dict.fromkeys(r["on"] for r in rows):
        parts: dict[str, float] = {}
        for row in (r for r in rows if r["on"] == on and r.get("expected") and r["what"] != "launch"):
            dtype = f" {row['of'].partition('[')[0]}" if row["what"] == "matmul" else ""
            name = row["what"].replace("_", "-") + dtype
            parts[name] = max(parts.get(name, 0.0), float(row["expected"]) / float(row["seconds"]))
        said.append(f"{on}, of the preset's rates: " + ", ".join(f"{k} {v:.2f}" for k, v in parts.items()))
    return ". ".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all of it (default: nine minutes)")
    parser.add_argument("--small", action="store_true", help="tiny models, for a try on a CPU")
    parser.add_argument("--predict", action="store_true", help="only predict again what was measured; needs no GPU")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the rows go (default: experiments/results)")
    options = parser.parse_args()
    wanted = options.models.split(",")
    if unknown := [m for m in wanted if m not in CASES]:
        parser.error(f"argument --models: no {unknown[0]!r}; there are {', '.join(CASES)}")
    if options.out is None:
        options.out = Path(tempfile.mkdtemp(prefix="on_gpu_")) if options.small else RESULTS
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        session = Session(options, Path(work))
        if options.predict:
            session.predict(wanted)
            for shown in tables(session.rows.found):
                console.print(shown)
            console.print(verdict(session.rows.found))
            return 0
        session.all(wanted)
    if not session.on:
        console.print("no device could be used: " + "; ".join(session.left_out))
        return 1
    rows = [r for r in session.rows.found if r["on"] == session.on]
    console.print(best([r for r in session.samples.found if r["on"] == session.on]))
    console.print(table(rows))
    console.print(verdict(rows))
    console.print(f"left out: {'; '.join(session.left_out) or 'nothing'}")
    console.print(f"{len(rows)} rows in {session.rows.path}, {time.monotonic() - begun:.0f} s of {options.budget:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
