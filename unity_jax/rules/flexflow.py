"""Rules in the JSON form that FlexFlow published (`{"rule": [{"name", "srcOp", "dstOp", "mappedOutput"}, ...]}`).

Its tensors have a replica dimension, rows and columns, each cut into blocks on some device axes. Sizes go unsaid, and
so does what lies where, so both are inferred: operands of an op must fit, and both sides must give the same types. The
form does not say what a tensor with replicas holds. Here, OP_REPLICATE puts equal copies on a device axis, as the
blocks of a dimension; OP_REDUCE adds up the blocks of a dimension; OP_PARTITION cuts a dimension into blocks on a
device axis, and OP_COMBINE puts them back. An input that lies on a device axis holds any values. A compute op needs
its operands on the same devices, and treats the replica dimension as a batch. What holds only when each shard is taken
for a whole tensor has no types, or is false, in this reading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from unity_jax.rewrite.language import Dim, RuleError, Type, variable
from unity_jax.rewrite.rule import Rule
from unity_jax.rules.flexflow_ops import COLUMN, OPS, REPLICA, ROW, Known, Op, Refined, Tensor, fit, names_of
from unity_jax.rules.verify import Verdict, verify

_PASSES = 100
"""Inferring ends after so many refinements."""

Result = tuple[int, int]
"""The number of an op, negative for an external input, and of one of its tensors."""


@dataclass(frozen=True)
class Imported:
    """A rule in the language, on condition of the degrees it states. `needs`: equal sizes of inputs that the target
    needs and the source does not imply."""

    rule: Rule
    needs: tuple[str, ...]


def judged(data: Any) -> Verdict:
    """The verdict on a rule.

    **Raises:** `RuleError` that names the rule, where it is malformed, has an unknown op, or no types fit.
    """
    found = imported(data)
    verdict = verify(found.rule)
    if not (found.needs and verdict.holds):
        return verdict
    needs = " and ".join(found.needs)
    reason = f"the target needs {needs}, which the source does not imply; then {verdict.reason}"
    return replace(verdict, verdict="conditional", reason=reason, condition=needs, stated=False)


def imported(data: Any) -> Imported:
    """A rule in the language.

    **Raises:** `RuleError` that names the rule, where it is malformed, has an unknown op, or no types fit.
    """
    name = str(data.get("name", "rule without a name")) if isinstance(data, Mapping) else "rule without a name"
    try:
        source, target = (_Side(side, tuple(map(_op, _field(data, side, list)))) for side in ("srcOp", "dstOp"))
        keys = ("srcOpId", "srcTsId", "dstOpId", "dstTsId")
        mapped = [tuple(_field(m, k, int) for k in keys) for m in _field(data, "mappedOutput", list)]
        before, after = [(op, at) for op, at, _, _ in mapped], [(op, at) for _, _, op, at in mapped]
        matched = [*before, *((op, 0) for op in range(len(source.ops)))]  # a pattern is all of its ops
        if unbound := sorted(target.externals(after) - source.externals(matched), reverse=True):
            raise RuleError(f"unbound: srcOp does not mention input {', '.join(str(op) for op, _ in unbound)}")

        def build(known: Known) -> Rule:
            pairs = list(zip(source.tensors(matched, known), target.tensors(after, known), strict=False))
            for a, b in pairs:
                fit(known, a, b)
            return _rule(name, [a for a, _ in pairs], [b for _, b in pairs], known)

        alone, both = Known(), Known()
        _inferred(lambda: source.tensors(matched, alone), alone)
        both.rename(_inferred(lambda: build(both), both))
        return Imported(build(both), tuple(_needs(source.externals(matched), alone, both)))
    except RuleError as error:
        raise RuleError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from error


Built = TypeVar("Built")


def _inferred(build: Callable[[], Built], known: Known) -> Built:
    """What is built once enough is known for operands to fit."""
    for _ in range(_PASSES):
        try:
            return build()
        except Refined:
            known.settle()
    raise RuleError("no types fit: operands need more and more device axes")


def _needs(externals: Collection[Result], alone: Known, both: Known) -> Iterator[str]:
    """Sizes of inputs that the source leaves apart and that both sides together make one."""
    first: dict[str, tuple[Dim, str]] = {}  # by a name of a size: what the source calls it, and where it occurs
    for op, at in sorted(externals, reverse=True):
        for size, where in zip(_sizes(op, at), ("replicas", "rows", "columns"), strict=True):
            place = f"{where} of {_name(op, at)}"
            for mine, ours in _leaves(size.renamed(alone.names), size.renamed(both.names)):
                for n in ours.names():
                    other, there = first.setdefault(n, (mine, place))
                    if other != mine and n not in both.degree:
                        yield f"{there} == {place}"


def _leaves(general: Dim, special: Dim) -> Iterator[tuple[Dim, Dim]]:
    """The names of a size, with what they are in a special case of it."""
    if not general.parts:
        yield general, special
    for g, s in zip(general.parts, special.parts, strict=True) if general.parts else ():
        yield from _leaves(g, s)


def _rule(name: str, source: Sequence[Tensor], target: Sequence[Tensor], known: Known) -> Rule:
    before, after = tuple(x.term for x in source), tuple(x.term for x in target)
    terms = dict.fromkeys(t for r in (*before, *after) for t in r.walk())
    axes = dict.fromkeys(n for t in terms for n in names_of(t) if n in known.degree)
    degrees = tuple(f"{p} == {known.degree[p]}" for p in axes)
    return Rule(name, tuple(t for t in terms if not t.op), before, after, degrees)


def _field(data: Any, key: str, kind: type) -> Any:
    if not isinstance(data, Mapping) or not isinstance(data.get(key), kind):
        raise RuleError(f"needs {key!r}, {'a list' if kind is list else 'a number' if kind is int else 'text'}")
    return data[key]


def _op(data: Any) -> Op:
    inputs = tuple((_field(i, "opId", int), _field(i, "tsId", int)) for i in _field(data, "input", list))
    para = {_field(p, "key", str): _field(p, "value", int) for p in _field(data, "para", list)}
    return Op(_field(data, "type", str), inputs, para)


def _name(op: int, at: int) -> str:
    return f"x{-op}" + (f"_{at}" if at else "")


def _sizes(op: int, at: int) -> tuple[Dim, ...]:
    """The names of the sizes of an external input, before anything is known of them."""
    return tuple(Dim(f"{d}{_name(op, at)[1:]}") for d in "lmn")


@dataclass(frozen=True)
class _Side:
    """The ops of one side."""

    name: str
    ops: tuple[Op, ...]

    def externals(self, results: Collection[Result]) -> set[Result]:
        """The external inputs that results are made of."""
        seen, open_ends = set(results), list(results)
        while open_ends:
            op, _ = open_ends.pop()
            inputs = self.ops[op].inputs if 0 <= op < len(self.ops) else ()
            open_ends += [i for i in inputs if i not in seen]
            seen.update(inputs)
        return {(op, at) for op, at in seen if op < 0}

    def tensors(self, results: Sequence[Result], known: Known) -> list[Tensor]:
        """**Raises:** `Refined` where operands do not fit yet."""
        made: dict[int, list[Tensor]] = {}

        def tensor(op: int, at: int) -> Tensor:
            if op < 0:
                return _external(op, at, known)
            if op not in made:
                if op >= len(self.ops):
                    raise RuleError(f"{self.name} has no op {op}")
                made[op] = []  # in the making
                made[op] = self._applied(op, [tensor(*i) for i in self.ops[op].inputs], known)
            if not 0 <= at < len(made[op]):
                raise RuleError(f"{self.name}: op {op} has no tensor {at}, or needs itself")
            return made[op][at]

        return [tensor(*r) for r in results]

    def _applied(self, at: int, inputs: Sequence[Tensor], known: Known) -> list[Tensor]:
        op = self.ops[at]
        if op.type not in OPS:
            raise RuleError(f"unknown op {op.type}")
        count, run = OPS[op.type]
        if not inputs or (count is not None and len(inputs) != count):
            raise RuleError(f"{op.type} with {len(inputs)} inputs")
        return run(known, op, f"{self.name[0]}{at}", *inputs)


def _external(op: int, at: int, known: Known) -> Tensor:
    name = _name(op, at)
    sizes = tuple(size.renamed(known.names) for size in _sizes(op, at))
    origin = tuple(((op, at), place) for place in (REPLICA, ROW, COLUMN))
    axes = tuple(known.axes(place) for place in origin)
    devices = tuple(a for each in axes for a in each)
    if len(set(devices)) < len(devices):
        raise RuleError(f"no types fit: {name} would lie twice on the same devices")
    return Tensor(variable(name, Type(sizes, devices)), sizes, axes, origin)
