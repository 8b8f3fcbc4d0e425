"""Commands and files of `experiments/` are there wherever they are named; its modules find each other as a package."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = "experiments", "models", "tests", "unity_jax"
TEXTS = [ROOT / "README.md", ROOT / "Makefile", *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))]
MODULE = re.compile(r"""(?:-m |-m", ")(experiments(?:\.[a-z]\w*)+)""")
FILE = re.compile(r"\bexperiments/[\w/]+\.py\b")


def test_what_is_named_is_there():
    named = set()
    for text in (path.read_text() for path in TEXTS):
        named |= {*FILE.findall(text), *(f"{module.replace('.', '/')}.py" for module in MODULE.findall(text))}
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_nothing_changes_where_modules_are_sought():
    scripts = sorted((ROOT / "experiments").rglob("*.py"))
    assert [path.name for path in scripts if "sys.path" in path.read_text()] == []
    assert all((folder / "__init__.py").exists() for folder in {path.parent for path in scripts})
