"""The tables of results: which script makes each, and what its rows say in a sentence."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from rich.table import Table

from experiments.made_by import COMPILED, ROOT
from experiments.rows import Row, Rows
from experiments.summaries import middle, ratios
from experiments.tables import (
    ablation,
    bags,
    ecornn,
    expert_plans,
    hidet,
    iopddl,
    kernels,
    long_sequences,
    measured,
    mesh_sweep,
    mist,
    passes,
    recurrent,
    rows,
    rules_used,
    together,
    tuning,
    unity_table,
    zoo_table,
)
from experiments.validation import against_jit, agreement, batches, confirmed, limits, limits_on_gpu, on_gpu, ranking
from experiments.validation.compiled import SETS, TOPOLOGIES

RESULTS = ROOT / "experiments" / "results"
COMMAND = re.compile(r"^    (python -m experiments\.\S+.*?)(?:  +#.*)?$", re.MULTILINE)

Summary = Callable[[Sequence[Row]], str]
Tables = Callable[[Sequence[Row]], Sequence[Table | str]]


@dataclass(frozen=True)
class Section:
    """The rows of one script.

    **Fields:** `title`; `script`; `file`: of the rows; `summary`: a sentence or two for the README; `tables`:
    all of it, for the page; `code`: what the rows follow from.
    """

    title: str
    script: ModuleType
    file: str
    summary: Summary
    tables: Tables
    code: tuple[str, ...] = COMPILED

    @property
    def file_rows(self) -> Rows:
        return Rows(RESULTS / self.file, (), self.code)

    @property
    def rows(self) -> list[Row]:
        return self.file_rows.found

    def stale(self, rows: Sequence[Row]) -> list[Row]:
        """Those that another version of the code made."""
        return list(filter(self.file_rows.is_stale, rows))

    @property
    def command(self) -> str:
        """The first one that the script's docstring has."""
        found = COMMAND.search(self.script.__doc__ or "")
        assert found is not None
        return found[1]


def zoo(rows: Sequence[Row]) -> str:
    said = []
    for on in dict.fromkeys(r["machine"] for r in rows):
        here = [r for r in rows if r["machine"] == on]
        times = against(here, "plan", zoo_table.AGAINST)
        said.append(f"{on}, {len({r['model'] for r in here})} models, times as fast as {times}")
    return ". ".join(said)


def against(rows: Sequence[Row], ours: str, others: Mapping[str, str]) -> str:
    """How many times as fast as each of the others, in words."""
    found = ((text, [q for _, q in ratios(rows, ours, name)]) for name, text in others.items())
    return ", ".join(f"{text}: {middle(qs)}" for text, qs in found if qs)


def unity(rows: Sequence[Row]) -> str:
    return f"times as fast as {against(rows, 'joint', unity_table.AGAINST)}"


def experts(rows: Sequence[Row]) -> str:
    fit = [expert_plans.ratio(r) for r in rows if r["expert fits"] == r["plan fits"] == "True"]
    worse = sum(map(expert_plans.is_worse, rows))
    lost, mine = (sum(r[f"{who} fits"] != "True" for r in rows) for who in ("expert", "plan"))
    return (
        f"{len(rows)} published plans with what they compute again and accumulate, {lost} of which do not fit "
        f"here; ours does not fit for {mine}; where both fit, times as fast: {middle(fit)}; ours is slower than {worse}"
    )


def judged(rows: Sequence[Row]) -> str:
    said = []
    for name, members in reversed(SETS.items()):
        some = [r for r in rows if r["model"] in members]
        whole = [r for r in some if r["passes"] != "incomplete"]
        spearman = [float(r["Spearman"]) for r in whole]
        experts = [float(r["Spearman of experts"]) for r in whole if r["Spearman of experts"] not in ("", "nan")]
        best = [float(r["chosen / best"]) for r in whole]
        of = f"{name} programs: {len(whole)} of {len(members) * len(TOPOLOGIES)} settings are compiled in full"
        if whole:
            alone = f" (over the experts alone {_range(experts)})" if experts else ""
            of += (
                f", rank correlation {_range(spearman)}{alone}, the planner's choice takes "
                f"{min(best):.2f} to {max(best):.2f} times as long as the best candidate"
            )
        said.append(of)
    return "; ".join(said)


def _range(numbers: Sequence[float]) -> str:
    return f"{min(numbers):.2f} to {max(numbers):.2f}, median {statistics.median(numbers):.2f}"


def sweep(rows: Sequence[Row]) -> str:
    row = max(rows, key=lambda r: int(r["devices"]))
    faster = [
        min(others) / float(r["chosen seconds"])
        for r in rows
        if r["chosen fits"] == "True"
        and (others := [float(r[f"{o} seconds"]) for o in mesh_sweep.OTHERS if r[f"{o} fits"] == "True"])
    ]
    efficiency = statistics.median(float(r["efficiency"]) for r in rows)
    return (
        f"{row['model']} {row['size']} on {rows[0]['devices']} to {row['devices']} devices of {row['machine']}: times "
        f"as fast as the best of data parallelism, FSDP and Megatron where they fit: {middle(faster)}; examples per "
        f"second and device, of those of one device with memory for all: median {efficiency:.0%}"
    )


def wall(rows: Sequence[Row]) -> str:
    each = ", ".join(f"{r['model']} {float(r['plan ratio']):.2f} (FSDP {float(r['fsdp ratio']):.2f})" for r in rows)
    return f"seconds of our step over those of data parallelism, {rows[0]['devices']} {rows[0]['kind']}: {each}"


def rules(rows: Sequence[Row]) -> str:
    found = rules_used.used(rows)
    programs = sum(bool(r["rules"]) for r in rows)
    return f"{len(found)} rules fire, in {programs} of {len(rows)} plans of {len({r['model'] for r in rows})} models"


def planning(rows: Sequence[Row]) -> str:
    pairs = [(r["machine"], r["layers"]) for r in rows]
    last = [r for r in rows if (r["machine"], r["layers"]) == pairs[-1] and r["planning seconds"]]
    each = ", ".join(f"{r['reuse']} {float(r['planning seconds']):.1f} s" for r in last)
    return f"BERT-Large with {pairs[-1][1]} layers on {pairs[-1][0]}: {each}"


def by_machine(table: Callable[[Sequence[Row], str], Table]) -> Tables:
    """A table of each machine, or kind of machine."""

    def tables(rows: Sequence[Row]) -> list[Table | str]:
        return [table([r for r in rows if r["machine"] == on], on) for on in dict.fromkeys(r["machine"] for r in rows)]

    return tables


SECTIONS = (
    Section(
        "The models at published sizes, against what experts would run",
        zoo_table,
        "zoo.csv",
        zoo,
        lambda rows: [*by_machine(zoo_table.table)(rows), *zoo_table.said(rows)],
        zoo_table.CODE,
    ),
    Section(
        "Unity's evaluation",
        unity_table,
        "unity.csv",
        unity,
        unity_table.told,
        unity_table.CODE,
    ),
    Section(
        "Published plans of MaxText, Megatron and Mist",
        expert_plans,
        "expert_plans.csv",
        experts,
        lambda rows: [expert_plans.table(rows)],
        expert_plans.CODE,
    ),
    Section(
        "Mist's ablation, GPT on L4",
        mist,
        "mist.csv",
        mist.verdict,
        lambda rows: [mist.table(rows)],
        mist.CODE,
    ),
    Section(
        "More devices",
        mesh_sweep,
        "sweep.csv",
        sweep,
        lambda rows: [mesh_sweep.table(rows, f"{rows[0]['model']} {rows[0]['size']} on {rows[0]['machine']}")],
        mesh_sweep.CODE,
    ),
    Section(
        "Predicted memory and compute, against XLA:GPU and XLA:TPU",
        agreement,
        "agreement.csv",
        agreement.verdict,
        lambda rows: [agreement.table(rows), agreement.verdict(rows)],
    ),
    Section(
        "What each imitated pass of the compilers is worth",
        passes,
        "passes.csv",
        passes.verdict,
        lambda rows: [passes.table(rows, on) for on in dict.fromkeys(r["topology"] for r in rows)],
        passes.CODE,
    ),
    Section(
        "Predicted order of plans, against the compiled programs",
        ranking,
        "judged.csv",
        judged,
        lambda rows: [ranking.table(rows)],
    ),
    Section(
        "Predicted gains, against the compiled programs",
        confirmed,
        "confirmed.csv",
        confirmed.verdict,
        lambda rows: [confirmed.table(rows), confirmed.verdict(rows)],
    ),
    Section(
        "Our compiled programs beside those of plain jax.jit",
        against_jit,
        "against_jit.csv",
        against_jit.verdict,
        lambda rows: [against_jit.table(rows), against_jit.verdict(rows)],
    ),
    Section(
        "Rewriting together with or before parallelizing, against the compiled programs",
        together,
        "together.csv",
        together.verdict,
        lambda rows: [together.table(rows), together.verdict(rows)],
    ),
    Section(
        "Memory limits that compiled programs keep",
        limits,
        "limits.csv",
        limits.verdict,
        lambda rows: [limits.table(rows), limits.verdict(rows)],
    ),
    Section(
        "Twice the batch in the same memory, as Tempo",
        batches,
        "batches.csv",
        batches.verdict,
        lambda rows: [batches.table(rows), batches.verdict(rows)],
    ),
    Section(
        "The solver on published problems",
        iopddl,
        "iopddl.csv",
        iopddl.verdict,
        lambda rows: [iopddl.table(rows)],
        iopddl.CODE,
    ),
    Section(
        "Attention on TPUs, by the schedules of its kernels",
        kernels,
        "kernels.csv",
        kernels.verdict,
        lambda rows: [kernels.table(rows)],
        kernels.CODE,
    ),
    Section(
        "Whole steps with attention by kernels, compiled and judged",
        long_sequences,
        "long_sequences.csv",
        long_sequences.verdict,
        lambda rows: [long_sequences.table(rows)],
        long_sequences.CODE,
    ),
    Section(
        "Recurrent layers on TPUs, by the schedules of their kernels",
        recurrent,
        "recurrent.csv",
        recurrent.verdict,
        lambda rows: [recurrent.table(rows)],
        recurrent.CODE,
    ),
    Section(
        "Rows of split tables on TPUs, by the schedules of their kernels",
        rows,
        "rows.csv",
        rows.verdict,
        lambda found: [rows.table(found)],
        rows.CODE,
    ),
    Section(
        "Bags of rows on TPUs, by the schedules of their kernels",
        bags,
        "bags.csv",
        bags.verdict,
        lambda rows: [bags.table(rows)],
        bags.CODE,
    ),
    Section(
        "EcoRNN's language model, published and ours", ecornn, "ecornn.csv", ecornn.verdict, ecornn.told, ecornn.CODE
    ),
    Section("Hidet's models and our kernels", hidet, "hidet.csv", hidet.verdict, hidet.told, hidet.CODE),
    Section("Tuning kernels, beside Hidet", tuning, "tuning.csv", tuning.verdict, tuning.told, tuning.CODE),
    Section("Measured, tiny models", measured, "measured.csv", wall, lambda rows: [measured.table(rows)]),
    Section(
        "Rewrites in the plans", rules_used, "zoo.csv", rules, lambda rows: [rules_used.table(rows)], zoo_table.CODE
    ),
    Section(
        "What reuse saves of planning",
        ablation,
        "ablation.csv",
        planning,
        lambda rows: [ablation.table(rows)],
        ablation.CODE,
    ),
    Section("Predicted and measured on a GPU", on_gpu, "gpu.csv", on_gpu.verdict, on_gpu.tables, on_gpu.CODE),
    Section(
        "Ways of saving memory, measured on a GPU",
        limits_on_gpu,
        "gpu_limits.csv",
        limits_on_gpu.verdict,
        lambda rows: [limits_on_gpu.table(rows)],
        limits_on_gpu.CODE,
    ),
    Section("What a GPU reaches", on_gpu, "calibration.csv", on_gpu.best, on_gpu.reached, on_gpu.MEASURING),
)
