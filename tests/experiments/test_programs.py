"""What compilers made of programs is kept by the text of the program."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))  # scripts import each other by name

import programs
from rows import Rows


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """A table and a store of its own; what was compiled since."""
    made = []
    compile_ = programs._compile
    monkeypatch.setattr(programs, "STORE", tmp_path / "store")
    monkeypatch.setattr(programs, "KEPT", Rows(tmp_path / "programs.csv", ("program",), programs.JUDGED))
    monkeypatch.setattr(programs, "_compile", lambda folder, *rest: (made.append(folder.name), compile_(folder, *rest)))
    return made


def known(step, **asked):
    lowered = jax.jit(step).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    return programs.compiled(lowered, jax.devices()[:1], "h100:1", {}, **asked)


def test_equal_programs_are_compiled_once(compiles):
    first = known(lambda x: x @ x)
    assert first["bytes"] >= 2 * 64 * 64 * 4 and first["judged"] > 0 and "cycles" not in first
    assert known(lambda x: x @ x) == first
    assert known(lambda x: x @ x.T)["program"] != first["program"]
    assert len(compiles) == 2


def test_another_judge_judges_again_what_is_here_and_compiles_what_is_not(compiles, monkeypatch):
    first = known(lambda x: x @ x)
    monkeypatch.setattr(programs, "judge", lambda module, topology: 7.0)
    monkeypatch.setattr(programs, "KEPT", Rows(programs.KEPT.path, ("program",), ("experiments/judge",)))
    assert known(lambda x: x @ x)["judged"] == 7.0 and len(compiles) == 1
    monkeypatch.setattr(programs, "KEPT", Rows(programs.KEPT.path, ("program",), ("experiments/rows.py",)))
    (programs.STORE / first["program"] / programs.WRITTEN).unlink()
    assert known(lambda x: x @ x)["judged"] == 7.0 and len(compiles) == 2


def test_what_is_here_is_judged_again_without_its_program(compiles, monkeypatch):
    first = known(lambda x: x @ x)
    assert programs.judged_again(first["program"]) == first
    monkeypatch.setattr(programs, "judge", lambda module, topology: 7.0)
    assert programs.judged_again(first["program"]) == first, "the judge that its row names is the same"
    monkeypatch.setattr(programs, "KEPT", Rows(programs.KEPT.path, ("program",), ("experiments/judge",)))
    assert programs.judged_again(first["program"]) == first | {"judged": 7.0} and len(compiles) == 1
    monkeypatch.setattr(programs, "KEPT", Rows(programs.KEPT.path, ("program",), ("experiments/rows.py",)))
    (programs.STORE / first["program"] / programs.HLO).unlink()
    with pytest.raises(FileNotFoundError):
        programs.judged_again(first["program"])


def test_the_program_itself_is_compiled_where_it_is_wanted(compiles):
    name = known(lambda x: x @ x)["program"]
    (programs.STORE / name / programs.WRITTEN).unlink()
    (programs.STORE / name / programs.HLO).unlink()
    with pytest.raises(FileNotFoundError):
        programs.module_of(name)
    assert known(lambda x: x @ x)["program"] == name and len(compiles) == 1, "its row says all"
    known(lambda x: x @ x, hlo=True)
    assert programs.module_of(name).entry and len(compiles) == 2


def test_what_a_compiler_refuses_is_kept(compiles, monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("too large\nfor this")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    assert known(lambda x: x @ x)["error"] == "too large"
    assert known(lambda x: x @ x)["error"] == "too large" and len(compiles) == 1
