"""Whether the cost model ranks plans as a judge of the compiled programs does (`experiments/validation/judge/`).

    python -m experiments.validation.ranking --compile                # make what is missing, then read
    python -m experiments.validation.ranking --models bert,mlp --on h100:8 --candidates
    python -m experiments.validation.ranking --programs validation    # their four plans of the corpus `compiled`

Candidates of each tuning program: the planner's choice, every expert and eight seeded random plans at least on GPUs,
and every expert on one mesh axis on TPUs, where a plan takes the compiler minutes; all that are compiled by
`compiled.py` (its corpus `ranking`). Of a validation program: the planner's choice and the three experts that are
compiled of it anyway. The predicted and the judged seconds of a step must have a Spearman correlation of at least 0.95
within each tuning program, and the planner's choice must be judged within 3 % of the best candidate. The exit code
tells. Printed beside: the correlation over the experts alone, since random plans lie far apart and are easy to tell
apart; and how much faster than data parallelism the choice is, as predicted and as judged. A plan that the compiler did
not compile is missing, and a row that misses one is incomplete.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import spearmanr

from experiments.rows import Row, Rows
from experiments.validation.compiled import COMPILED, FOUR, RANKING, Corpus, arguments, asked, set_of
from unity_jax.errors import PlanError
from unity_jax.machine.machine import Machine
from unity_jax.text import seconds

RESULTS = Path(__file__).parents[1] / "results" / "judged.csv"
SETTINGS = ("model", "topology")
WANTED = {"gpu": ("all", 8), "tpu": ("chosen,dp,zero1,fsdp,tp,tp+sp", 0)}
"""Of each compiler, which plans of a tuning program are candidates, and how many random ones."""
CORRELATION, NEAR_BEST = 0.95, 1.03


@dataclass(frozen=True)
class Candidate:
    """A plan, and the seconds of a step: predicted, and judged from its compiled program."""

    label: str
    predicted: float
    judged: float


@dataclass(frozen=True)
class Ranking:
    """The candidates of a model on a topology, and by label what the compiler said of those that it did not compile."""

    model: str
    topology: str
    candidates: list[Candidate]
    failed: dict[str, str]

    @property
    def complete(self) -> bool:
        """Whether all candidates were compiled; the random ones are the last that are made."""
        labels = [c.label for c in self.candidates]
        if set_of(self.model) == "validation":
            return set(FOUR) <= set(labels)
        _, wanted = candidates_on(self.topology)
        randoms = sum(label.startswith("random") for label in labels)
        return not self.failed and set(FOUR) <= set(labels) and randoms >= wanted

    @property
    def correlation(self) -> float:
        return correlation(self.candidates)

    @property
    def experts(self) -> list[Candidate]:
        """The candidates that a person might have written."""
        return [c for c in self.candidates if c.label != "chosen" and not c.label.startswith("random")]

    @property
    def chosen_over_best(self) -> float:
        """The planner's choice against the best candidate, as judged."""
        chosen = [c.judged for c in self.candidates if c.label == "chosen"]
        return min(chosen, default=float("inf")) / min((c.judged for c in self.candidates), default=float("nan"))

    @property
    def speed_up(self) -> tuple[float, float]:
        """Over data parallelism: of the planner's choice as predicted, and as judged."""
        of = {c.label: c for c in self.candidates}
        if not {"chosen", "dp"} <= of.keys():
            return float("nan"), float("nan")
        return of["dp"].predicted / of["chosen"].predicted, of["dp"].judged / of["chosen"].judged

    @property
    def passes(self) -> bool:
        near = self.chosen_over_best <= NEAR_BEST
        return self.complete and near and (set_of(self.model) == "validation" or self.correlation >= CORRELATION)


def correlation(candidates: Sequence[Candidate]) -> float:
    """Spearman's, of predicted and judged seconds; not a number of fewer than three."""
    if len(candidates) < 3:
        return float("nan")
    return float(spearmanr([c.predicted for c in candidates], [c.judged for c in candidates]).statistic)


def corpus_of(model: str) -> Corpus:
    """Where the candidates of a program are."""
    return RANKING if set_of(model) == "tuning" else COMPILED


def ranking(model: str, topology: str, corpus: Corpus | None = None) -> Ranking:
    corpus = corpus or corpus_of(model)
    program, machine = corpus.program(model, topology), Machine.preset(topology)
    candidates: list[Candidate] = []
    failed: dict[str, str] = {}
    for case in track(corpus.cases([model], [topology]), f"{model} on {topology}", transient=True):
        if "error" in case.facts:
            failed[case.label] = case.facts["error"]
            continue
        try:
            predicted = case.plan(program, machine).predicted.step_seconds
        except PlanError as error:  # the model or its tracing changed since
            failed[case.label] = str(error)
            continue
        candidates.append(Candidate(case.label, predicted, case.facts["judged"]))
    return Ranking(model, topology, sorted(candidates, key=lambda c: c.judged), failed)


def candidates_on(topology: str) -> tuple[str, int]:
    """Which plans of a tuning program are candidates on a topology, and how many random ones."""
    return WANTED[Machine.preset(topology).device.compiler]


def compile_missing(names: str, topologies: Sequence[str], limit: int) -> None:
    """All candidates, each in its folder."""
    for topology in topologies:
        plans, randoms = candidates_on(topology)
        what = ["--corpus", RANKING.name, "--plans", plans, "--random", str(randoms)]
        where = ["--models", names, "--on", topology, "--limit", str(limit)]
        subprocess.run([sys.executable, "-m", "experiments.validation.compiled", *where, *what], check=True)


def all_candidates(found: Ranking) -> Table:
    table = Table("plan", "predicted", "judged", "ratio", title=f"{found.model} on {found.topology}")
    for c in found.candidates:
        table.add_row(c.label, seconds(c.predicted), seconds(c.judged), f"{c.predicted / c.judged:.2f}")
    return table


def columns(found: Ranking) -> dict[str, Any]:
    """What the table says of a ranking."""
    predicted, judged = found.speed_up
    return {
        "candidates": len(found.candidates),
        "not compiled": len(found.failed),
        "Spearman": found.correlation,
        "Spearman of experts": correlation(found.experts),
        "chosen / best": found.chosen_over_best,
        "best": found.candidates[0].label,
        "dp / chosen predicted": predicted,
        "dp / chosen judged": judged,
        "passes": ("yes" if found.passes else "no") if found.complete else "incomplete",
    }


def table(rows: Sequence[Row]) -> Table:
    names = "candidates", "not compiled", "Spearman", "of experts", "chosen / best", "best", "dp / chosen", "passes"
    made = Table("set", "model", "topology", *names)
    for row in rows:
        times = [f"{_number(row[f'dp / chosen {how}'], 2)} {how}" for how in ("predicted", "judged")]
        speed_up = times if row["dp / chosen judged"] != "nan" else []
        numbers = (_number(row.get(name), 3) for name in ("Spearman", "Spearman of experts", "chosen / best"))
        made.add_row(
            set_of(row["model"]),
            row["model"],
            row["topology"],
            row["candidates"],
            row["not compiled"],
            *numbers,
            row["best"],
            ", ".join(speed_up),
            row["passes"],
        )
    return made


def _number(text: str | None, digits: int) -> str:
    return f"{float(text):.{digits}f}" if text and text != "nan" else ""


def main() -> None:
    parser = arguments(__doc__, RESULTS)
    parser.add_argument("--compile", action="store_true", help="make what is missing first")
    parser.add_argument("--limit", type=int, default=0, help="seconds that the compiler may take for a plan")
    parser.add_argument("--candidates", action="store_true", help="print every candidate")
    names, topologies = asked(options := parser.parse_args())
    if options.compile and (tuning := [name for name in names if set_of(name) == "tuning"]):
        compile_missing(",".join(tuning), topologies, options.limit)
    console = Console(width=140)
    found = [ranking(name, on) for on in topologies for name in names]
    rows = Rows(options.out, SETTINGS)
    for r in found:
        if r.candidates:
            rows.put({"model": r.model, "topology": r.topology}, columns(r))
        if options.candidates:
            console.print(all_candidates(r))
    console.print(table(rows.made([{"model": r.model, "topology": r.topology} for r in found])))
    for r in found:
        for label, error in r.failed.items():
            console.print(f"{r.model} on {r.topology}, {label}: {error}", markup=False, highlight=False)
    sys.exit(not all(r.passes for r in found))


if __name__ == "__main__":
    main()
