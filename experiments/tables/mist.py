"""What partial checkpointing and offload are worth on L4, as in Mist's ablation (EuroSys 25, section 6.4).

    python -m experiments.tables.mist
    python -m experiments.tables.mist --sizes gpt3-1.3b

GPT of 2,048 tokens on two or four L4, the batches of Mist's tuned plans, layers scanned or, as Mist's are, unrolled.
Each step is planned

    planner              as it ships
    all layers alike     what is computed again is so in all layers or in none
    no offload           the state is on the devices all the time
    neither
    checkpoints          every layer is computed again, as the program is written; all layers alike, no offload

What partial checkpointing is worth is told by *no offload* beside *checkpoints*, what finer choices than layers are by
*neither* beside these, and offload by *no offload* beside the planner.

Mist's own plans have two or four pipeline stages here; `measured` is what its steps took
(https://github.com/Dazz993/Mist/tree/d69e530/benchmark/mist/tuned_configs/l4-24gb/gpt). It says that partial
checkpointing made its plans 1.12 times as fast, and offload 1.07 times.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from experiments.baselines import columns, program_of
from experiments.made_by import PLANNED
from experiments.rows import Row, Rows
from unity_jax.machine.machine import Machine
from unity_jax.rewrite.library import searched
from unity_jax.search import joint
from unity_jax.search.candidate import NO_PINS
from unity_jax.search.options import SearchOptions
from unity_jax.search.placement import mesh_candidates
from unity_jax.text import seconds, size

RESULTS = Path(__file__).parents[1] / "results" / "mist.csv"
SETTINGS = ("size", "machine", "batch", "layers", "without")
CODE = (*PLANNED, *(f"experiments/tables/mist.py:{name}" for name in ("measure", "without", "OFF")))

CASES = tuple(
    (*case, layers, took)
    for case, took in ((("gpt3-1.3b", "l4:2", 32), 9.6776), (("gpt3-2.7b", "l4:4", 64), 21.5082))
    for layers in ("scanned", "unrolled")
)
"""Size, machine, batch, how layers are written, and the seconds that Mist's step took."""

ALIKE, RESIDENT = "all layers alike", "no offload"
OFF: Mapping[str, Sequence[str]] = {
    ALIKE: ("unity_jax.search.recomputing.by_layers", "unity_jax.search.in_layers.by_layers"),
    RESIDENT: tuple(
        f"unity_jax.search.{name}"
        for name in ("saving.hostable", "saving.stacks", "saving.spillable", "recomputing.spillable")
    ),
}
"""What finds plans with each."""
WITHOUT: Mapping[str, Sequence[str]] = {
    "planner": (),
    ALIKE: (ALIKE,),
    RESIDENT: (RESIDENT,),
    "neither": (ALIKE, RESIDENT),
    "checkpoints": (ALIKE, RESIDENT),
}


@contextlib.contextmanager
def without(ways: Sequence[str]) -> Iterator[None]:
    """While some ways to need less memory find nothing."""
    with contextlib.ExitStack() as stack:
        for name in (name for way in ways for name in OFF[way]):
            stack.enter_context(patch(name, lambda *_: ()))
        yield


def measure(what: Mapping[str, Any]) -> dict[str, Any]:
    """One row."""
    machine = Machine.preset(what["machine"])
    scan = what["layers"] == "scanned"
    program = program_of("gpt", what["size"], length=2048, batch_size=int(what["batch"]), scan=scan)
    options = SearchOptions(checkpoint="keep" if what["without"] == "checkpoints" else "choose")
    meshes, limit = mesh_candidates(machine.num_devices, machine), machine.device.memory_bytes
    start = time.perf_counter()
    with without(WITHOUT[what["without"]]):
        found = joint.plan(program, machine, limit, NO_PINS, meshes, searched(), options)
    took = time.perf_counter() - start
    saves = "; ".join(map(str, found.program.savings))
    return columns("plan", found, limit) | {"planning seconds": took, "saves": saves}


def table(rows: Sequence[Row]) -> Table:
    shown = Table("model", "machine", "batch", "layers", "", "step", "of the planner's", "memory", "saves memory by")
    for *case, mist in CASES:
        mine = _of(case, rows)
        best = float(mine["planner"]["plan seconds"]) if "planner" in mine else None
        for row in mine.values():
            took, fits = float(row["plan seconds"]), row["plan fits"] == "True"
            times = f"{took / best:.3f}" if best else ""
            memory = size(float(row["plan bytes"])) + "!" * (not fits)
            shown.add_row(*(row[name] for name in SETTINGS), seconds(took), times, memory, row["saves"])
        shown.add_row(*map(str, case), "Mist, measured", seconds(mist), f"{mist / best:.3f}" if best else "")
    return shown


def _of(case: Sequence[Any], rows: Sequence[Row]) -> dict[str, Row]:
    """The rows of a case, by what they are without."""
    settings = SETTINGS[:-1]
    return {row["without"]: row for row in rows if [row[name] for name in settings] == [*map(str, case)]}


def verdict(rows: Sequence[Row]) -> str:
    """What each way is worth, in a sentence."""
    told = list[str]()
    for *case, _ in CASES:
        took = {way: float(row["plan seconds"]) for way, row in _of(case, rows).items()}
        if len(took) == len(WITHOUT):
            planner, resident, checkpoints = (took[way] for way in ("planner", RESIDENT, "checkpoints"))
            worth = f"{checkpoints / resident:.3f} and {resident / planner:.3f}"
            told.append(f"{worth} ({case[0]} on {case[1]}, {case[3]})")
    return f"times as fast by partial checkpointing, and by offload besides (Mist: 1.12 and 1.07): {', '.join(told)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=sorted({case[0] for case in CASES}))
    parser.add_argument("--stale", action="store_true", help="make again what another version of the code made")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    options = parser.parse_args()
    rows = Rows(options.out, SETTINGS, CODE)
    wanted = [
        dict(zip(SETTINGS, (*case[:4], way), strict=True))
        for case in CASES
        for way in WITHOUT
        if case[0] in options.sizes
    ]
    rows.make_all(rows.missing(wanted, options.stale), measure, "{size} on {machine}, {without}")
    Console(width=150, highlight=False).print(table(rows.made(wanted)))


if __name__ == "__main__":
    main()
