"""`unity rules check`: the verdict on every rule of a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unity_jax.errors import UnityError
from unity_jax.rewrite.language import RuleError
from unity_jax.rewrite.rule import Rule
from unity_jax.rules.flexflow import judged
from unity_jax.rules.verify import Answer, Verdict, verify

FORMS: dict[str, Callable[[Any], Verdict]] = {"rules": lambda data: verify(Rule.from_json(data)), "rule": judged}
"""How to judge a rule, by the key that holds the rules: the project's own form, and FlexFlow's."""


class RuleFileError(UnityError, ValueError):
    """A file that holds no rules; the message says why."""


def check(path: Path, as_json: bool = False) -> int:
    """Print the verdict on every rule of a file; 0 if all hold as they are written, else 1.

    **Raises:** `RuleFileError` where the file holds no rules in a known form.
    """
    found = list(verdicts(path))
    if as_json:
        print(json.dumps([v.to_json() for v in found], indent=1))
    else:
        Console().print(_table(found), _counts(found), sep="\n")
    return 0 if all(v.holds for v in found) else 1


def verdicts(path: Path) -> Iterator[Verdict]:
    """The verdict on every rule of a file, in its order.

    **Raises:** `RuleFileError` where the file holds no rules in a known form.
    """
    judge, rules = _rules(path)
    for i, data in enumerate(rules):
        try:
            yield judge(data)
        except RuleError as error:
            name = str(data.get("name", "")) if isinstance(data, dict) else ""
            yield Verdict(name or f"rule {i}", "unproved", str(error).removeprefix(f"{name}: "))
        except RecursionError:
            yield Verdict(str(data.get("name", f"rule {i}")), "unproved", "its terms are nested too deeply")


def _rules(path: Path) -> tuple[Callable[[Any], Verdict], list[Any]]:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise RuleFileError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RuleFileError(f"{path} is not JSON: {error}") from error
    for key, judge in FORMS.items():
        if isinstance(data, dict) and isinstance(data.get(key), list):
            return judge, data[key]
    raise RuleFileError(f'{path} holds no rules: expected {{"rules": [...]}}, or {{"rule": [...]}} as FlexFlow writes')


_STYLES: dict[Answer, str] = {"proved": "green", "conditional": "yellow", "false": "red", "unproved": "magenta"}


def _table(found: Sequence[Verdict]) -> Table:
    table = Table("rule", "verdict", "reason", box=None)
    for v in found:
        table.add_row(Text(v.name), Text(v.verdict, _STYLES[v.verdict]), Text(v.reason))
    return table


def _counts(found: Sequence[Verdict]) -> str:
    counts = Counter(v.verdict for v in found)
    return f"{len(found)} rules: " + ", ".join(f"{counts[k]} {k}" for k in _STYLES if counts[k])
