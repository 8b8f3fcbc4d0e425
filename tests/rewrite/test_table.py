"""The table of rule ops is the one place that knows them; programs are rewritten without what made the rules."""

import ast
import dataclasses
from pathlib import Path

import pytest

import unity_jax
from unity_jax.ops.rule import RULES
from unity_jax.ops.rules import POINTWISE
from unity_jax.rewrite import table
from unity_jax.rewrite.table import OPS, SEEN_AS, register, traits

PACKAGE = Path(unity_jax.__file__).parent
ROOMS = ("rewrite", "rules")
FILES = {str(p.relative_to(PACKAGE)): p for room in ROOMS for p in sorted((PACKAGE / room).rglob("*.py"))}
TEXTS = ("rules/alphabets.py", "rules/axioms.py", "rules/flexflow_ops.py")
"""What is written in the language: which graphs are searched, what proofs start from, and what FlexFlow's ops are."""

ELSEWHERE = [name for name in FILES if not name.startswith("rewrite/ops/") and name not in TEXTS]
PRIMITIVES = {*RULES, *POINTWISE, *SEEN_AS}
"""Names of JAX, some of which are names of rule ops too."""


def constants(node: ast.AST) -> list[str]:
    """The texts in an expression, and the words of those that are split."""
    split = {
        id(call.func.value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "split"
    }
    texts = [n for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [word for n in texts for word in (n.value.split() if id(n) in split else [n.value])]


def reads_op(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == "op" for n in ast.walk(node))


def spoken_of(source: str) -> set[str]:
    """The rule ops that code names: any that is no primitive, and any that the op of a term is compared with, looked up
    by or made of."""
    tree = ast.parse(source)
    found = {name for name in constants(tree) if name in OPS.keys() - PRIMITIVES}
    for node in ast.walk(tree):
        compared = isinstance(node, ast.Compare | ast.Match | ast.Subscript) and reads_op(node)
        made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "apply"
        if compared or made:
            found |= OPS.keys() & set(constants(node))
    return found


@pytest.mark.parametrize("name", ELSEWHERE)
def test_ops_are_named_in_the_table_alone(name):
    assert spoken_of(FILES[name].read_text()) == set()


@pytest.mark.parametrize(
    ("code", "ops"),
    [
        ('term.op in ("slice", "pad")', {"slice", "pad"}),
        ('{"neg": 1}[t.op]', {"neg"}),
        ('match t.op:\n    case "add" | "sub":\n        pass', {"add", "sub"}),
        ('frozenset("take put scatter".split())', {"take", "put"}),
        ('apply("mul", x, y)', {"mul"}),
        ('op.name in ("slice", "pad")', set()),
    ],
)
def test_such_names_are_found(code, ops):
    assert spoken_of(code) == ops


def test_an_entry_is_whole_and_does_not_contradict_itself(monkeypatch):
    monkeypatch.setattr(table, "OPS", {})
    add = OPS["add"]
    fields = {f.name: getattr(add, f.name) for f in dataclasses.fields(add)}
    for name in fields:
        with pytest.raises(TypeError, match=name):
            type(add)(**{k: v for k, v in fields.items() if k != name})
    for wrong in ({"naming": "letters"}, {"traits": traits("odd")}, {"core": add.emit}, {"emit": None}, {"code": None}):
        with pytest.raises(ValueError, match="plus"):
            register("plus", type(add)(**fields | wrong))
    register("plus", type(add)(**fields | {"seen": {}, "emit": None}))
    with pytest.raises(ValueError, match="already"):
        register("plus", add)


def imports(name: str) -> set[str]:
    """The files of both rooms that a file imports, for type checks and in functions as well."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {f"{m.removeprefix('unity_jax.').replace('.', '/')}.py" for m in modules}
    return found & FILES.keys()


def test_what_is_imported_does_not_import_back():
    needs = {name: imports(name) for name in FILES}
    order: list[str] = []
    while len(order) < len(needs):
        ready = [n for n in needs if n not in order and needs[n] <= {*order}]
        assert ready, f"in a circle: {sorted(n for n in needs if n not in order)}"
        order += ready
    assert sum(map(len, needs.values())) > 100


def test_programs_are_rewritten_without_what_made_the_rules():
    of_rules = {name for name in FILES if name.startswith("rules/")}
    assert {name for name in FILES.keys() - of_rules if imports(name) & of_rules} == set()
