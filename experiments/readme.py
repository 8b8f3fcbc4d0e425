"""Writes what the rows in `experiments/results/` say into the README, and all of their tables into a page beside them.

    python -m experiments.readme            # after any of the scripts has made rows
    python -m experiments.readme --check    # whether both are as the rows say

The README's section `Results` and `experiments/results/README.md` are made here and nowhere else.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

import models
from experiments.baselines import BEST, REWRITTEN
from experiments.made_by import COMPILED, ROOT
from experiments.rows import Row, Rows
from experiments.summaries import middle, ratios
from experiments.tables import (
    ablation,
    expert_plans,
    iopddl,
    measured,
    mesh_sweep,
    rules_used,
    together,
    unity_table,
    zoo_table,
)
from experiments.validation import against_jit, agreement, confirmed, limits, on_gpu, ranking
from experiments.validation.compiled import SETS, TOPOLOGIES

RESULTS = ROOT / "experiments" / "results"
README, PAGE, FIGURE = ROOT / "README.md", RESULTS / "README.md", RESULTS / "sweep.png"
BEGIN, END = "<!-- made by experiments/readme.py -->\n", "<!-- end -->\n"
COMMAND = re.compile(r"^    (python -m experiments\.\S+.*?)(?:  +#.*)?$", re.MULTILINE)

WORDS = """\
Each ratio says how many times as fast a predicted step of our plan is as one of a baseline, as a geometric mean, with
the median and the number of plans behind it; a plan that needs more memory than a device has is left out. The baselines
run the same program on the same machine, priced by the same cost model:

* *data parallelism*: each device has all weights and a part of the batch, as `jax.jit` does with the batch sharded;
* *the best expert*: the best of data parallelism, ZeRO-1, FSDP, Megatron, split tables and products of two of them, on
  every mesh of the machine;
* *the best expert on the rewritten program*: the same where an expert also writes by hand all that our rewrites do
  (among them updates of only those rows of a table that were read, a vocabulary projection of only the masked
  positions);
* *the search without rewrites*: our own planner on the program as it is written;
* *rewriting before parallelizing*: rewritten for one device, then parallelized; *joint* is our plan, which does both
  together.

Where programs are compiled for a machine that is not there, a step is *judged* by what the compiler made of it: the
cycles that XLA:TPU estimates, a roofline of each kernel of XLA:GPU, and the collectives in their order
(`experiments/validation/judge/`). Seven *tuning* programs served to make the cost model, fifteen *validation* programs
only to measure it. *Rank correlation* (Spearman's) is 1 where predicted and judged order of the plans are the same.

A row is *stale* if another version of the code made it: the command with `--stale`, or
`experiments.validation.compiled` with `--again` where it reads compiled programs, makes it again.
"""
"""What a reader has to know to read the tables."""

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
    lost = sum(r["expert fits"] != "True" for r in rows)
    return (
        f"{len(rows)} published plans, {lost} of which do not fit here (people run them with recomputation and "
        f"offload, which are not planned yet); where both fit, times as fast: {middle(fit)}; ours is slower than "
        f"{worse}"
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
        "The solver on published problems",
        iopddl,
        "iopddl.csv",
        iopddl.verdict,
        lambda rows: [iopddl.table(rows)],
        iopddl.CODE,
    ),
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
    Section("What a GPU reaches", on_gpu, "calibration.csv", on_gpu.best, on_gpu.reached, on_gpu.MEASURING),
)


def lead(rows: Sequence[Row]) -> str:
    """The zoo in a few sentences."""
    said = []
    for on in dict.fromkeys(r["machine"] for r in rows):
        here = [r for r in rows if r["machine"] == on]
        middles = [statistics.median(q for _, q in ratios(here, "plan", name)) for name in (BEST, REWRITTEN)]
        of = {f: [q for r, q in ratios(here, "plan", BEST) if models.family(r["model"]) == f] for f in models.FAMILIES}
        means = {family: statistics.geometric_mean(found) for family, found in of.items() if found}
        most = max(means, key=lambda family: means[family])
        little = [family for family, mean in means.items() if mean < LITTLE]
        none = f", and next to nothing on {' and '.join(little)} models" if little else ""
        said.append(
            f"On `{on}` the plan of the median model is {middles[0]:.2f} times as fast as the best that an expert "
            f"would run, and {middles[1]:.2f} times where that expert also writes all our rewrites by hand. It gains "
            f"most on {most} ({means[most]:.2f}, geometric mean){none}."
        )
    return textwrap.fill(" ".join(said), 120, break_long_words=False, break_on_hyphens=False) + "\n"


LITTLE = 1.03
"""A gain that is called next to nothing."""


def summary() -> str:
    """The README's section."""
    zoo_rows, unity_rows, *_ = (section.rows for section in SECTIONS)
    first = [*zoo_table.families(zoo_rows), unity_table.paper(unity_rows)]
    lines = [lead(zoo_rows), WORDS, *map(as_markdown, first)]
    lines += ["| What | Result | Rows | Command |", "|---|---|---|---|"]
    for section in SECTIONS:
        if rows := section.rows:
            old = len(section.stale(rows))
            many = f"{len(rows)}, {old} stale" if old else f"{len(rows)}"
            lines.append(f"| {section.title} | {section.summary(rows)} | {many} | `{section.command}` |")
    if FIGURE.exists():
        lines += ["", f"![Seconds of a step, and speed-up for each device, by devices]({FIGURE.relative_to(ROOT)})"]
    return "\n".join(lines) + "\n"


def page() -> str:
    """All tables."""
    parts = ["# Results\n\nMade by `python -m experiments.readme` from the rows in this folder.\n"]
    for section in SECTIONS:
        if not (rows := section.rows):
            continue
        parts.append(f"## {section.title}\n\n`{section.command}`\n\n{freshness(section, rows)}\n")
        parts += [as_markdown(t) if isinstance(t, Table) else f"{t}\n" for t in section.tables(rows)]
    return "\n".join(parts)


def freshness(section: Section, rows: Sequence[Row]) -> str:
    """How many rows another version of the code made, and which, by the settings that say what they are about."""
    stale = section.stale(rows)
    if not stale:
        return "All rows are of this version of the code."
    fresh = [r for r in rows if r not in stale]
    named, only = (fresh, "all but ") if len(fresh) < len(stale) else (stale, "")
    which = f": {only}{'; '.join(about(row, section.script.SETTINGS) for row in named)}" if named else ""
    return f"**{len(stale)} of {len(rows)} rows are stale**, made by another version of the code{which}."


def about(row: Row, settings: Sequence[str]) -> str:
    """What a row is about, in a few words."""
    left_out = "source", "batch per device", "batch on one"
    return " ".join(row[name] for name in settings if name in row and name not in left_out)


def as_markdown(table: Table) -> str:
    """A table as GitHub reads it."""
    title, caption = table.title, table.caption
    table.box, table.title, table.caption, table.padding = MARKDOWN, None, None, (0, 1)
    for column in table.columns:
        column.no_wrap = True
    text = io.StringIO()
    Console(file=text, width=2000, color_system=None).print(table)
    lines = [line.strip() for line in text.getvalue().splitlines() if line.strip()]
    head = [f"**{title}**" + f" ({caption})" * bool(caption), ""] if title else []
    return "\n".join([*head, *lines]) + "\n"


def put(text: str, made: str) -> str:
    """A text with what is between its marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{README} has no section between {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + made + END + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; the exit code tells")
    options = parser.parse_args()
    wanted = {README: put(README.read_text(), summary()), PAGE: page()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'not as the rows say' if options.check else 'written'}")
        if not options.check:
            path.write_text(wanted[path])
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
