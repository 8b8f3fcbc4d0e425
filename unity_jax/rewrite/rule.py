"""A rewrite rule: two programs with the same results. Rules read and print as text, and as JSON.

    {"name": "merge-siblings", "given": ["x[m,k]", "v[k,n]", "w[k,o]"],
     "source": ["dot(x, v; k)", "dot(x, w; k)"],
     "target": ["slice(dot(x, concat(v, w; n+o); k); n+o, 0)", "slice(dot(x, concat(v, w; n+o); k); n+o, 1)"],
     "when": [], "proof": "..."}

A file of rules is `{"rules": [...]}`. Results correspond by position; equal subterms are computed once.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unity_jax.rewrite.language import Dim, RuleError, Term, Type, variable
from unity_jax.rewrite.table import apply, has, naming


@dataclass(frozen=True)
class Rule:
    """`source` may be replaced by `target`, in any program and for all sizes that satisfy `when` (such as `n == o`).

    `proof`: how it was proved, for people to read; empty for a rule nobody has proved. `own_inverse`: whether it is
    known that the rule, applied to its target, makes its source.
    """

    name: str
    given: tuple[Term, ...]
    source: tuple[Term, ...]
    target: tuple[Term, ...]
    when: tuple[str, ...] = ()
    proof: str = ""
    own_inverse: bool = False

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target) or not self.source:
            raise RuleError(f"{self.name}: {len(self.source)} results become {len(self.target)}")
        for a, b in zip(self.source, self.target, strict=True):
            same = frozenset(a.type.dims) == frozenset(b.type.dims) and a.type.ids == b.type.ids
            if not same or frozenset(a.type.devices) != frozenset(b.type.devices):
                raise RuleError(f"{self.name}: {a} is {a.type}, but {b} is {b.type}")

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def unbound(self) -> tuple[str, ...]:
        """Variables of the target that the source does not mention: such a rule can never be applied."""
        known = {t for s in self.source for t in s.walk()}
        return tuple(dict.fromkeys(t.name for s in self.target for t in s.walk() if not t.op and t not in known))

    @functools.cached_property
    def repeats(self) -> int:
        """How many copies the target stacks of what the source, a function of variables, has along no such dimension:
        `h(a, u) => h(stack(a, a; e), u)` with `u[e]`; 0 of any other rule."""
        (term, *others), copies = self.source, [t for r in self.target for t in r.walk() if naming(t) == "count"]
        if others or not copies or not has(term, "unknown") or any(a.op for a in term.args):
            return 0
        return max(len(t.args) for t in copies if any(t.attrs[0] in a.type.dims for a in term.args))

    def __str__(self) -> str:
        head = f"{self.name}: " + " ".join(f"{v.name}{v.type}" for v in self.given)
        tail = [f"  when {c}" for c in self.when] + ([f"  {self.proof}"] if self.proof else [])
        return "\n".join([head, *_program(self.source), "=>", *_program(self.target), *tail])

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "given": [f"{v.name}{v.type}" for v in self.given],
            "source": [str(t) for t in self.source],
            "target": [str(t) for t in self.target],
            "when": list(self.when),
            "proof": self.proof,
            **({"own_inverse": True} if self.own_inverse else {}),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rule:
        """**Raises:** `RuleError` that names the rule and what does not parse or fit."""
        name = str(data.get("name", "rule without a name")) if isinstance(data, Mapping) else "rule without a name"
        try:
            for key in ("given", "source", "target", "when"):
                if not isinstance(data.get(key, []), list) or not all(isinstance(t, str) for t in data.get(key, [])):
                    raise TypeError(key)
            found = make_rule(
                name, data["given"], data["source"], data["target"], data.get("when", ()), data.get("proof", "")
            )
            return replace(found, own_inverse=bool(data.get("own_inverse", False)))
        except (KeyError, TypeError, AttributeError) as error:
            raise RuleError(f"{name}: needs given, source and target, lists of text") from error


def make_rule(
    name: str,
    given: Sequence[str],
    source: Sequence[str],
    target: Sequence[str],
    when: Sequence[str] = (),
    proof: str = "",
) -> Rule:
    """A rule from text: `make_rule("f-of-slice", ["x[m,n+o]"], ["f(slice(x; n+o, 0))"], ["slice(f(x); n+o, 0)"])`."""
    try:
        variables = tuple(parse_variable(v) for v in given)
        known = {v.name: _TERMS.setdefault(v, v) for v in variables}
        if len(known) < len(variables):
            raise RuleError("a variable is given twice")
        before, after = (tuple(parse_term(t, known) for t in side) for side in (source, target))
    except RuleError as error:
        raise RuleError(f"{name}: {error}") from error
    return Rule(name, tuple(known.values()), before, after, tuple(when), proof)


def _program(results: Sequence[Term]) -> Iterator[str]:
    """Terms that are used more than once get names."""
    uses = Counter(a for r in results for t in r.walk() for a in t.args if a.op)
    names: dict[Term, str] = {}
    every = dict.fromkeys(t for r in results for t in r.walk())

    def text(t: Term) -> str:
        if t in names or not t.op:
            return names.get(t, t.name)
        attrs = "; " + ", ".join(map(str, t.attrs)) if t.attrs else ""
        return f"{t.op}({', '.join(text(a) for a in t.args)}{attrs})"

    for t in every:
        if uses[t] > 1 and t not in results:
            line = text(t)
            names[t] = f"t{len(names)}"
            yield f"  {names[t]} = {line}"
    for i, r in enumerate(results):
        yield f"  {'abcdefgh'[i] if i < 8 else f'r{i}'} = {text(r)}"


# Parsing

_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_']*|\d+|.)")


class _Tokens:
    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.at = text, [*_TOKEN.findall(text), ""], 0
        self.next = self.tokens[0]

    def take(self, expected: str | None = None) -> str:
        token = self.next
        if expected is not None and token != expected:
            raise RuleError(f"{self.text!r}: expected {expected!r} before {''.join(self.tokens[self.at :])!r}")
        self.at = min(self.at + 1, len(self.tokens) - 1)
        self.next = self.tokens[self.at]
        return token

    def end(self) -> None:
        if self.next:
            raise RuleError(f"{self.text!r}: what is {''.join(self.tokens[self.at :])!r}?")

    def separated(self, parse: Any, closing: str) -> list[Any]:
        """Items with commas between them, up to a token that stays."""
        found = []
        while self.next not in closing or not self.next:
            found.append(parse(self))
            if self.next == ",":
                self.take()
            elif not self.next or self.next not in closing:
                raise RuleError(
                    f"{self.text!r}: expected one of {closing!r} before {''.join(self.tokens[self.at :])!r}"
                )
        return found


def parse_dim(text: str) -> Dim:
    tokens = _Tokens(text)
    found = _dim(tokens)
    tokens.end()
    return found


def _dim(tokens: _Tokens) -> Dim:
    parts = [_multiple(tokens)]
    while tokens.next == "+":
        tokens.take()
        parts.append(_multiple(tokens))
    return parts[0] if len(parts) == 1 else Dim("+", tuple(parts))


def _multiple(tokens: _Tokens) -> Dim:
    if tokens.next == "(":
        tokens.take()
        first = _dim(tokens)
        tokens.take(")")
    elif tokens.next.isidentifier():
        first = Dim(tokens.take())
    else:
        raise RuleError(f"{tokens.text!r}: expected a dimension before {''.join(tokens.tokens[tokens.at :])!r}")
    if tokens.next != "*":
        return first
    tokens.take()
    return Dim("*", (first, _multiple(tokens)))


@functools.cache
def parse_variable(text: str) -> Term:
    """`x[m,k]@p` or, for row numbers below `v`, `i[n]<v`."""
    tokens = _Tokens(text)
    name = tokens.take()
    if not name.isidentifier():
        raise RuleError(f"{text!r}: a variable starts with its name")
    tokens.take("[")
    dims = tuple(tokens.separated(_dim, "]"))
    tokens.take("]")
    devices, ids = [], None
    while tokens.next == "@":
        tokens.take()
        devices.append(_multiple(tokens))
    if tokens.next == "<":
        tokens.take()
        ids = _dim(tokens)
    tokens.end()
    return variable(name, Type(dims, tuple(devices), ids))


def parse_term(text: str, known: Mapping[str, Term]) -> Term:
    """A term over variables that are known by name."""
    tokens = _Tokens(text)
    found = _term(tokens, known)
    tokens.end()
    return found


def _term(tokens: _Tokens, known: Mapping[str, Term]) -> Term:
    name = tokens.take()
    if tokens.next != "(":
        if name not in known:
            raise RuleError(f"{tokens.text!r}: {name!r} is not given")
        return known[name]
    tokens.take("(")
    args = tokens.separated(lambda t: _term(t, known), ";)")
    attrs: list[Dim | int] = []
    if tokens.next == ";":
        tokens.take()
        attrs = tokens.separated(lambda t: int(t.take()) if t.next.isdigit() else _dim(t), ")")
    tokens.take(")")
    found = apply(name, *args, attrs=attrs)
    return _TERMS.setdefault(found, found)


_TERMS: dict[Term, Term] = {}
"""Equal terms that were read are one object, so that tables of them need not look inside."""
