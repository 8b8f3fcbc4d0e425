"""Every direction of every rule that can rewrite a program does: a program written from its source is traced with its
gradients, rewritten through view, match and emit, and run; the other directions say why they cannot.
"""

import dataclasses
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics.harness import error
from tests.rewrite.test_apply import evaluate
from tests.rewrite.written import function, in_order
from unity_jax.program import trace
from unity_jax.rewrite.apply import rewritten
from unity_jax.rewrite.dims import CannotEmit
from unity_jax.rewrite.directions import inverse, is_applicable, refusal
from unity_jax.rewrite.estimate import Seconds
from unity_jax.rewrite.find import matches_pair
from unity_jax.rewrite.form import as_rows, is_same
from unity_jax.rewrite.language import RuleError, variable
from unity_jax.rewrite.library import applicable, library, searched, stacking
from unity_jax.rewrite.meaning import NUMBERS
from unity_jax.rewrite.rule import Rule
from unity_jax.rewrite.sites import Finder, rewrite
from unity_jax.rewrite.table import apply
from unity_jax.rules.constraints import Constraints
from unity_jax.rules.semantics import draw
from unity_jax.rules.semantics import evaluate as meaning

TOGETHER = 12
"""How many programs are compiled at once."""

MEANT = dataclasses.replace(  # what `written` takes the unknown functions for
    NUMBERS,
    unary=(np.tanh, np.sin),
    keeps_zero=lambda x: x.astype(np.float32),
    binary=np.arctan2,
    fold=lambda x, axes: x.max(axes),
    draw=lambda rng, shape: rng.normal(size=shape),
)


def without(rule, absent):
    """The rule where some names stand for no dimension. Raises `RuleError` where an op needs one."""

    def term(t):
        if not t.op:
            return variable(t.name, t.type._replace(dims=tuple(d for d in t.type.dims if d not in absent)))
        attrs = tuple(a for a in t.attrs if a not in absent)
        if attrs != t.attrs and (t.op not in ("dot", "sum", "fold", "put", "scatter") or (not attrs and t.op != "dot")):
            raise RuleError(f"{t} needs one of {absent}")
        return apply(t.op, *map(term, t.args), attrs=attrs)

    return Rule(rule.name, *(tuple(map(term, side)) for side in (rule.given, rule.source, rule.target)))


def in_groups(rule):
    """Names of which a convolution would make groups: both operands have them."""
    convs = [t for r in (*rule.source, *rule.target) for t in r.walk() if t.op == "conv"]
    return {d for t in convs for d in set(t.args[0].type.dims) & set(t.args[1].type.dims) - {t.attrs[0]}}


def variants(rule):
    """The rule where each name stands for one dimension, and where few of them stand for none: one may be needed that
    counts a stack, which no other name of the same operands may take, or numbers of rows in one order."""
    names = list(dict.fromkeys(d for v in rule.given for d in v.type.dims if not d.parts))
    tried = set()
    for absent in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(4)):
        try:
            made = without(rule, absent)
            while grouped := in_groups(made):
                absent = {*absent, *grouped}
                made = without(rule, absent)
        except RuleError:
            continue
        if frozenset(absent) not in tried:
            tried.add(frozenset(absent))
            yield made


def is_of_towers(rule):
    """Whether its results have nothing in common: towers are stacked by such rules, and are alike in all sizes."""
    inputs = [{t.name for t in r.walk() if not t.op and t.type.ids is None} for r in rule.source]
    return rule in stacking() and len(inputs) == 2 and (not is_applicable(rule) or inputs[0].isdisjoint(inputs[1]))


def differentiated(run, numbered):
    """The results of a function, and the gradients by all arguments but row numbers."""
    at = tuple(i for i, ids in enumerate(numbered) if not ids)

    def step(*args):
        def loss(*args):
            results = run(*args)
            return sum(jnp.sum(r.astype(jnp.float64) ** 2) for r in results), results

        grads, results = jax.grad(loss, at, has_aux=True)(*args)
        return results, grads

    return step


@dataclasses.dataclass
class Fired:
    """A program and what a rule made of it, with arguments, and the results that the rule's source means."""

    rule: Rule
    before: object
    after: object
    args: list
    meant: list


def fire(rule, by=None):
    """The first program of a rule's source whose results are rewritten, by the rule itself or one of others (`by`)."""
    for made in variants(rule):
        of_towers = is_of_towers(rule)
        sums = [t.attrs[0].parts for r in made.target for t in r.walk() if t.op == "concat"] if of_towers else []
        alike = dataclasses.replace(made, when=tuple(f"{a} == {b}" for a, b in sums))
        sizes = Constraints.of(alike).sizes(np.random.default_rng(0))
        first = frozenset(d for parts in sums for d in parts)
        values = draw(made.given, sizes, np.random.default_rng(1), MEANT)
        args = [
            jnp.asarray(np.transpose(values[v.name], [v.type.dims.index(d) for d in in_order(v, first)]))
            for v in made.given
        ]
        run = function(made.source, made.given, sizes, first)
        program = trace(differentiated(run, [v.type.ids for v in made.given]), args, {})
        finder = Finder(program.graph, lambda graph: Seconds(1.0))
        roots = [finder.view.source(t) for t in program.graph.outputs[: len(made.source)]]
        after = as_towers(rule, finder, roots) if of_towers else at_its_place(by or [rule], finder, roots)
        if after is not None:
            assert not any(t in roots for op in after.ops for t in op.outputs)
            meant = meaning(made.source, sizes, values, MEANT)
            order = ([t.type.dims.index(d) for d in in_order(t, first)] for t in made.source)
            return Fired(rule, program.graph, after, args, [x.transpose(o) for x, o in zip(meant, order, strict=True)])
    raise AssertionError(f"no program is rewritten by {rule}")


def at_its_place(rules, finder, roots):
    for place in finder.places(rules):
        if any({r.tensor for r in match.roots} == set(roots) for match in place.found):
            return rewrite(finder, place)[0]
    return None


def as_towers(rule, finder, roots):
    for match in matches_pair(rule, tuple(roots), finder.view):
        try:
            return rewritten(finder.graph, [match], finder.view)[0]
        except CannotEmit:
            continue
    return None


def run_all(every):
    """The results of each program, and of what was made of it."""

    def both(args):
        return [(evaluate(f.before, a), evaluate(f.after, a)) for f, a in zip(every, args, strict=True)]

    args = [f.args for f in every]
    return jax.jit(both).lower(args).compile()(args)


EVERY = tuple(dict.fromkeys((*applicable(), *stacking())))
SAID = [rule for rule in applicable() if rule not in searched()]


@pytest.mark.parametrize("start", range(0, len(EVERY), TOGETHER))
def test_every_direction_rewrites_a_program_of_its_source(start):
    with jax.enable_x64(True):
        every = [fire(rule) for rule in EVERY[start : start + TOGETHER]]
        for fired, (before, after) in zip(every, run_all(every), strict=True):
            for want, got in zip(fired.meant, before, strict=False):
                assert error(np.asarray(want, got.dtype), got) < 1e-12, f"not what is meant by {fired.rule}"
            for want, got in zip(before, after, strict=True):
                assert error(want, got) < 1e-12, f"{fired.rule}\n{fired.before}\n{fired.after}"


def is_said_by(rule):
    """The directions that are searched and say the same, of the same ops or of rows."""
    same = [rule, *filter(None, [as_rows(rule)])]
    return [other for other in searched() if any(is_same(r, other) for r in same)]


@pytest.mark.parametrize("start", range(0, len(SAID), TOGETHER))
def test_what_is_not_searched_is_said_by_another_direction(start):
    with jax.enable_x64(True):
        some = SAID[start : start + TOGETHER]
        every = [fire(rule, is_said_by(rule)) for rule in some]
        for rule, fired, (before, after) in zip(some, every, run_all(every), strict=True):
            assert sorted(op.name for op in fired.after.ops) == sorted(op.name for op in fire(rule).after.ops)
            for want, got in zip(before, after, strict=True):
                assert error(want, got) < 1e-12, f"{rule}\n{fired.before}\n{fired.after}"


def directions():
    for rule in library():
        yield rule
        yield dataclasses.replace(rule, name=inverse(rule.name), source=rule.target, target=rule.source)


def test_every_other_direction_says_why_not():
    tried = {rule.name for rule in EVERY}
    silent = [
        rule.name for rule in directions() if rule.name not in tried and refusal(rule) is None and not rule.own_inverse
    ]
    assert silent == []


def test_the_readme_counts_rules_and_directions():
    """A direction is searched under its own name, and a rule once, whichever way it is applied."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    found = re.search(r"Of the (\d+),\s+(\d+) rewrite traced programs, in (\d+) directions", text)
    names = {rule.name for rule in EVERY}
    used = {rule.name for rule in library() if names & {rule.name, inverse(rule.name)}}
    assert found is not None and tuple(map(int, found.groups())) == (len(library()), len(used), len(names))
    assert f" {len(SAID)} of the directions are not searched" in text
