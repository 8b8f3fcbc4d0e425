"""Predicted against compiled: on CPU devices here, and for TPU slices and GPU nodes where their compilers are."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import unity_jax as unity
from tests.plan.tanh_layers import BATCH, WEIGHT, planned, step
from unity_jax.aot.account import Account
from unity_jax.aot.collectives import Collective
from unity_jax.aot.compiled import Compiled, CompiledMemory
from unity_jax.aot.cycles import Cycles
from unity_jax.aot.flags import WITHOUT_TRITON
from unity_jax.aot.topologies import compiled_for
from unity_jax.plan import verify as verifying
from unity_jax.plan.verify import verify_on

tpu = pytest.mark.extra("tpu-aot")
gpu = pytest.mark.extra("gpu-aot")


@pytest.fixture(scope="module")
def plan():
    return planned("cpu:8", 3)


@pytest.fixture(scope="module")
def verified(plan):
    return verify_on(plan, "cpu:8", jax.devices())


def test_what_was_planned_is_what_is_compiled(plan, verified):
    assert verified.ok
    assert verified.differences == ()
    assert verified.predicted == plan.predicted and verified.mesh == plan.axes
    assert sum(c.count for c in verified.lowered) == sum(c.count for c in plan.predicted.collectives) > 0
    memory = verified.compiled.memory
    assert memory.argument == sum(leaf.bytes for leaf in plan.inputs)
    assert memory.alias > 0  # the weights are donated
    assert memory.peak == memory.argument + memory.output + memory.temp - memory.alias
    assert verified.compiled.cycles is None
    assert verified.compiled.account.unexplained == []


def test_the_program_is_the_one_that_runs(plan, monkeypatch):
    texts = []
    monkeypatch.setattr(verifying, "stablehlo_collectives", lambda module, axes: texts.append(str(module)) or [])
    verify_on(plan, "cpu:8", jax.devices())
    lowered = unity.auto_shard(step, donate_argnums=0, plan=plan).lower([WEIGHT] * 3, BATCH)
    assert texts == [str(lowered.compiler_ir("stablehlo"))]


def test_text(plan, verified):
    verdict, lowered, memory, *_ = str(verified).splitlines()
    assert verdict == f"step compiled for cpu:8: mesh ({plan.axes})"
    assert lowered.endswith("collectives, exactly as planned")
    assert "per device" in memory and "within the limit of 16 GiB" in memory
    assert "compute" not in str(verified)


def test_text_of_an_estimate_and_of_a_difference(verified):
    collectives = (Collective("all_gather", ("x",), 2**20, 3),)
    account = Account(Counter({"combined": 2}), ["compiled, not planned: 1 x all_gather"])
    memory, cycles = CompiledMemory(4096, 2048, 1024, 2048, 512, 5120), Cycles(3_000_000, 5, 1, 1)
    compiled = Compiled(collectives, (), account, memory, cycles, 2e-3)
    other = dataclasses.replace(
        verified,
        predicted=dataclasses.replace(verified.predicted, compute_seconds=1e-3, peak_bytes=2560),
        planned=(Collective("all_gather", ("x",), 2**20, 2),),
        differences=("all_gather over x, 1,048,576 bytes: planned 2, lowered 3",),
        memory_limit=4096.0,
        compiled=compiled,
    )
    assert not other.fits and not other.ok
    text = str(other)
    assert "NOT as planned (please report this):\n    all_gather over x" in text
    assert "5 KiB per device, 2.00x the predicted 2.5 KiB, DOES NOT FIT the limit of 4 KiB" in text
    assert "1 KiB temporaries; 512 B on the host" in text
    assert "2 ms by the compiler's own estimate, 2.00x the predicted 1 ms" in text
    assert "3e+06 cycles at 1.5 GHz of 5 instructions; 1 more have no estimate; 1 loops of unknown length" in text
    assert "  rewrites combined (2)\n    and 1 differences that no known rewrite explains:\n    compiled, not" in text
    assert text.splitlines()[-1].split() == ["all-gather", "x", "2", "2", "MiB", "3", "3", "MiB", "differs"]


class OutOfMemory:
    """A lowered program that no compiler can fit."""

    def __init__(self, lowered, status):
        self.compiler_ir, self.status = lowered.compiler_ir, status

    def compile(self, compiler_options):
        raise jax.errors.JaxRuntimeError(f"{self.status}: Ran out of memory in memory space hbm. Used 20G\nof 16G")


def test_out_of_memory_is_a_verdict(plan, monkeypatch):
    real = verifying.lower
    monkeypatch.setattr(verifying, "lower", lambda *args: OutOfMemory(real(*args), "RESOURCE_EXHAUSTED"))
    found = verify_on(plan, "cpu:8", jax.devices())
    assert found.compiled is None and not found.fits and not found.ok
    assert found.differences == ()
    assert "OUT OF MEMORY in the compiler; predicted" in str(found) and "Used 20G" in str(found)
    monkeypatch.setattr(verifying, "lower", lambda *args: OutOfMemory(real(*args), "INTERNAL"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        verify_on(plan, "cpu:8", jax.devices())


def test_matmuls_that_no_tiles_divide_are_compiled_without_triton():
    tried = []

    class Untiled:
        def compile(self, compiler_options):
            tried.append(compiler_options)
            if len(tried) == 1:
                raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.3")
            return "compiled"

    assert compiled_for(Untiled(), "gpu") == "compiled"
    first, second = tried
    assert second == first | WITHOUT_TRITON


def test_another_number_of_devices(plan, monkeypatch):
    monkeypatch.setattr(verifying, "topology", lambda name: jax.devices()[:4])
    with pytest.raises(ValueError, match=r"topology 'v5e:2x2' has 4 devices, the plan's mesh \(.*\) has 8: plan for"):
        plan.verify("v5e:2x2")


def test_a_plan_without_its_function(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    with pytest.raises(unity.PlanError, match="does not know its function"):
        unity.Plan.load(tmp_path / "plan.json").verify("v5e:2x4")


@tpu
def test_tpu():
    found = planned("v5e:2x4", 3).verify("v5e:2x4")
    assert found.ok, str(found)
    assert found.compiled.cycles.total > 0
    assert found.compiled.cycles.endless == 0
    assert found.compiled.seconds == pytest.approx(found.compiled.cycles.total / 1.5e9)
    assert "by the compiler's own estimate" in str(found)


@tpu
def test_tpu_out_of_memory():
    weight = jax.ShapeDtypeStruct((65536, 65536), jnp.float32)
    x = jax.ShapeDtypeStruct((64, 65536), jnp.float32)
    plan = unity.plan(step, [weight] * 12, x, machine="v5e:2x4", options=unity.Options(cache=None))
    found = plan.verify("v5e:2x4")
    assert found.compiled is None
    assert "RESOURCE_EXHAUSTED" in found.failure
    assert "OUT OF MEMORY" in str(found)


@gpu
def test_gpu():
    found = planned("h100:8", 3).verify("h100:8")
    assert found.ok, str(found)
    assert found.compiled.cycles is None
