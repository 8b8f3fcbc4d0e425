"""Which version of the code made a row: a hash of the sources that the row depends on.

    made_by(PLANNED, "mlp")     # '3f0c1d2a9b7e', and another one once anything that plans the mlp has changed

A table names the folders and files whose code its figures follow from: `PLANNED` for predictions, `COMPILED` where
programs are lowered and compiled as well. A row about a model depends on the file of that model too. What is hashed is
the text of each Python file without docstrings, lines of comment and empty lines, and every other file as it is: rows
do not go stale when a sentence changes. The versions of JAX and of the compilers are not part of it.
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
    *(f"unity_jax/{name}" for name in ("pcg", "ops", "machine", "cost", "rewrite", "search")),
    *(f"unity_jax/{name}.py" for name in ("_compat", "derivative", "pins", "program", "trace")),
    *(f"models/_{name}.py" for name in ("attention", "common", "image", "layers", "recurrent")),
    "experiments/baselines.py",
    "experiments/padded.py",
)
COMPILED = (
    "unity_jax",
    *PLANNED[-7:],
    *(f"experiments/{name}" for name in ("compiled.py", "judge", "programs.py", "validation/programs")),
)


def made_by(code: Sequence[str], model: str | None = None) -> str:
    """Twelve hexadecimal digits.

    **Arguments:** `code`: folders and files, relative to the repository; `model`: where it is of the zoo, its file
    belongs to the code.
    """
    files = [*code, f"models/{model}.py"] if model in models.names() else [*code]
    return hashlib.sha256("".join(map(_hash, sorted(set(files)))).encode()).hexdigest()[:12]


@functools.cache
def _hash(name: str) -> str:
    path = ROOT / name
    if not path.exists():
        raise FileNotFoundError(f"{path}: rows are said to depend on it")
    parts = (f"{file.relative_to(ROOT).as_posix()}\n{code_of(file)}" for file in _files(path))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


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


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """The first and last lines of every string that stands alone: of modules, classes, functions and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.end_lineno or node.lineno
