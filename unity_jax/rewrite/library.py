"""The library of proved rules, `library.json`, as `unity rules generate` makes it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from unity_jax.rewrite.directions import both_ways, refusal
from unity_jax.rewrite.form import distinct
from unity_jax.rewrite.ops.parts import SLICE
from unity_jax.rewrite.ops.stacks import UNSTACK
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.table import OPS

FILE = Path(__file__).with_name("library.json")


@functools.cache
def library() -> tuple[Rule, ...]:
    """Every rule that ships, each proved. A rule may be used both ways where neither side has inputs of its own."""
    return tuple(Rule.from_json(rule) for rule in json.loads(FILE.read_text())["rules"])


@functools.cache
def applicable() -> tuple[Rule, ...]:
    """The rules that a traced program can be rewritten by, each way round that it can."""
    return both_ways(library())


@functools.cache
def stacking() -> tuple[Rule, ...]:
    """The rules by which two ops become one on stacked or joined operands, and by which these cancel: those for
    towers."""
    possible = [r for r in library() if refusal(r, towers=True) is None]
    siblings = [r for r in possible if len(r.source) == 2 and (_is_made_of(r, UNSTACK) or _is_made_of(r, SLICE))]
    return (*siblings, *(r for r in possible if OPS[r.source[0].op].arity is None and not r.target[0].op))


@functools.cache
def searched() -> tuple[Rule, ...]:
    """The rules that the search uses: those that are `applicable` at single places, each said once (`form`), and
    `stacking` for towers."""
    return tuple(dict.fromkeys((*distinct(applicable()), *stacking())))


def _is_made_of(rule: Rule, cut: str) -> bool:
    """Whether the results of a rule are the two that a cut, `unstack` or `slice`, makes of one."""
    a, b = rule.target
    return a.op == b.op == cut and a.args == b.args and (a.attrs[1], b.attrs[1]) == (0, 1)


def to_text(rules: Sequence[Rule]) -> str:
    """A file of rules, one a line."""
    lines = ",\n".join(json.dumps(rule.to_json(), ensure_ascii=False) for rule in rules)
    return f'{{"rules": [\n{lines}\n]}}\n'
