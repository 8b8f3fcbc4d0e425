"""The table of rule ops is the one place that knows them; programs are rewritten without what made the rules."""

import ast
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import unity_jax
from unity_jax.ops.rule import RULES
from unity_jax.ops.rules import POINTWISE
from unity_jax.pcg.graph import Tensor
from unity_jax.rewrite import table
from unity_jax.rewrite.dims import CannotEmit
from unity_jax.rewrite.emitter import Emitter
from unity_jax.rewrite.sizes import SIZES
from unity_jax.rewrite.table import OPS, SEEN_AS, register, traits
from unity_jax.trace import build

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


def drawn(function, rng):
    """Shapes of operands, and parameters, that a function takes."""
    a, b, c, d = map(int, rng.integers(2, 7, 4))
    if function is lax.dot_general:
        return [(a, b, c), (c, a, d)], {"dimension_numbers": (((2,), (0,)), ((0,), (1,)))}
    params = {
        lax.reshape: {"new_sizes": (a * b, c)},
        lax.transpose: {"permutation": (2, 0, 1)},
        lax.broadcast_in_dim: {"shape": (a, d, b, c), "broadcast_dimensions": (0, 2, 3)},
        lax.slice: {"start_indices": (0, 1, 0), "limit_indices": (a, b, c - 1), "strides": (1, 1, 1)},
        lax.reduce_sum: {"axes": (2, 0)},
        lax.squeeze: {"dimensions": (1,)},
    }
    shape = (a, 1, c) if function is lax.squeeze else (a, b, c)
    return [shape] * (2 if function in (lax.add, lax.sub, lax.mul) else 1), params.get(function, {})


@pytest.mark.parametrize("function", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_sizes_make_the_op_that_jax_traces(function, dtype):
    precise = (("precision", (lax.Precision.HIGHEST,) * 2), ("preferred_element_type", np.dtype(dtype)))
    like = precise if function is lax.dot_general else ()
    emitter = Emitter(SimpleNamespace(along={}, dims=None), SimpleNamespace(emitted={}), {}, False)
    rng = np.random.default_rng(0)
    for _ in range(4):
        shapes, params = drawn(function, rng)
        operands = [Tensor(s, jnp.dtype(dtype)) for s in shapes]
        found = emitter.call(function, *operands, like=like, **params)
        arrays = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in operands]
        (want,) = build(jax.make_jaxpr(lambda *xs, p={**params, **dict(like)}: function(*xs, **p))(*arrays)).ops
        made = emitter.ops[-1]
        assert made.outputs == (found,) and made.signature is want.signature and made.params == want.params
    assert len(emitter.view.emitted) == 1, "traced once"


@pytest.mark.parametrize(
    ("function", "shapes", "params"),
    [
        (lax.add, [(2, 3), (3, 2)], {}),
        (lax.transpose, [(2, 3)], {"permutation": (0, 0)}),
        (lax.broadcast_in_dim, [(2, 3)], {"shape": (2, 3, 4), "broadcast_dimensions": (0,)}),
        (lax.broadcast_in_dim, [(2,)], {"shape": (3,), "broadcast_dimensions": (0,)}),
        (lax.squeeze, [(2, 3)], {"dimensions": (0,)}),
        (lax.slice, [(2,)], {"start_indices": (1,), "limit_indices": (3,), "strides": (1,)}),
        (lax.dot_general, [(2, 3), (2, 3)], {"dimension_numbers": (((1,), (0,)), ((), ()))}),
    ],
)
def test_sizes_refuse_what_jax_refuses(function, shapes, params):
    operands = [Tensor(s, jnp.dtype("float32")) for s in shapes]
    with pytest.raises((TypeError, ValueError)):
        jax.eval_shape(lambda *xs: function(*xs, **params), *(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in operands))
    with pytest.raises(CannotEmit):
        SIZES[function](*operands, **params)
