"""What compilers made of programs is kept by the text of the program."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice

from experiments.rows import Rows
from experiments.validation import kept
from unity_jax.kernels import primitive
from unity_jax.kernels.spec import Operands, Spec


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """A table and a store of its own; what was compiled since."""
    made = []
    compile_ = kept._compile
    monkeypatch.setattr(kept, "STORE", tmp_path / "store")
    monkeypatch.setattr(kept, "KEPT", Rows(tmp_path / "programs.csv", ("program",), kept.judged_as))
    monkeypatch.setattr(kept, "_compile", lambda folder, *rest: (made.append(folder.name), compile_(folder, *rest)))
    yield made
    kept._judge_of.cache_clear()


def known(step, **asked):
    lowered = jax.jit(step).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    return kept.compiled(lowered, jax.devices()[:1], "h100:1", {}, **asked)


def another_judge(monkeypatch, seconds):
    """One that says so of every program."""
    monkeypatch.setattr(kept, "judge", lambda module, topology: seconds)
    kept._judge_of.cache_clear()


def test_equal_programs_are_compiled_once(compiles):
    first = known(lambda x: x @ x)
    assert first["bytes"] >= 2 * 64 * 64 * 4 and first["judged"] > 0 and "cycles" not in first
    assert known(lambda x: x @ x) == first
    assert known(lambda x: x @ x.T)["program"] != first["program"]
    assert len(compiles) == 2


def test_another_judge_judges_again_what_is_here_and_compiles_what_is_not(compiles, monkeypatch):
    first = known(lambda x: x @ x)
    another_judge(monkeypatch, 7.0)
    assert known(lambda x: x @ x)["judged"] == 7.0 and len(compiles) == 1
    another_judge(monkeypatch, 8.0)
    (kept.STORE / first["program"] / kept.WRITTEN).unlink()
    assert known(lambda x: x @ x)["judged"] == 8.0 and len(compiles) == 2


def test_what_is_here_is_judged_again_without_its_program(compiles, monkeypatch):
    first = known(lambda x: x @ x)
    assert kept.judged_again(first["program"]) == first
    monkeypatch.setattr(kept, "judge", lambda module, topology: 6.0)
    assert kept.judged_again(first["program"]) == first, "the judge that its row names is the same"
    another_judge(monkeypatch, 7.0)
    assert kept.judged_again(first["program"]) == first | {"judged": 7.0} and len(compiles) == 1
    another_judge(monkeypatch, 8.0)
    (kept.STORE / first["program"] / kept.HLO).unlink()
    with pytest.raises(FileNotFoundError):
        kept.judged_again(first["program"])


def test_kernels_do_not_say_where_this_checkout_is():
    q = jax.ShapeDtypeStruct((1, 2, 256, 64), jnp.float32)  # which cuDNN does not take
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(lambda q: primitive.forward(Spec(), Operands(q, q, q))).trace(q)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "gpu.triton" in text and ".py" not in text


def test_the_program_itself_is_compiled_where_it_is_wanted(compiles):
    name = known(lambda x: x @ x)["program"]
    (kept.STORE / name / kept.WRITTEN).unlink()
    (kept.STORE / name / kept.HLO).unlink()
    with pytest.raises(FileNotFoundError):
        kept.module_of(name)
    assert known(lambda x: x @ x)["program"] == name and len(compiles) == 1, "its row says all"
    known(lambda x: x @ x, hlo=True)
    assert kept.module_of(name).entry and len(compiles) == 2


def test_what_a_compiler_refuses_is_kept(compiles, monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("too large\nfor this")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    assert known(lambda x: x @ x)["error"] == "too large"
    assert known(lambda x: x @ x)["error"] == "too large" and len(compiles) == 1
