"""Writes what the rows in `experiments/results/` say into the README, and all of their tables into a page beside them.

    python experiments/readme.py            # after any of the scripts has made rows
    python experiments/readme.py --check    # whether both are as the rows say

The README's section `Results` and `experiments/results/README.md` are made here and nowhere else.
"""

from __future__ import annotations

import argparse
import io
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ablation
import agreement
import confirmed
import expert_plans
import measured
import mesh_sweep
import ranking
import rules_used
import together
import unity_table
import zoo_table
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rows import Row, Rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
README, PAGE, FIGURE = ROOT / "README.md", RESULTS / "README.md", RESULTS / "sweep.png"
BEGIN, END = "<!-- made by experiments/readme.py -->\n", "<!-- end -->\n"
COMMAND = re.compile(r"^    (python experiments/\S+.*?)(?:  +#.*)?$", re.MULTILINE)

Summary = Callable[[Sequence[Row]], str]
Tables = Callable[[Sequence[Row]], Sequence[Table | str]]


@dataclass(frozen=True)
class Section:
    """The rows of one script.

    **Fields:** `title`; `script`: its name; `file`: of the rows; `summary`: a sentence or two for the README; `tables`:
    all of it, for the page.
    """

    title: str
    script: str
    file: str
    summary: Summary
    tables: Tables

    @property
    def rows(self) -> list[Row]:
        return Rows(RESULTS / self.file, ()).found

    @property
    def command(self) -> str:
        """The first one that the script's docstring has."""
        found = COMMAND.search((ROOT / "experiments" / f"{self.script}.py").read_text())
        assert found is not None
        return found[1]


def span(ratios: Sequence[float]) -> str:
    """Geometric mean and range."""
    if not ratios:
        return "nothing to compare"
    return f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} plans)"


def zoo(rows: Sequence[Row]) -> str:
    said = []
    for on in dict.fromkeys(r["machine"] for r in rows):
        here = [r for r in rows if r["machine"] == on]
        each = []
        for name, text in (("data parallel", "data parallelism"), (zoo_table.BEST, "the best expert")):
            both = [r for r in here if r[f"{name} fits"] == r["plan fits"] == "True"]
            each.append(f"{span([zoo_table.over(r, name) for r in both])} over {text}")
        said.append(f"{on}, {len({r['model'] for r in here})} models: {'; '.join(each)}")
    return ". ".join(said)


def unity(rows: Sequence[Row]) -> str:
    summit = [r for r in rows if r["machine"].startswith("v100-summit")]
    ratios = unity_table.most(summit, lambda r: unity_table.over(r, "additive"))
    published = {m: unity_table.CASES[m].published for m in ratios}
    each = ", ".join(f"{m} {ratio:.2f}" + f" ({published[m]})" * bool(published[m]) for m, ratio in ratios.items())
    fair = [r for r in rows if unity_table.comparable(r, "expert")]
    stronger = span([unity_table.over(r, "expert") for r in fair])
    return f"most over data parallelism as the paper counts it (published): {each}; over the best expert {stronger}"


def experts(rows: Sequence[Row]) -> str:
    fit = [expert_plans.ratio(r) for r in rows if r["expert fits"] == r["plan fits"] == "True"]
    worse = sum(map(expert_plans.is_worse, rows))
    return f"{len(rows)} plans; ours is slower in {worse}; where the expert's fits, as fast by {span(fit)}"


def judged(rows: Sequence[Row]) -> str:
    whole = [r for r in rows if r["passes"] != "incomplete"]
    spearman = [float(r["Spearman"]) for r in whole]
    best = [float(r["chosen / best"]) for r in whole]
    if not whole:
        return f"{len(rows)} begun, none complete"
    return (
        f"{len(whole)} of {len(rows)} complete: Spearman correlation {min(spearman):.3f} to {max(spearman):.3f}, the "
        f"planner's choice {min(best):.2f} to {max(best):.2f} times the best candidate's time"
    )


def sweep(rows: Sequence[Row]) -> str:
    row = max(rows, key=lambda r: int(r["devices"]))
    fits = [r for r in rows if r["chosen fits"] == "True"]
    others = [min(float(r[f"{o} seconds"]) for o in mesh_sweep.OTHERS if r[f"{o} fits"] == "True") for r in fits]
    ratios = [other / float(r["chosen seconds"]) for other, r in zip(others, fits, strict=True)]
    return (
        f"{row['model']} {row['size']} on {row['machine']}: speed-up {float(row['speed-up']):.0f} on {row['devices']} "
        f"devices; over the best of the three experts {span(ratios)}"
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
        "zoo_table",
        "zoo.csv",
        zoo,
        lambda rows: [*by_machine(zoo_table.table)(rows), *zoo_table.means(rows)],
    ),
    Section(
        "Unity's evaluation",
        "unity_table",
        "unity.csv",
        unity,
        lambda rows: [unity_table.table(rows, "Unity's models"), *unity_table.verdicts(rows)],
    ),
    Section(
        "Published plans of MaxText, Megatron and Mist",
        "expert_plans",
        "expert_plans.csv",
        experts,
        lambda rows: [expert_plans.table(rows)],
    ),
    Section(
        "More devices",
        "mesh_sweep",
        "sweep.csv",
        sweep,
        lambda rows: [mesh_sweep.table(rows, f"{rows[0]['model']} {rows[0]['size']} on {rows[0]['machine']}")],
    ),
    Section(
        "Predicted memory and compute, against XLA:GPU and XLA:TPU",
        "agreement",
        "agreement.csv",
        agreement.verdict,
        lambda rows: [agreement.table(rows), agreement.verdict(rows)],
    ),
    Section(
        "Predicted order of plans, against the compiled programs",
        "ranking",
        "judged.csv",
        judged,
        lambda rows: [ranking.table(rows)],
    ),
    Section(
        "Predicted gains, against the compiled programs",
        "confirmed",
        "confirmed.csv",
        confirmed.verdict,
        lambda rows: [confirmed.table(rows), confirmed.verdict(rows)],
    ),
    Section(
        "Rewriting together with or before parallelizing, against the compiled programs",
        "together",
        "together.csv",
        together.verdict,
        lambda rows: [together.table(rows), together.verdict(rows)],
    ),
    Section("Measured, tiny models", "measured", "measured.csv", wall, lambda rows: [measured.table(rows)]),
    Section("Rewrites in the plans", "rules_used", "zoo.csv", rules, lambda rows: [rules_used.table(rows)]),
    Section("What reuse saves of planning", "ablation", "ablation.csv", planning, lambda rows: [ablation.table(rows)]),
)


def summary() -> str:
    """The README's section."""
    lines = ["| What | Result | Command |", "|---|---|---|"]
    for section in SECTIONS:
        if rows := section.rows:
            lines.append(f"| {section.title} | {section.summary(rows)} | `{section.command}` |")
    if FIGURE.exists():
        lines += ["", f"![Seconds of a step, and speed-up for each device, by devices]({FIGURE.relative_to(ROOT)})"]
    return "\n".join(lines) + "\n"


def page() -> str:
    """All tables."""
    parts = ["# Results\n\nMade by `python experiments/readme.py` from the rows in this folder.\n"]
    for section in SECTIONS:
        if not (rows := section.rows):
            continue
        parts.append(f"## {section.title}\n\n`{section.command}`\n")
        parts += [as_markdown(t) if isinstance(t, Table) else f"{t}\n" for t in section.tables(rows)]
    return "\n".join(parts)


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
