"""Writes what the rows in `experiments/results/` say into the README, and all of their tables into a page beside them.

    python -m experiments.readme            # after any of the scripts has made rows
    python -m experiments.readme --check    # whether both are as the rows say

The README's section `Results` and `experiments/results/README.md` are made here and nowhere else.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import textwrap
from collections.abc import Sequence

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

import models
from experiments.baselines import BEST, REWRITTEN
from experiments.made_by import ROOT
from experiments.rows import Row
from experiments.sections import RESULTS, SECTIONS, Section
from experiments.summaries import ratios
from experiments.tables import unity_table, zoo_table
from experiments.validation.compiled import SETS

README, PAGE, FIGURE = ROOT / "README.md", RESULTS / "README.md", RESULTS / "sweep.png"
BEGIN, END = "<!-- made by experiments/readme.py -->\n", "<!-- end -->\n"

WORDS = f"""\
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
(`experiments/validation/judge/`). {len(SETS["tuning"])} *tuning* programs served to make the cost model.
{len(SETS["validation"])} *validation* programs measure it: no constant is chosen by them, and what they show of a
compiler is followed where its source says so, as `mesh_graph_net` of scatters. *Rank correlation* (Spearman's) is 1
where predicted and judged order of the plans are the same.

A row is *stale* if another version of the code made it: the command with `--stale`, or
`experiments.validation.compiled` with `--again` where it reads compiled programs, makes it again.
"""
"""What a reader has to know to read the tables."""


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
