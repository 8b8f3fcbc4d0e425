"""How long planning takes and how much memory it needs, against depth and against model size.

    python experiments/planning_cost.py
    python experiments/planning_cost.py --depths 6 12

Every case runs in a process of its own, without the plan cache. Nothing is compiled or run: no accelerator is needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import models
import unity_jax as unity
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.report.text import seconds, size

BERT = "h100:8"
GPT = "h100:64x8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="*", default=[6, 12, 24, 48], help="BERT-Large with so many layers")
    parser.add_argument("--batch", type=int, default=128, help="its sequences")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a case is given up")
    parser.add_argument("--no-gpt", action="store_true", help="leave GPT-3 175B on 512 devices out")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # how this script calls itself
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(**json.loads(options.case))))
        return
    bert = {"model": "bert", "size": "full", "machine": BERT, "batch_size": options.batch}
    cases = [bert | {"layers": n} for n in options.depths]
    if not options.no_gpt:
        cases.append({"model": "gpt", "size": "gpt3-175b", "machine": GPT})
    console = Console(width=120)
    rows = Table("case", "machine", "ops", "trace", "plan", "in all", "memory", "mesh", "found by", "step")
    planning: dict[int, float] = {}
    for case in cases:
        name = f"{case['model']} {case['size']}" + (f", {case['layers']} layers" if "layers" in case else "")
        with console.status(f"planning {name} for {case['machine']} ..."):
            found = run(case, options.timeout)
        if isinstance(found, str):
            console.print(f"{name}: {found}")
            rows.add_row(name, case["machine"], found)
            continue
        console.print(f"{name}: {found['trace'] + found['plan']:.1f} s")
        if "layers" in case:
            planning[case["layers"]] = found["plan"]
        rows.add_row(
            name,
            case["machine"],
            f"{found['ops']:,}",
            f"{found['trace']:.1f} s",
            f"{found['plan']:.1f} s",
            f"{found['trace'] + found['plan']:.1f} s",
            size(found["memory"]),
            found["mesh"],
            found["label"],
            seconds(found["step"]) + ("" if found["fits"] else ", does not fit"),
        )
    console.print(rows)
    for a, b in itertools.pairwise(planning):
        times = planning[b] / planning[a]
        console.print(f"{a} -> {b} layers: planning, tracing left out, takes {times:.2f} times as long")


def run(case: dict[str, Any], timeout: float) -> dict[str, Any] | str:
    """Measure one case in a fresh process; or what went wrong there."""
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"over {timeout:.0f} s"
    return f"failed ({done.returncode})" if done.returncode else json.loads(done.stdout.splitlines()[-1])


def measure(model: str, size: str, machine: str, **overrides: Any) -> dict[str, Any]:
    """Seconds of tracing and of the rest of planning, and the peak memory of the process."""
    made = models.get(model, size, **overrides)
    args = made.abstract_state(), made.abstract_batch()
    options = unity.Options(cache=None)
    start = time.perf_counter()
    plan = unity.plan(made.train_step, *args, machine=machine, donate_argnums=0, options=options)
    total = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(made.train_step, donate_argnums=0).trace(*args)  # again and warm: planning is not made to look cheap
    traced = time.perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return {
        "trace": traced,
        "plan": total - traced,
        "memory": memory * unit,
        "ops": sum(1 for _ in plan.program.graph.walk()),
        "mesh": str(MeshAxes.of(plan.mesh)),
        "label": plan.label,
        "step": plan.predicted.step_seconds,
        "fits": plan.fits,
    }


if __name__ == "__main__":
    main()
