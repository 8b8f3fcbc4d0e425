"""The rules that ship: generated (`unity rules generate`), proved, and read from `library.json`."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from unity_jax.rewrite.rule import Rule

FILE = Path(__file__).with_name("library.json")


@functools.cache
def library() -> tuple[Rule, ...]:
    """Every rule, in the order of the file."""
    return tuple(Rule.from_json(rule) for rule in json.loads(FILE.read_text())["rules"])
