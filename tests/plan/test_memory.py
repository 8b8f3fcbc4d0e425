"""The memory of a plan by kind and by line: all of what is predicted, each value where it belongs."""

import re
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import unity_jax as unity
from tests.residuals import steps
from unity_jax.plan import memory

HERE = "residuals/steps.py"


def planned(step, *args, machine="h100:8", limit=None, **options):
    settings = {"machine": machine, "memory_limit": limit, "donate_argnums": 0}
    return unity.plan(step, *args, options=unity.Options(cache=None, rewrite=False, **options), **settings)


@pytest.fixture(scope="module")
def adam():
    """A step with an optimizer that keeps two arrays for each weight."""
    optimizer, params = optax.adam(1e-3), steps.parameters(6, 64, 512)

    def step(state, x):
        params, kept = state
        loss, gradients = jax.value_and_grad(steps.mlp)(params, x)
        updates, kept = optimizer.update(gradients, kept)
        return (optax.apply_updates(params, updates), kept), loss

    return step, (params, optimizer.init(params)), steps.batch(4096, 64)


@pytest.mark.parametrize("machine", ["h100:8", "v5e:2x4", "cpu:8", "h100:1"])
def test_all_of_the_predicted_memory_is_told(adam, machine):
    step, state, x = adam
    plan = planned(step, state, x, machine=machine)
    found = plan.memory()
    assert sum(found.kinds.values()) == found.peak_bytes == plan.predicted.peak_bytes
    assert sum(n for *_, n in found.lines) == found.peak_bytes - found.kinds.get(memory.GAPS, 0)
    times, moments = zip(*found.over_step, strict=True)
    assert list(times) == sorted(times) and times[-1] == pytest.approx(plan.predicted.step_seconds)
    assert max(sum(m.values()) for m in moments) == found.peak_bytes - found.kinds.get(memory.GAPS, 0)
    assert set(found.kinds) <= set(memory.KINDS)

    for kind, where in PATHS.items():
        assert found.kinds[kind] == sum(leaf.bytes for leaf in plan.inputs if leaf.path.startswith(where))
    assert {m[memory.WEIGHTS] for m in moments} == {found.kinds[memory.WEIGHTS]}  # there all the time
    if not machine.startswith("v5e"):  # there they are on the chip
        assert max(m.get(memory.GRADIENTS, 0) for m in moments) > 0


PATHS = {memory.WEIGHTS: "[0][0]", memory.STATE: "[0][1]", memory.ARGUMENTS: "[1]"}


def test_what_is_computed_again_is_not_kept():
    args = steps.parameters(6, 64, 512), steps.batch(4096, 64)
    free = planned(steps.sgd(steps.mlp), *args)
    plan = planned(steps.sgd(steps.mlp), *args, limit=0.6 * free.predicted.peak_bytes)
    assert plan.saving
    kept = [max(m.get(memory.KEPT, 0) for _, m in p.memory().over_step) for p in (free, plan)]
    again = [max(m.get(memory.AGAIN, 0) for _, m in p.memory().over_step) for p in (free, plan)]
    assert kept[1] < 0.6 * kept[0] and again[0] == 0 < again[1]
    by_line = {where for where, kind, _ in free.memory().lines if kind == memory.KEPT}
    assert any(HERE in where for where in by_line)


def test_a_loop_is_told_by_what_is_live_in_it():
    def step(w, x):
        def layer(x, _):
            return jnp.tanh(jnp.tanh(x @ w) @ w), None

        return jax.lax.scan(jax.checkpoint(layer), x, None, 4)[0].sum()

    def train(w, x):
        return w - jax.grad(step)(w, x)

    found = planned(train, np.ones((64, 64), np.float32), np.ones((4096, 64), np.float32), machine="h100:1").memory()
    assert sum(found.kinds.values()) == found.peak_bytes
    assert found.kinds[memory.KEPT] >= 4 * 4096 * 64 * 4  # what goes into each layer
    assert found.kinds[memory.AGAIN] >= 4096 * 64 * 4


def test_gradients_that_a_loop_adds_up_are_told_as_such():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def step(w, x):
        def add(total, x):
            return total + jax.grad(loss)(w, x), None

        return w - 1e-3 * jax.lax.scan(add, jnp.zeros_like(w), x)[0]

    w, x = np.ones((256, 256), np.float32), np.ones((4, 64, 256), np.float32)
    found = planned(step, w, x, machine="h100:1", loops="xla").memory()
    assert {m.get(memory.GRADIENTS, 0) for _, m in found.over_step[1:-1]} == {w.nbytes}


def test_as_text_and_as_a_picture(adam, tmp_path):
    step, state, x = adam
    plan = planned(step, state, x)
    text = str(plan.memory())
    assert text.startswith("Memory of step on each device: ") and HERE in text
    assert re.search(r"kept for the backward pass +[0-9.]+ MiB +[0-9.]+%", text)
    plan.to_html(tmp_path / "plan.html")
    pictures = re.findall("<svg.*?</svg>", (tmp_path / "plan.html").read_text(encoding="utf-8"), re.DOTALL)
    (_, width, height) = map(float, re.search(r'viewBox="0 (0) (\d+) (\d+)"', pictures[1]).groups())
    areas = ElementTree.fromstring(pictures[1]).findall("{http://www.w3.org/2000/svg}polygon")
    assert {a[0].text.split(",")[0] for a in areas} >= {memory.WEIGHTS, memory.STATE, memory.KEPT, memory.GRADIENTS}
    corners = [tuple(map(float, c.split(","))) for a in areas for c in a.get("points").split()]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in corners)


def test_a_loaded_plan_does_not_know(adam, tmp_path):
    step, state, x = adam
    planned(step, state, x, machine="h100:1").save(tmp_path / "plan.json")
    with pytest.raises(unity.PlanError, match="does not know its function"):
        unity.Plan.load(tmp_path / "plan.json").memory()
