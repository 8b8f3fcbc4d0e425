"""Published parallel plans of experts beside the planner's: same model, machine and batch, under one cost model.

    python -m experiments.tables.expert_plans                            # hours; rows are made once, and kept
    python -m experiments.tables.expert_plans --on v5p:4x4x4 --rows 1    # minutes

`experiments/data/expert_plans.csv` has what was published and where: the sizes of the axes for data, FSDP, tensor and
context (sequence) parallelism, of those plans that need no pipeline, for models of the zoo; which values of a layer are
computed again in the backward pass (`models._layers.Remat`); and over how many microbatches gradients are accumulated.
Layers are scanned, in the expert's program and in ours, or unrolled in both where none of them is computed again.
The slices v5p-128 and v5p-1024 have two cores per chip. Mist's plans are its tuner's answers of one stage. What is not
taken over: quantization; slices joined by a data-center network. What MaxText keeps on the host (`offloads`) is there,
where a policy keeps just that; or it is computed again, but layers' inputs, which stay on the device, of more
microbatches if they do not fit else: the faster way counts. Where the published run has flash attention, the expert's
plan runs attention by a kernel, or it and the loss by chunks if it does not fit else; where it still does not, what
costs little is computed again, as Mist's layers, which are PyTorch's, do not keep it. These stand-ins are in the column
`expert saves`.

An expert's plan is completed to every operation as in `unity_jax/search/experts.py`, with and without splitting
activations between tensor-parallel blocks, with plain data parallelism or ZeRO-1, and on every mesh of its sizes; the
best that fits counts; beside it the same on the program as the planner rewrites it. With context parallelism, which no
such expert has, its layouts are pins: the batch is split over both axes, and so is the state; the planner decides the
rest. Seconds of planning are those of the processor. The exit code tells whether the planner's plan is never slower.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

os.environ["JAX_PLATFORMS"] = "cpu"

from rich.console import Console
from rich.table import Table

import models
from experiments.baselines import REWRITTEN, SEARCH, columns, joint, program_of, unrewritten
from experiments.made_by import PLANNED
from experiments.rows import Row, Rows
from experiments.summaries import over
from models._layers import Remat
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.residuals.change import at
from unity_jax.residuals.pair import stacked
from unity_jax.residuals.record import Microbatch, Recompute, Spill
from unity_jax.search import chunking
from unity_jax.search.batch import batch_arguments
from unity_jax.search.candidate import NO_PINS, Candidate, Pins, best, finish
from unity_jax.search.experts import Expert, expert_seeds
from unity_jax.search.fold import folded
from unity_jax.search.following import followed
from unity_jax.search.hosting import spillable, stack_bytes
from unity_jax.search.implementing import implemented
from unity_jax.search.options import SearchOptions
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner
from unity_jax.search.recomputing import recomputable
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.saving import PASSES
from unity_jax.search.unfold import unfolded
from unity_jax.text import seconds, size

EXPERIMENTS = Path(__file__).parents[1]
RESULTS = EXPERIMENTS / "results" / "expert_plans.csv"
AXES = ("data", "fsdp", "tensor", "context")
SETTINGS = ("model", "size", "length", "vocabulary", "machine", "batch", *AXES, "remat", "accumulates")
OWN = (
    "measure",
    "sizes_of",
    "expert_plan",
    "completed",
    "spilled",
    "cheap",
    "as_published",
    "is_scanned",
    "follow",
    "experts_plans",
    "pinned",
    "KEPT",
)
LAYERS_INPUTS = "decoder_layer_input"
KEPT = {
    frozenset(["qkv_proj"]): "save_qkv_proj",
    frozenset(["query_proj", "key_proj", "value_proj"]): "save_qkv_proj",
    frozenset(["query_proj", "key_proj", "value_proj", "out_proj"]): "save_dot_except_mlp",
}
"""The policies that keep what is on the host, besides layers' inputs."""
CODE = (*PLANNED, *(f"experiments/tables/expert_plans.py:{name}" for name in OWN))


def published() -> list[Mapping[str, str]]:
    """The plans as they were published."""
    with (EXPERIMENTS / "data" / "expert_plans.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def measure(what: Mapping[str, str]) -> dict[str, Any]:
    """One row: the expert's plan and ours."""
    machine = Machine.preset(what["machine"])
    program = program_of(what["model"], what["size"], **sizes_of(what), scan=is_scanned(what))
    limit = machine.device.memory_bytes
    start = time.process_time()
    found = joint(program, machine)
    took = time.process_time() - start
    sizes = {a: int(what[a]) for a in AXES}
    expert = expert_plan(what, machine)
    on_rewritten = experts_plans(found.program, machine, sizes) if found.program.rewrites else ()
    row: dict[str, Any] = {"devices": machine.num_devices, "planning seconds": took}
    row |= columns("expert", expert, limit) | columns("plan", found, limit)
    row |= columns(REWRITTEN, best([expert, *on_rewritten], limit), limit)
    row |= columns(SEARCH, unrewritten(program, machine, found), limit)
    row["plan plan"] = f"{found.label} on {found.mesh}"
    row["expert saves"] = "; ".join(map(str, expert.program.savings))
    row["saves"] = "; ".join(map(str, found.program.savings))
    row["rewrites"] = "; ".join(f"{r.rule} x {r.count}" for r in found.program.rewrites)
    return row


def sizes_of(what: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a model's Config that were published."""
    found = {"length": int(what["length"]), "batch_size": int(what["batch"])}
    return found | ({"vocabulary": int(what["vocabulary"])} if what["vocabulary"] else {})


def expert_plan(what: Mapping[str, str], machine: Machine) -> Candidate:
    """The best of the complete plans that a published one may stand for. Where none fits, stand-ins are given to what
    it has and they have not, until some do: chunks for fused attention, more microbatches for layers' inputs on the
    host, cheap values computed again for those that its framework does not keep."""
    names = what["offloads"].split()
    found, policy = [completed(what, machine)], KEPT.get(frozenset(names) - {LAYERS_INPUTS})
    if what["flash"] and not found[0].program.implementations:
        found.append(completed(what, machine, attention="kernel"))
    if policy is not None:
        kept = completed({**what, "remat": policy, "offloads": ""}, machine, hosts=True, inputs=LAYERS_INPUTS in names)
        found.append(kept)
    return best(found, machine.device.memory_bytes)


def completed(
    what: Mapping[str, str],
    machine: Machine,
    hosts: bool = False,
    inputs: bool = False,
    attention: Literal["choose", "kernel"] = "choose",
) -> Candidate:
    """The best of the complete plans.

    **Arguments:** `hosts`: what layers keep is on the host; `inputs`: that they are given, too; `attention`: see
    `SearchOptions`.
    """
    sizes, limit = {a: int(what[a]) for a in AXES}, machine.device.memory_bytes
    whole = as_published(what)
    if sizes["context"] == 1:  # kernels do not split positions
        whole = implemented(whole, machine, SearchOptions(attention=attention))
    layers = folded(whole, NO_PINS)
    program = whole if layers is None else layers.program
    rows, few = int(what["batch"]) // (sizes["data"] * sizes["fsdp"]), int(what["accumulates"])
    most = rows if LAYERS_INPUTS in what["offloads"].split() else few
    arguments = batch_arguments(program, RuleCache(), machine.num_devices)
    at_once = {(c.seconds, c.memory.peak_bytes): c for c in experts_plans(program, machine, sizes)}.values()
    plans = list[Candidate]()
    for parts in (n for n in range(few, most + 1) if rows % n == 0):
        how = Microbatch(arguments, parts, int(what["batch"]))
        made = list(at_once) if parts == 1 else [followed(plan, [how], follow) for plan in at_once]
        made = [followed(plan, [spilled(plan, inputs)], follow) for plan in made] if hosts else made
        plans += made
        if not best(plans, limit).fits(limit):
            fewer = [c for plan in made for c in chunking.by_chunks(plan, limit, follow) if c is not plan]
            made, plans = made + fewer, plans + fewer
        if not best(plans, limit).fits(limit):
            plans += [followed(plan, [how], follow) for plan in made for how in cheap(plan)]
        if best(plans, limit).fits(limit):
            break
    chosen = best(plans, limit)
    return chosen if layers is None else unfolded([(whole, layers)], chosen, math.inf, NO_PINS, ())


def spilled(plan: Candidate, inputs: bool) -> Spill:
    """What layers of a plan stack, on the host; with what they are given (`inputs`), which comes first, or without."""
    given, *_, every = spillable(plan)
    graph, rest = plan.program.graph, [place for place in every.values if inputs or place not in given.values]
    makers = stacked(graph)
    stacks = {t: makers[t] for t in at(graph, rest)}
    return Spill.of(graph, stacks, stack_bytes(plan), plan.machine.device.host_bandwidth)


def cheap(plan: Candidate) -> list[Recompute]:
    """All that a plan can compute again within what a few passes through memory take: what PyTorch, whose operations
    keep what they are given and no more, does not keep of a layer, and what JAX does."""
    rate, every = plan.machine.device.memory_bandwidth / PASSES, recomputable(plan)
    return [how for how in every if how.bytes >= rate * how.seconds][-1:]


def follow(plan: Candidate, program: Program, like: Mapping[Tensor, Tensor]) -> Candidate:
    """The plan of a variant of a program that does the same."""
    return Planner(program, plan.machine).as_decided(plan, like)


def as_published(what: Mapping[str, str]) -> Program:
    """The program of a published plan by what its layers compute again. If those are some, the others' weights are cut
    out of the stacked ones."""
    remat: Remat = {"full": True, "none": False}.get(what["remat"], what["remat"])
    remat = int(remat) if isinstance(remat, str) and remat.isdigit() else remat
    return program_of(what["model"], what["size"], **sizes_of(what), remat=remat, scan=is_scanned(what))


def is_scanned(what: Mapping[str, str]) -> bool:
    """Whether layers are a loop over stacked weights, in the expert's program and in ours."""
    return what["remat"] != "0"


def experts_plans(program: Program, machine: Machine, sizes: Mapping[str, int]) -> Iterator[Candidate]:
    """The complete plans that an expert's axes may stand for."""
    outer, inner = sizes["data"] * sizes["fsdp"], sizes["tensor"] * sizes["context"]
    if min(sizes["data"], sizes["fsdp"]) > 1 or min(sizes["tensor"], sizes["context"]) > 1:
        raise ValueError(f"more than two axes: {sizes}")
    wanted = (outer, inner) if inner > 1 else (outer,)
    for mesh in mesh_candidates(machine.num_devices, machine):
        if mesh.sizes != wanted:
            continue
        if sizes["context"] > 1:
            yield Planner(program, machine, None, pinned(program, mesh)).plan([mesh])
            continue
        planner = Planner(program, machine)
        outer_axes, model = mesh.names[:1], mesh.names[1:]
        shards = [(True, True)] if sizes["fsdp"] > 1 else [(False, False), (False, True)]  # or nothing, or ZeRO-1
        between = (False, True) if model else (False,)
        styles = [Expert(outer_axes, model, *s, sequence) for s in shards for sequence in between]
        builder = planner._builder(mesh)
        for keep in (True, False):
            built = builder.build(keep)
            for name, seed in expert_seeds(program, built, mesh, planner.rules, styles).items():
                yield finish(program, built.decisions(seed, keep), builder.resharder, planner.rules, name)


def pinned(program: Program, mesh: MeshAxes) -> Pins:
    """Context parallelism: sequences over the outer axis, positions over the inner one, the state over both: whole
    parameters are gathered of it, once or again (Megatron's distributed optimizer has float32 masters so)."""
    outer, inner = mesh.names
    state = {program.graph.inputs[i] for i in program.ties.values()}
    pins: dict[Any, Layout] = {}
    for t in program.graph.inputs:
        if t not in state and t.rank == 2:
            pins[t] = Layout(((outer,), (inner,)))
        elif t in state and (dims := [d for d, n in enumerate(t.shape) if n % mesh.num_devices == 0]):
            widest = max(dims, key=lambda d: t.shape[d])
            pins[t] = Layout(tuple((outer, inner) if d == widest else () for d in range(t.rank)))
    return Pins(pins, {})


def ratio(row: Row) -> float:
    """How many times as fast as the expert's plan ours is."""
    return float(row["expert seconds"]) / float(row["plan seconds"])


def is_worse(row: Row) -> bool:
    """Whether the expert's plan fits and is faster than ours, or ours does not fit."""
    return row["expert fits"] == "True" and (row["plan fits"] != "True" or ratio(row) < 1 - 1e-6)


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="Experts' published plans and ours; ! does not fit", caption="context parallelism by pins")
    for column in (
        "model",
        "machine",
        "batch",
        "expert",
        "expert's step",
        "memory",
        "our step",
        "memory",
        "ratio",
        "expert, rewritten",
        "search",
        "ours",
        "saves memory by",
    ):
        shown.add_column(column, overflow="fold")
    for row in rows:
        axes = " x ".join(f"{a}={row[a]}" for a in AXES if row[a] != "1") + f", remat {row['remat']}"
        axes += f", {row['accumulates']} microbatches" * (row["accumulates"] != "1")
        cells: list[str] = []
        for who in ("expert", "plan"):
            cells.append(seconds(float(row[f"{who} seconds"])) + "!" * (row[f"{who} fits"] != "True"))
            cells.append(size(int(float(row[f"{who} bytes"]))))
        where = f"{row['machine']} ({row['devices']})"
        model = f"{row['model']} {row['size']}, {row['length']}"
        cells += [over(row, "plan", "expert", 3), *_half(row), row["plan plan"], row["saves"]]
        shown.add_row(model, where, row["batch"], axes, *cells)
    return shown


def _half(row: Row) -> list[str]:
    """Seconds of the expert's plan of the rewritten program, and of ours without rewrites."""
    found = (row.get(f"{name} seconds") for name in (REWRITTEN, SEARCH))
    return [seconds(float(text)) if text else "" for text in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="comma-separated (default: all that the zoo has)")
    parser.add_argument("--on", help="comma-separated machines (default: all)")
    parser.add_argument("--rows", type=int, help="make at most so many")
    parser.add_argument("--stale", action="store_true", help="make again what another version of the code made")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    options = parser.parse_args()
    chosen = options.models.split(",") if options.models else models.names()
    wanted = [
        p for p in published() if p["model"] in chosen and (not options.on or p["machine"] in options.on.split(","))
    ]
    rows = Rows(options.out, SETTINGS, CODE)
    rows.make_all(rows.missing(wanted, options.stale)[: options.rows], measure, "{model} {size} on {machine}")
    found = rows.made(wanted)
    console = Console(width=150, highlight=False)
    console.print(table(found))
    worse = [f"{r['model']} {r['size']} on {r['machine']} ({ratio(r):.3f})" for r in found if is_worse(r)]
    console.print(f"{len(found)} of {len(wanted)} rows; slower than the expert: {', '.join(worse) or 'never'}")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
