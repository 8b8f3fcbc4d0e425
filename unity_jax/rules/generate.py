"""The generator of the library: what `unity rules generate` does.

Every alphabet is searched in turn; each rule that does not follow from earlier ones is tested at other sizes and
proved. In the end rules that follow from later ones of no larger size are left out too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track as progress
from rich.table import Table

from unity_jax.rewrite.language import Dim
from unity_jax.rewrite.library import FILE, to_text
from unity_jax.rewrite.rule import Rule, parse_variable
from unity_jax.rewrite.table import OPS, apply
from unity_jax.rules.alphabet import Alphabet
from unity_jax.rules.alphabets import ALPHABETS
from unity_jax.rules.names import named
from unity_jax.rules.prune import Known, follows, is_own_inverse
from unity_jax.rules.search import Counts, rank, search
from unity_jax.rules.semantics import passes
from unity_jax.rules.verify import verify

Track = Callable[[Sequence[Alphabet]], Iterable[Alphabet]]


@dataclass(frozen=True)
class Generated:
    """The library, and the counts of each alphabet; `found` rules were proved before the last pruning."""

    rules: tuple[Rule, ...]
    counts: dict[str, Counts]
    found: int
    unproved: tuple[Rule, ...]


def generate(alphabets: Sequence[Alphabet] = ALPHABETS, track: Track = iter) -> Generated:
    """The rules of these alphabets, in an order and with names that are the same each time."""
    known = Known()
    counts: dict[str, Counts] = {}
    direct: set[Rule] = set()
    unproved: list[Rule] = []

    def prove(rule: Rule) -> Rule | None:
        verdict = verify(rule)
        if verdict.verdict == "proved":
            return replace(rule, proof=verdict.reason)
        unproved.append(rule)
        return None

    symmetric = [proved for rule in _swaps() if passes(rule) and (proved := prove(rule))]
    assert {rule.source[0].op for rule in symmetric} == {name for name, op in OPS.items() if "commutes" in op.traits}
    for alphabet in track(alphabets):
        made = counts.setdefault(alphabet.name, Counts())
        for rule in search(alphabet, known, made, passes, prove):
            if len(rule.source) > 1 or alphabet.direct:
                direct.add(rule)
    left = _minimal(known.rules, direct)
    rules = tuple(replace(rule, own_inverse=is_own_inverse(rule)) for rule in named([*symmetric, *left]))
    return Generated(rules, counts, len(symmetric) + len(known.rules), tuple(unproved))


def _swaps() -> Iterator[Rule]:
    """Each op of two operands with them the other way round. Those that hold are then built in: graphs of one alphabet
    that differ in the order of such operands are one graph."""
    x, y = parse_variable("x[m,k]"), parse_variable("y[k,n]")
    for name, op in OPS.items():
        if op.arity == 2 and op.naming != "windows" and "rows" not in op.traits:
            attrs = [Dim("k")] if op.naming == "dims" else []
            yield Rule("", (x, y), (apply(name, x, y, attrs=attrs),), (apply(name, y, x, attrs=attrs),))


def _minimal(rules: Sequence[Rule], direct: set[Rule]) -> list[Rule]:
    """Without those that follow from others that are no larger: the largest and least general go first."""
    left = list(rules)
    for rule in sorted(rules, key=rank, reverse=True):
        others = Known()
        for other in left:
            if other is not rule and rank(other)[0] <= rank(rule)[0]:
                others.add(other)
        if follows(rule, others, one_way=rule in direct):
            left.remove(rule)
    return left


def run(out: Path | None = None, check: bool = False) -> int:
    """Generate the library, print the counts at each step, and write it; with `check`, 1 if it is not the one that
    ships, byte for byte."""
    console = Console()
    console.width = max(console.width, 150)  # of the table
    made = generate(track=lambda alphabets: progress(alphabets, "searching", console=console, transient=True))
    console.print(_table(made))
    console.print(f"{made.found} rules proved, {len(made.rules)} left that do not follow from others")
    text = to_text(made.rules)
    if out:
        out.write_text(text)
    if check and text != FILE.read_text():
        console.print(f"not the same as {FILE}")
        return 1
    return 0


def _table(made: Generated) -> Table:
    steps = [f.name for f in fields(Counts)]
    table = Table("alphabet", box=None)
    for step in steps:
        table.add_column(step, justify="right")
    for name, counts in [*made.counts.items(), ("all", sum(made.counts.values(), Counts()))]:
        table.add_row(name, *(f"{getattr(counts, step):,}" for step in steps))
    return table
