"""Train steps under limits of memory, measured on one GPU beside what was predicted: each way of saving memory, alone.

    python -m experiments.validation.limits_on_gpu                            # behind `on_gpu`, on the same machine
    python -m experiments.validation.limits_on_gpu --models bert --parts 0.6  # some of it

The steps are those of `gpu.csv` on a device of this kind, at their batch; a limit is a part of what their plan was
predicted to need. Each runs by chunks, by microbatches, by recomputation, with state on the host, each alone, and by
whatever the planner chooses. Which of them is fastest depends on prices of what a step without a limit does not do:
small kernels in loops, slices, sums that are carried, values computed again. Rows go to `gpu_limits.csv`; a row that is
there stays.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.rows import Row, Rows
from experiments.validation.on_gpu import CODE, RESULTS, Session, console
from unity_jax.text import seconds, size

LIMITS = "gpu_limits.csv"
SETTINGS = ("on", "model", "size", "part", "by")
BY = ("any", "chunks", "microbatches", "recomputation", "host")
MODELS, PARTS = "bert,gpt,vit,transformer", "0.6,0.4"


def measure(session: Session, rows: Rows, step: Row, part: float, by: str) -> None:
    """One row."""
    settings = {**{name: step[name] for name in ("on", "model", "size")}, "part": part, "by": by}
    row: dict[str, Any] = {**(rows.get(settings) or {})}
    if row.get("plan seconds") or row.get("plan error", "").startswith("ValueError"):
        return
    changes = {k: ast.literal_eval(v) for k, v in (c.split("=") for c in step["changes"].split())}
    task = {"way": "plan", "model": step["model"], "size": step["size"], "changes": changes, "by": by, "memory": 0}
    task |= {"batch": int(step["batch"]), "limit": part * float(step["predicted bytes"]), "part": 1.0}
    task |= {"profile": str(session.options.out / step["profile"]), "ready": str(session.ready)}

    def hear(found: dict[str, Any]) -> None:
        found.pop("held", None)
        row.update(found)
        with session.writing:
            rows.put(settings, row)

    hear({"limit": task["limit"], "without": step["plan seconds"], "needs": step["plan peak bytes"]})
    failure = session.child({**task, "lock": str(session.lock)}, hear)
    if failure:
        hear({"plan error": failure})
    took = seconds(float(row["plan seconds"])) if row.get("plan seconds") else "not measured"
    console.print(f"{step['model']} {part} by {by}: {failure or took}")


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="Steps under a limit, by each way alone; in brackets, predicted over measured")
    for column in ("model", "limit", "by", "seconds", "of the step without", "peak", "what is done"):
        shown.add_column(column, overflow="fold")
    for row in rows:
        cells = ["", "", ""]
        if row.get("plan seconds"):
            took, peak = float(row["plan seconds"]), float(row["plan peak bytes"] or row["plan compiled bytes"])
            cells[0] = f"{seconds(took)} ({float(row['predicted seconds']) / took:.2f})"
            cells[1] = f"{took / float(row['without']):.2f}"
            cells[2] = f"{size(peak)} ({float(row['predicted bytes']) / peak:.2f})"
            cells[2] += "!" * (peak > float(row["limit"]))
        limit = f"{size(float(row['limit']))} ({row['part']})"
        shown.add_row(row["model"], limit, row["by"], *cells, row.get("saving") or row.get("plan error", ""))
    return shown


def verdict(rows: Sequence[Row]) -> str:
    ran = [r for r in rows if r.get("plan seconds")]
    kept = sum(float(r["plan peak bytes"] or r["plan compiled bytes"]) <= float(r["limit"]) for r in ran)
    picked = [r for r in ran if r["by"] == BY[0]]
    times = [(f"{r['model']} at {r['part']}", float(r["plan seconds"]) / float(r["without"])) for r in picked]
    chosen = ", ".join(f"{name} {ratio:.2f}" for name, ratio in times)
    off = [float(r["predicted seconds"]) / float(r["plan seconds"]) for r in ran]
    return (
        f"{', '.join(dict.fromkeys(r['on'] for r in rows))}: {len(ran)} of {len(rows)} limits have a plan, {kept} of "
        f"which stay within it; as the planner chooses, times the step without a limit: {chosen}; predicted over "
        f"measured seconds median {statistics.median(off):.2f}, {min(off):.2f} to {max(off):.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--parts", default=PARTS, help="limits, as parts of what a step needs")
    parser.add_argument("--by", default=",".join(BY), help="ways of saving memory")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all of it (default: nine minutes)")
    parser.add_argument("--workers", type=int, default=4, help="how many plan at once")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where rows are and go")
    options = parser.parse_args()
    options.small = False
    begun, rows = time.monotonic(), Rows(options.out / LIMITS, SETTINGS, CODE)
    with tempfile.TemporaryDirectory() as work:
        session = Session(options, Path(work))
        session.ready.touch()
        steps = [r for r in session.rows.found if r["model"] in options.models.split(",") and r.get("plan seconds")]
        ways = itertools.product(map(float, options.parts.split(",")), steps, options.by.split(","))
        with ThreadPoolExecutor(options.workers) as pool:
            for end in [pool.submit(measure, session, rows, step, part, by) for part, step, by in ways]:
                end.result()
    console.print(table(rows.found))
    console.print(f"{len(rows.found)} rows in {rows.path}, {time.monotonic() - begun:.0f} s of {options.budget:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
