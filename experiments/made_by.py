"""Which version of the code made a row: a hash of the sources that the row depends on.

    made_by(PLANNED, "mlp")     # '3f0c1d2a9b7e', and another one once anything that plans the mlp has changed

A table names the folders and files whose code its figures follow from: `PLANNED` for predictions, `COMPILED` where
programs are lowered and compiled as well; and of its own script what makes a row, as `script.py:function`. A row about
a model depends on the file of that model too, and on those that it imports, one about a validation program on its file.
What is hashed is the text of each Python file without docstrings, lines of comment and empty lines, and every other
file as it is: rows do not go stale when a sentence changes. The versions of JAX and of the compilers are not part of
it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import models

ROOT = Path(__file__).resolve().parent.parent
PLANNED = (
    *(f"unity_jax/{name}" for name in ("pcg", "ops", "machine", "cost", "network", "xla")),
    *(f"unity_jax/{name}" for name in ("implement", "residuals", "rewrite", "search")),
    *(f"unity_jax/kernels/{name}.py" for name in ("bits", "cudnn", "primitive", "spec", "tiles")),
    *(f"unity_jax/{name}.py" for name in ("_compat", "nnx_nodes", "objects", "pins", "program", "specs", "trace")),
    "models/__init__.py",
    "models/_common.py",
    "experiments/baselines.py",
    "experiments/padded.py",
)
COMPILED = (
    *PLANNED,
    "unity_jax/kernels",
    "unity_jax/lower",
    "unity_jax/planning.py",
    *(f"unity_jax/plan/{name}.py" for name in ("devices", "file", "make", "record", "value")),
    *(f"unity_jax/aot/{name}.py" for name in ("bundles", "collectives", "cycles", "duplicates", "hlo", "topologies")),
    *(f"experiments/validation/{name}" for name in ("compiled.py", "judge", "kept.py")),
    *(f"experiments/validation/programs/{name}.py" for name in ("train_step", "zoo")),
)


def made_by(code: Sequence[str], model: str | None = None, root: Path | None = None) -> str:
    """Twelve hexadecimal digits.

    **Arguments:** `code`: folders, files and `file.py:definition`s, relative to the repository; `model`: where it is of
    the zoo, or a validation program, its file belongs to the code; `root`: another checkout of the repository than this
    one, and as much of the code as was there.
    """
    files = {*code, *(_model(model, root or ROOT) if model in models.names() else _program(model, root or ROOT))}
    if root is not None:
        files = {name for name in files if (root / name.partition(":")[0]).exists()}
    root = root or ROOT
    return hashlib.sha256("".join(_hash(name, root) for name in sorted(files)).encode()).hexdigest()[:12]


@functools.cache
def _model(name: str, root: Path) -> frozenset[str]:
    """The file of a model, and those that it imports."""
    found = {file := f"models/{name}.py"}
    for node in ast.walk(ast.parse((root / file).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("models."):
            found |= _model((node.module or "").removeprefix("models."), root)
        elif isinstance(node, ast.ImportFrom) and node.module == "models":
            inside = [a.name for a in node.names if (root / "models" / f"{a.name}.py").exists()]
            found = found.union(*(_model(other, root) for other in inside))
    return frozenset(found)


def _program(name: str | None, root: Path) -> tuple[str, ...]:
    """The file of a validation program, if it is one."""
    file = f"experiments/validation/programs/{name}.py"
    return (file,) if (root / file).exists() else ()


@functools.cache
def _hash(name: str, root: Path) -> str:
    file, _, definition = name.partition(":")
    path = root / file
    if not path.exists():
        raise FileNotFoundError(f"{path}: rows are said to depend on it")
    if definition:
        text = f"{name}\n{_definition(path, definition)}"
    else:
        text = "\n".join(f"{file.relative_to(root).as_posix()}\n{code_of(file)}" for file in _files(path))
    return hashlib.sha256(text.encode()).hexdigest()


def _definition(path: Path, name: str) -> str:
    """The code of a function or constant of a file."""
    lines = path.read_text().splitlines(keepends=True)
    for first, last in _docstrings(ast.parse("".join(lines))):
        lines[first - 1 : last] = [f"{_indent(lines[first - 1])}pass\n", *[""] * (last - first)]
    for node in ast.parse("".join(lines)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        if name in (getattr(t, "name", None) or getattr(t, "id", None) for t in targets):
            return ast.unparse(node)
    raise FileNotFoundError(f"{path} defines no {name}: rows are said to depend on it")


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        yield from (p for p in inside if "__pycache__" not in p.parts and p.suffix != ".pyc")


def code_of(file: Path) -> str:
    """The text of a file; of a Python file without docstrings, lines of comment and empty lines."""
    text = file.read_text()
    if file.suffix != ".py":
        return text
    lines = text.splitlines()
    for first, last in _docstrings(ast.parse(text)):
        lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """The first and last lines of every string that stands alone: of modules, classes, functions and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.end_lineno or node.lineno
