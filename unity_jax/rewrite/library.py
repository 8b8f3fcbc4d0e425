"""The library of proved rules, `library.json`, as `unity rules generate` makes it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from unity_jax.rewrite.rule import Rule

FILE = Path(__file__).with_name("library.json")


@functools.cache
def library() -> tuple[Rule, ...]:
    """Every rule that ships, each proved. A rule may be used both ways where neither side has inputs of its own."""
    return tuple(Rule.from_json(rule) for rule in json.loads(FILE.read_text())["rules"])


def to_text(rules: Sequence[Rule]) -> str:
    """A file of rules, one a line."""
    lines = ",\n".join(json.dumps(rule.to_json(), ensure_ascii=False) for rule in rules)
    return f'{{"rules": [\n{lines}\n]}}\n'
