"""Whether compiled programs confirm how much faster the planner's choice is than data parallelism and the best expert.

    python -m experiments.validation.confirmed    # reads what has been compiled
    python -m experiments.validation.confirmed --models bert,gpt --on h100:8

Predicted ratios of step times beside those of the judge of compiled programs (`experiments/validation/judge/`), for
every program and topology of the corpus `compiled` (`compiled.py`), tuning and validation: data parallelism, FSDP and
tensor parallelism, and the planner's choice. Both should say the same of who is faster, and by how much within 15 %;
plans within 1 % of each other are equally fast. The exit code tells. Where data parallelism is the best expert, it is
compared with once; where the planner's choice is the same program, there is nothing to confirm.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.rows import Row, Rows
from experiments.validation.compiled import COMPILED, SETS, arguments, asked, set_of
from experiments.validation.ranking import Candidate, ranking
from unity_jax.text import seconds

RESULTS = Path(__file__).parents[1] / "results" / "confirmed.csv"
SETTINGS = ("model", "topology", "against")
EXPERTS = ("dp", "fsdp", "tp")
NEAR = 0.15
SAME = 0.01
"""Steps so near to each other are equally fast."""


def against(found: Sequence[Candidate]) -> dict[str, Candidate]:
    """What the planner's choice is compared with: data parallelism, and the expert that is predicted to be best."""
    experts = [c for c in found if c.label in EXPERTS]
    named = {"data parallel": next((c for c in experts if c.label == "dp"), None)}
    named["best expert"] = min(experts, key=lambda c: c.predicted, default=None)
    if named["best expert"] is named["data parallel"]:
        del named["best expert"]
    return {name: c for name, c in named.items() if c is not None}


def differs(row: Row) -> bool:
    """Whether the two plans are not one and the same: then their predictions or their programs differ."""
    return any(row[f"chosen {how}"] != row[f"other {how}"] for how in ("predicted", "judged"))


def compared(chosen: Candidate, other: Candidate) -> dict[str, str | float]:
    """What rows say of two plans."""
    row = {"other": other.label, "other predicted": other.predicted, "other judged": other.judged}
    return row | {"chosen predicted": chosen.predicted, "chosen judged": chosen.judged}


def ratio(row: Row, how: str) -> float:
    """How many times as fast as the other plan the chosen one is, `predicted` or `judged`."""
    return float(row[f"other {how}"]) / float(row[f"chosen {how}"])


def same_direction(row: Row) -> bool:
    predicted, judged = (ratio(row, how) - 1 for how in ("predicted", "judged"))
    return predicted * judged > 0 or max(abs(predicted), abs(judged)) <= SAME


def near(row: Row) -> bool:
    return abs(ratio(row, "predicted") / ratio(row, "judged") - 1) <= NEAR


def verdict(rows: Sequence[Row]) -> str:
    said = []
    for name, members in reversed(SETS.items()):
        if some := [r for r in rows if r["model"] in members and differs(r)]:
            both = sum(same_direction(r) and near(r) for r in some)
            said.append(
                f"{name} programs: {sum(map(same_direction, some))} of {len(some)} comparisons confirmed in direction, "
                f"{both} of them also in size within {NEAR:.0%}"
            )
    return "; ".join(said)


def table(rows: Sequence[Row]) -> Table:
    made = Table("set", "model", "topology", "against", "predicted", "judged", "predicted", "judged", "confirmed")
    for row in rows:
        steps = (
            " / ".join(seconds(float(row[f"{who} {how}"])) for who in ("other", "chosen"))
            for how in ("predicted", "judged")
        )
        ratios = (f"{ratio(row, how):.2f}" for how in ("predicted", "judged"))
        held = "yes" if same_direction(row) and near(row) else "direction" if same_direction(row) else "no"
        held = held if differs(row) else "the same plan"
        shown = set_of(row["model"]), row["model"], row["topology"]
        made.add_row(*shown, f"{row['against']} ({row['other']})", *steps, *ratios, held)
    return made


def main() -> int:
    names, topologies = asked(options := arguments(__doc__, RESULTS).parse_args())
    rows, shown = Rows(options.out, SETTINGS), []
    for model in names:
        for topology in topologies:
            if not COMPILED.cases([model], [topology]):
                continue
            found = ranking(model, topology, COMPILED).candidates
            chosen = next((c for c in found if c.label == "chosen"), None)
            for name, other in against(found).items() if chosen else ():
                settings = {"model": model, "topology": topology, "against": name}
                shown.append(rows.put(settings, compared(chosen, other)))
            if chosen and "best expert" not in against(found):
                rows.drop({"model": model, "topology": topology, "against": "best expert"})
    console = Console(width=150, highlight=False)
    console.print(table(shown))
    console.print(verdict(shown))
    return int(not all(same_direction(r) and near(r) for r in filter(differs, shown)))


if __name__ == "__main__":
    sys.exit(main())
