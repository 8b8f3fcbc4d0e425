"""How the code is laid out: what depends on what, and where it is told how compilers differ."""

import ast
from pathlib import Path

import pytest

import unity_jax
from unity_jax.xla.targets import TARGETS

PACKAGE = Path(unity_jax.__file__).parent
MODULES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}


def imported(name: str) -> set[str]:
    """The modules of the package that a module needs to be imported: not what is for type checks, or in functions."""
    found = set()
    for node in ast.parse(MODULES[name].read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unity_jax"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = name.rsplit(".", node.level)[0]
            found |= {f"{base}.{node.module}" if node.module else f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
    return {f for f in found if f in MODULES}


def test_no_modules_import_each_other():
    needs = {name: imported(name) for name in MODULES if not name.endswith("__init__")}
    assert sum(map(len, needs.values())) > 500
    order: list[str] = []
    while len(order) < len(needs):
        ready = [n for n in needs if n not in order and needs[n] & needs.keys() <= {*order}]
        assert ready, f"in a circle: {sorted(n for n in needs if n not in order)}"
        order += ready


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


@pytest.mark.parametrize("name", MODULES)
def test_no_file_is_too_long_to_read(name):
    assert len(MODULES[name].read_text().splitlines()) <= 400
