"""Tracing: calls inlined, loops kept, lines remembered, state tied, the passes told apart."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from unity_jax.errors import UnsupportedError
from unity_jax.program import trace


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def names(program) -> list[str]:
    return [op.name for op in program.graph.walk()]


def test_calls_are_inlined_and_loops_kept() -> None:
    @jax.jit
    def inner(x):
        return jax.nn.relu(x)  # custom_jvp inside jit

    def f(x):
        y, _ = jax.lax.scan(lambda c, _: (inner(c) @ c, None), x, None, length=3)
        return jax.lax.cond(y[0, 0] > 0, jnp.sin, jnp.cos, y)

    program = trace(f, (shape(4, 4),), {})
    top = [op.name for op in program.graph.ops]
    assert "scan" in top
    assert "cond" in top
    assert not {"jit", "pjit", "custom_jvp_call"} & set(names(program))
    (loop,) = (op for op in program.graph.ops if op.name == "scan")
    assert {"max", "dot_general"} <= {op.name for op in loop.bodies[0].ops}


def test_lines_and_scopes() -> None:
    def f(x):
        with jax.named_scope("tower"):
            return jnp.tanh(x) * 2  # the line

    program = trace(f, (shape(4),), {})
    op = next(op for op in program.graph.ops if op.name == "tanh")
    assert "test_trace.py" in op.source
    assert "tower" in op.scope


def test_dead_code_goes_and_effects_stay() -> None:
    def f(x):
        jnp.sin(x)
        jax.debug.print("{}", x)
        return x + 1

    assert "sin" not in names(trace(f, (shape(4),), {}))
    assert any("debug" in n for n in names(trace(f, (shape(4),), {})))


def test_remat_keeps_its_barrier() -> None:
    def f(w, x):
        g = jax.checkpoint(lambda w: jnp.sum(jnp.sin(x @ w)))
        return jax.grad(g)(w)

    program = trace(f, (shape(4, 4), shape(2, 4)), {})
    ops = names(program)
    assert "optimization_barrier" in ops
    assert not {"remat2", "checkpoint"} & set(ops)


def test_backward_pass_is_marked_with_the_optimizer() -> None:
    def step(state, x):
        w, m = state
        loss, g = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        m = 0.9 * m + g
        return (w - 0.1 * m, m), loss

    program = trace(step, ((shape(4, 4), shape(4, 4)), shape(2, 4)), {}, donate_argnums=0)
    late = {op.name: op.backward for op in program.graph.ops}
    assert not late["tanh"]
    reads_momentum = [op for op in program.graph.ops if program.graph.inputs[1] in op.inputs]
    assert all(op.backward for op in reads_momentum)


@pytest.mark.parametrize("donate", [None, 0])
def test_state_is_tied_by_donation_or_by_path(donate: int | None) -> None:
    def step(state, x):
        return {"w": state["w"] + x.sum(), "b": state["b"] * 2}, {"loss": x.sum()}

    state = {"w": shape(3, 4), "b": shape(4)}
    program = trace(step, (state, shape(4)), {}, donate_argnums=donate)
    tied = {program.out_paths[o]: program.in_paths[i] for o, i in program.ties.items()}
    assert tied == {"[0]['b']": "[0]['b']", "[0]['w']": "[0]['w']"}


def test_state_is_tied_by_name() -> None:
    def step(old, x):
        return {"new": old * 2, "other": x}

    program = trace(step, (shape(4), shape(4)), {}, ties={"['new']": "[0]"})
    assert {program.out_paths[o]: program.in_paths[i] for o, i in program.ties.items()} == {"['new']": "[0]"}


def test_captured_arrays_become_inputs() -> None:
    table = jnp.arange(12.0).reshape(3, 4)
    program = trace(lambda x: x @ table.T, (shape(2, 4),), {})
    assert len(program.constants) == 1
    assert program.graph.inputs[0].shape == (3, 4)


def test_hash_tells_programs_apart() -> None:
    def f(scale, x):
        return x * scale

    def hashed(scale, n):
        return trace(functools.partial(f, scale), (shape(n),), {}).hash

    assert hashed(2.0, 4) == hashed(2.0, 4)
    assert len({hashed(2.0, 4), hashed(3.0, 4), hashed(2.0, 5)}) == 3


def test_refs_are_refused_with_the_line() -> None:
    def f(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return ref[...]

    with pytest.raises(UnsupportedError, match="Ref"):
        trace(f, (shape(4),), {})
