"""Rows say which version of the code made them; a row of this version is what this version makes."""

import ast
import shutil

import pytest

from experiments import made_by, readme, sections
from experiments.made_by import PLANNED, code_of
from experiments.rows import MADE_BY, Rows
from experiments.tables import ablation, expert_plans, mesh_sweep, unity_table, zoo_table
from experiments.tools import golden

CHEAP = {
    zoo_table: {"model": "mlp", "machine": "h100:8"},
    unity_table: {"model": "mlp", "machine": "v100-summit:1x6"},
    expert_plans: {"model": "llama", "size": "7b", "machine": "v5p:4x4x4"},
    mesh_sweep: {"devices": "8"},
    ablation: {"machine": "h100:8", "layers": "1", "reuse": "all reuse"},
}
"""The row of each table that is made again: the tables that are planned and not compiled. A change of what they follow
from makes at least these rows again."""
TIMED = ("planning CPU seconds", "planning seconds", MADE_BY)


def made_again(script, row):
    """What the script makes today of a row's settings."""
    settings = {s: int(row[s]) if row[s].isdecimal() else row[s] for s in script.SETTINGS}
    if script is expert_plans:
        return script.measure(row)
    return script.measure(*settings.values())


@pytest.mark.parametrize("script", CHEAP, ids=lambda s: s.__name__)
def test_a_row_is_what_this_version_makes(script):
    section = next(s for s in sections.SECTIONS if s.script is script)
    row = next(r for r in section.rows if CHEAP[script].items() <= r.items())
    assert not section.file_rows.is_stale(row), f"make it again: python -m {script.__name__} --stale ..."
    made = {name: value for name, value in made_again(script, row).items() if name not in TIMED}
    for name, value in made.items():
        stored = type(value)(float(row[name])) if isinstance(value, float) else row[name]
        what = f"{name}: another version made this row, and the hash of its code does not tell"
        assert (stored == pytest.approx(value, rel=1e-4)) if isinstance(value, float) else stored == str(value), what


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A repository of one package and one model."""
    monkeypatch.setattr(made_by, "ROOT", tmp_path)
    made_by._hash.cache_clear()
    (tmp_path / "package").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "package" / "a.py").write_text('"""One."""\n\nx = 1  # one\n')
    (tmp_path / "package" / "rules.json").write_text("[]")
    for model in ("mlp", "gpt", "bert"):
        (tmp_path / "models" / f"{model}.py").write_text("width = 8\n")
    yield tmp_path
    made_by._hash.cache_clear()


def version(model=None):
    made_by._hash.cache_clear()
    return made_by.made_by(("package",), model)


def test_the_version_follows_from_code_and_not_from_words(package):
    first, of_mlp = version(), version("mlp")
    (package / "package" / "a.py").write_text('"""Two,\n\nand more."""\n\n# Why.\nx = 1  # one\n')
    assert version() == first
    (package / "package" / "a.py").write_text('"""Two."""\nx = 2  # one\n')
    changed = version()
    assert changed != first
    (package / "package" / "rules.json").write_text("[1]")
    assert version() not in (first, changed)
    (package / "package" / "rules.json").write_text("[]")
    (package / "package" / "a.py").write_text('"""One."""\n\nx = 1  # one\n')
    assert version() == first
    (package / "models" / "mlp.py").write_text("width = 16\n")
    assert version() == first and version("mlp") != of_mlp
    (package / "package" / "b.py").write_text("")
    assert version() != first, "a file more"


def test_code_without_words(package):
    path = package / "package" / "a.py"
    path.write_text('def f():\n    """What."""\n    # How.\n\n    return "# not a comment"\n')
    assert code_of(path) == 'def f():\n    return "# not a comment"'


def test_code_that_is_not_there_is_an_error():
    for code in ("unity_jax/none", "experiments/rows.py:none"):
        with pytest.raises(FileNotFoundError, match="depend"):
            made_by.made_by((code,))


def test_code_that_was_not_there_before_is_no_part_of_what_rows_followed_from(package, tmp_path):
    before = tmp_path / "before"
    shutil.copytree(package, before)
    first = made_by.made_by(("package",), root=before)
    assert made_by.made_by(("package", "another"), root=before) == first == version()
    with pytest.raises(FileNotFoundError, match="depend"):
        made_by.made_by(("package", "another"))


def test_a_definition_by_itself(package):
    """Of a script only what makes its rows is code that they follow from, not how they are printed."""

    def version(text):
        made_by._hash.cache_clear()
        (package / "package" / "script.py").write_text(text)
        return made_by.made_by(("package/script.py:measure",))

    first = version('X = 1\n\n\ndef measure():\n    """Words."""\n    return 1\n')
    assert version("X = 2\n\n\ndef measure():\n    # Others.\n    pass\n    return 1\n") == first
    assert version("X = 1\n\n\ndef measure():\n    return 2\n") != first


def test_a_model_follows_from_those_that_it_imports():
    assert {"models/lora.py", "models/llama.py", "models/_layers.py"} <= set(made_by._model("lora", made_by.ROOT))
    assert "models/resnet.py" in made_by._model("faster_rcnn", made_by.ROOT)


def test_a_row_about_a_validation_program_follows_from_its_file(package):
    first = version("gru"), version("mlp")
    (folder := package / "experiments" / "validation" / "programs").mkdir(parents=True)
    (folder / "gru.py").write_text("width = 8\n")
    assert version("gru") != first[0] and version("mlp") == first[1]


IRRELEVANT = {
    "errors",
    *(f"kernels/{name}" for name in ("flash", "grid", "persistent", "task_mapping", "xla")),
    "progress",
    "text",
}
"""Of the package, what planning imports and no figure follows from."""


def test_rows_follow_from_all_that_planning_imports():
    """Modules outside of the folders that are named whole; `__init__` only passes names on."""
    found, todo = set(), ["unity_jax.search.joint", "experiments.baselines"]
    while todo:
        name = todo.pop()
        path = made_by.ROOT / name.replace(".", "/")
        if name in found or not path.with_suffix(".py").exists():
            continue
        found.add(name)
        for node in ast.walk(ast.parse(path.with_suffix(".py").read_text())):
            if isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    files = {f"{name.replace('.', '/')}.py" for name in found}
    left = {f for f in files if not any(f == code or f.startswith(code + "/") for code in PLANNED)}
    assert left == {f"unity_jax/{name}.py" for name in IRRELEVANT}


def test_rows_of_another_version_are_stale_and_made_again_when_asked(package, tmp_path):
    rows = Rows(tmp_path / "rows.csv", ("model", "n"), ("package",))
    made_by._hash.cache_clear()
    for n in (1, 2):
        rows.make({"model": "mlp", "n": n}, lambda n=n: {"x": n})
    wanted = [{"model": "mlp", "n": n} for n in (1, 2, 3)]
    assert rows.missing(wanted, stale=True) == wanted[2:]
    (package / "package" / "a.py").write_text("x = 3\n")
    made_by._hash.cache_clear()
    assert all(map(rows.is_stale, rows.found))
    assert rows.missing(wanted) == wanted[2:] and rows.missing(wanted, stale=True) == wanted
    rows.make_all(wanted[1:2], lambda w: {"x": 10 * w["n"]}, "{n}")
    assert [(r["x"], rows.is_stale(r)) for r in rows.found] == [("1", True), ("20", False)]


def test_rows_without_a_version_are_stale(tmp_path):
    (tmp_path / "old.csv").write_text("model,x\nmlp,1\n")
    rows = Rows(tmp_path / "old.csv", ("model",), PLANNED)
    assert list(map(rows.is_stale, rows.found)) == [True]


def test_the_page_counts_stale_rows_and_names_the_fewer(package, tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "RESULTS", tmp_path)
    section = sections.Section("", zoo_table, "rows.csv", lambda rows: "", lambda rows: [], ("package",))
    rows = Rows(tmp_path / "rows.csv", zoo_table.SETTINGS, ("package",))
    for model in ("mlp", "gpt", "bert"):
        rows.make({"model": model, "size": "full", "machine": "h100:8", "batch per device": 1}, dict)
    assert readme.freshness(section, section.rows).startswith("All rows")
    (package / "models" / "mlp.py").write_text("width = 32\n")
    made_by._hash.cache_clear()
    assert "1 of 3 rows are stale" in readme.freshness(section, section.rows)
    assert readme.freshness(section, section.rows).endswith(": mlp full h100:8.")
    (package / "package" / "a.py").write_text("x = 4\n")
    made_by._hash.cache_clear()
    assert readme.freshness(section, section.rows) == "**3 of 3 rows are stale**, made by another version of the code."


def test_rows_are_carried_over_where_all_plans_are_equal(package, tmp_path):
    """From a revision whose code differs: of a model with equal plans, made by that revision, and no others."""
    before = tmp_path / "before"
    shutil.copytree(package, before)
    rows = Rows(tmp_path / "rows.csv", ("model", "n"), ("package",))
    for model, n in (("mlp", 1), ("gpt", 1)):
        rows.make({"model": model, "n": n}, lambda: {"x": 3})
    (package / "package" / "a.py").write_text("x = 5\n")
    made_by._hash.cache_clear()
    rows.make({"model": "bert", "n": 1}, lambda: {"x": 4})
    assert [rows.is_stale(r) for r in rows.found] == [True, True, False]
    (package / "models" / "gpt.py").write_text("width = 64\n")  # made by neither
    made_by._hash.cache_clear()
    assert [r["model"] for r in golden.carried(rows, ["mlp", "bert"], before)] == ["mlp"]
    assert [(r["model"], r["x"], rows.is_stale(r)) for r in rows.found] == [
        ("mlp", "3", False),
        ("gpt", "3", True),
        ("bert", "4", False),
    ]
