"""A plan as one page: well-formed, complete, and drawn to scale."""

import re
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import pytest

import unity_jax as unity


def step(w, v, x):
    return (jnp.tanh(x @ w) @ v).sum()


@pytest.fixture(scope="module")
def plan():
    f32 = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 4096), (4096, 4096), (64, 4096))]
    return unity.plan(step, *f32, machine="v5e:2x4", options=unity.Options(cache=None))


def test_page_shows_the_tables_the_timeline_and_the_program(plan, tmp_path):
    plan.to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    picture, _ = re.findall("<svg.*?</svg>", text, re.DOTALL)
    boxes = ElementTree.fromstring(picture).findall("{http://www.w3.org/2000/svg}rect")
    told = "".join(box[0].text for box in boxes)
    assert all(c.kind.replace("_", "-") in told.replace("_", "-") for c in plan.predicted.collectives)
    ends = [float(box.get("x")) + float(box.get("width")) for box in boxes]
    assert max(ends) == pytest.approx(float(picture.split('viewBox="0 0 ')[1].split()[0]), abs=0.2)
    assert "Collectives in one step" in text
    assert "dot_general" in text.split("The planned program")[1]


def test_page_of_a_loaded_plan_has_the_tables(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    unity.Plan.load(tmp_path / "plan.json").to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "Layouts" in text
    assert "<svg" not in text
