"""What merging siblings saves of a step, and what it costs that the weights are concatenated in every step.

    python -m experiments.tables.packed_state
    python -m experiments.tables.packed_state --on v5e:2x4,h100:8 --models bert

For each model, with few layers (BERT at its published widths): the predicted step as written; with queries, keys and
values (and gates with what they gate) merged where the search gains by it; and with the merged weights and their
moments held as one array each from step to step (`search.packing`), where that saves enough. The last columns are the
part of the merged step that packing saves, and how many arguments are held as how many arrays.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

import models
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.rewrite.library import applicable
from unity_jax.search import joint, packing
from unity_jax.search.candidate import NO_PINS
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner
from unity_jax.text import seconds

MERGING = [r for r in applicable() if r.name in ("concat-dot-siblings-sharing-one", "add-of-dots-to-dot-of-concats")]

SHORT = {"length": 128, "vocabulary": 1024}
HEADS = {"hidden": 1024, "heads": 16, "kv_heads": 4, "head_width": 64, "feed_forward": 1792}
CASES: dict[str, list[dict[str, Any]]] = {
    "bert": [{**SHORT, "layers": 2, "predictions": 20, "max_length": 128, "batch_size": n} for n in (8, 64, 512)],
    "moe": [{**SHORT, **HEADS, "layers": 1, "remat": False, "batch_size": n} for n in (8, 64)],
}
"""Sequences of 128 tokens; the smaller the batch, the more the weights and the kernels' starts weigh."""


def measured(name: str, sizes: dict[str, Any], machine: Machine) -> list[str]:
    """One row of the table."""
    model = models.get(name, **sizes)
    args = model.abstract_state(), model.abstract_batch()
    program = trace(model.train_step, args, {}, donate_argnums=0)
    meshes = mesh_candidates(machine.num_devices, machine)[:1]
    plain = Planner(program, machine).plan(meshes)
    merged = joint.plan(program, machine, machine.device.memory_bytes, NO_PINS, meshes, MERGING)
    held = packing.held(merged, machine.device.memory_bytes, NO_PINS)
    steps = [seconds(x.seconds) for x in (plain, merged, held)]
    count = sum(len(p.inputs) for p in held.program.packed)
    return [
        *steps,
        f"{1 - merged.seconds / plain.seconds:.1%}",
        f"{1 - held.seconds / merged.seconds:.1%}",
        f"{count} as {len(held.program.packed)}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="h100:8", help="machines (default: %(default)s)")
    parser.add_argument("--models", default=",".join(CASES), help="models (default: %(default)s)")
    given = parser.parse_args()
    table = Table(
        "model", "batch", "machine", "as written", "merged", "packed", "merging saves", "packing saves", "held"
    )
    for preset in given.on.split(","):
        machine = Machine.preset(preset)
        for name in given.models.split(","):
            for sizes in CASES[name]:
                table.add_row(name, str(sizes["batch_size"]), preset, *measured(name, sizes, machine))
    Console().print(table)


if __name__ == "__main__":
    main()
