"""How the code is laid out: what depends on what, and where it is told how compilers differ."""

import ast
import functools
import importlib
import inspect
from importlib.util import resolve_name
from pathlib import Path
from types import FunctionType

import pytest

import unity_jax
from unity_jax.xla.targets import TARGETS

PACKAGE = Path(unity_jax.__file__).parent
MODULES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}


ROOMS = "aot calibration implement kernels lower machine ops pcg plan residuals search solver".split()
LAYERS = (
    "kernels pcg ops machine network xla cost calibration rewrite rules residuals implement search solver lower aot "
    "plan"
).split()
"""Rooms in their order: each builds on those before it only."""
MEMBERS = (FunctionType, property, functools.cached_property, staticmethod, classmethod)
FOR_ANNOTATIONS = {"Emitter", "Span", "View"}
"""What is imported for type checks from a module that imports the one that asks for it; nothing else may be."""


def imported(name: str) -> set[str]:
    """The modules of the package that a module imports, in functions and for type checks too; where a front door passes
    a name on, the front door."""
    tree, found = ast.parse(MODULES[name].read_text()), set()
    checked = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), name.rpartition(".")[0])
            for alias in node.names:
                module = f"{base}.{alias.name}"
                if module not in MODULES:
                    doors = f"{module}.__init__", base, f"{base}.__init__"
                    module = next((m for m in doors if m in MODULES), base)
                if alias.name not in FOR_ANNOTATIONS or not any(node in block.body for block in checked):
                    found.add(module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def test_no_modules_import_each_other():
    needs = {name: imported(name) for name in MODULES}
    assert sum(map(len, needs.values())) > 500
    order: list[str] = []
    while len(order) < len(needs):
        ready = [n for n in needs if n not in order and needs[n] <= {*order}]
        assert ready, f"in a circle: {sorted(n for n in needs if n not in order)}"
        order += ready


def test_rooms_build_on_those_before_them():
    rooms = {name.split(".")[1] for name in MODULES if name.count(".") > 1}
    assert rooms == {*LAYERS}, "each has its place in the order"
    height = {room: i for i, room in enumerate(LAYERS)}
    for name in MODULES:
        _, room, *_ = *name.split("."), ""
        above = {n for n in imported(name) if height.get(n.split(".")[1], -1) > height.get(room, len(LAYERS))}
        assert not above, f"{name} imports {sorted(above)}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_a_front_door(room):
    """It says what the room is for, and of its public names, which are few."""
    door = importlib.import_module(f"unity_jax.{room}")
    assert 0 < len(door.__all__) < 10
    assert all(name in door.__doc__ for name in door.__all__)


@pytest.mark.parametrize("package", ["unity_jax", *(f"unity_jax.{room}" for room in ROOMS)])
def test_public_names_have_docstrings(package):
    door = importlib.import_module(package)
    things = {name: getattr(door, name) for name in door.__all__}
    for name, thing in [*things.items()]:
        if inspect.isclass(thing):
            members = {a: value for a, value in vars(thing).items() if not a.startswith("_")}
            things |= {f"{name}.{a}": value for a, value in members.items() if isinstance(value, MEMBERS)}
    assert not {name for name, thing in things.items() if not inspect.getdoc(thing)}


@pytest.mark.parametrize("name", MODULES)
def test_how_compilers_differ_is_told_in_one_table(name):
    """No comparison of a compiler's name elsewhere: a difference has a name of its own, in `xla.targets`."""
    tests = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(MODULES[name].read_text()))
        if isinstance(node, ast.Compare) and "compiler" in ast.unparse(node.left)
        for side in node.comparators
        if isinstance(side, ast.Constant) and side.value in TARGETS
    ]
    assert not tests


def test_no_file_is_too_long_to_read():
    rooms = (PACKAGE.parent / room for room in ("unity_jax", "models", "experiments", "tests"))
    lengths = {str(p): len(p.read_text().splitlines()) for room in rooms for p in room.rglob("*.py")}
    assert not {p: n for p, n in lengths.items() if n > 400}
