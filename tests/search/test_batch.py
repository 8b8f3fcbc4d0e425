"""Which dimensions index examples: those whose splitting divides the work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.search.planning import program as zoo
from unity_jax.program import Program, trace
from unity_jax.search.batch import batch_dims, position_dims
from unity_jax.search.rule_cache import RuleCache


def f32(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def held(program: Program, ways: int = 8) -> dict[str, int]:
    """The batch dimensions of arguments, by name."""
    found = batch_dims(program, RuleCache(), ways)
    named = zip(program.leaves, program.in_paths, strict=True)
    return {name: d for t, name in named for d in range(t.rank) if (t, d) in found}


def test_batch_dimensions_are_followed_through_the_step() -> None:
    def step(w, batch):
        def loss(w):
            h = jnp.einsum("bsd,df->bfs", batch["x"], w)
            return jnp.mean(jnp.tanh(h) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return w - g, value

    program = trace(step, (f32(6, 10), {"x": f32(4, 3, 6), "y": f32(7)}), {}, donate_argnums=0)
    assert held(program) == {"[1]['x']": 0}, "nothing is computed from y"
    rules = RuleCache()
    batch = batch_dims(program, rules, 8)
    (h,) = [t for op in program.graph.ops if op.name == "tanh" for t in op.outputs]
    assert {d for t, d in batch if t is h} == {h.shape.index(4)}
    assert {d for t, d in position_dims(program, rules, batch) if t is h} == {h.shape.index(3)}
    gradient = program.graph.producer[program.graph.outputs[0]]
    assert not any(t is o for o in gradient.outputs for t, _ in batch), "a weight has no batch dimension"


def step_of(apply):
    """A step that descends the mean of `apply(w, x)`."""

    def step(w, x):
        value, g = jax.value_and_grad(lambda w: jnp.mean(apply(w, x)))(w)
        return w - g, value

    return step


def over_time(w, x):
    """Examples are dimension 1 of x f[T, B, D]; each meets all of its own times in order."""
    return jax.lax.scan(lambda h, now: (jnp.tanh(now @ w + h @ w), h), jnp.zeros(x.shape[1:]), x)[0]


@pytest.mark.parametrize(("shape", "dim"), [((32, 8, 6), 1), ((32, 5, 6), 1)])
def test_the_batch_of_a_recurrence_is_not_its_time(shape, dim) -> None:
    assert held(trace(step_of(over_time), (f32(6, 6), f32(*shape)), {}, donate_argnums=0)) == {"[1]": dim}


def test_of_equal_dimensions_the_first_is_the_batch_unless_it_is_too_short() -> None:
    """Tokens that never meet: rows and columns divide the same work, but 5 rows divide nothing by 8."""

    def each(w, x):
        return jnp.tanh(x.reshape(-1, x.shape[-1]) @ w)

    for rows, dim in ((16, 0), (5, 1)):
        assert held(trace(step_of(each), (f32(6, 6), f32(rows, 64, 6)), {}, donate_argnums=0)) == {"[1]": dim}


def test_merged_dimensions_hold_the_batch_inside() -> None:
    """f[T, B, D] -> f[T B, D], a matmul, and back: the index is followed through the merged dimension."""

    def merged(w, x):
        y = jnp.tanh(x.reshape(-1, x.shape[-1]) @ w).reshape(x.shape)
        return over_time(w, y)

    program = trace(step_of(merged), (f32(6, 6), f32(3, 8, 6)), {}, donate_argnums=0)
    assert held(program) == {"[1]": 1}
    found = batch_dims(program, RuleCache(), 8)
    (wide,) = [op.outputs[0] for op in program.graph.ops if op.name == "tanh"]
    assert wide.shape == (24, 6) and found[wide, 0] == 3, "3 times are major to the examples"


def test_what_is_drawn_has_a_batch_of_its_own() -> None:
    """The noise of a generator is 16 rows of 4; its columns meet the weights."""

    def step(w, key, x):
        def loss(w):
            noise = jax.random.normal(key, (16, 4))
            return jnp.mean(jnp.tanh(noise @ w)) - jnp.mean(jnp.cos(x @ w))

        value, g = jax.value_and_grad(loss)(w)
        return w - g, value

    program = trace(step, (f32(4, 6), jax.eval_shape(lambda: jax.random.key(0)), f32(4096, 4)), {}, donate_argnums=0)
    found = batch_dims(program, RuleCache(), 8)
    (drawn,) = [op.outputs[0] for op in program.graph.ops if op.name == "tanh"]
    assert (drawn, 0) in found and (drawn, 1) not in found


def test_two_batches_may_meet_in_all_pairs() -> None:
    """Images and captions in a contrastive loss, each with a batch; what is known of positions is none."""

    def step(w, images, captions, positions):
        def loss(w):
            a, b = jnp.tanh(images @ w), jnp.tanh((captions + jnp.sin(positions)) @ w).mean(1)
            return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(a @ b.T)))

        value, g = jax.value_and_grad(loss)(w)
        return w - g, value

    program = trace(step, (f32(64, 64), f32(16, 64), f32(16, 8, 64), f32(8, 64)), {}, donate_argnums=0)
    assert held(program) == {"[1]": 0, "[2]": 0}
    found = batch_dims(program, RuleCache(), 8)
    pairs = [t for t, _ in found if t.shape == (16, 16)]
    assert pairs and len(pairs) == len(set(pairs)), "of all pairs one index is the batch"


def test_a_batch_goes_on_where_views_are_joined_and_cut() -> None:
    """Two views of each example go through a network together, and meet as halves of what comes out."""

    def apply(w, x):
        y = jnp.tanh(jnp.concatenate([x, 2 * x]) @ w)
        return y[:16] * y[16:]

    program = trace(step_of(apply), (f32(64, 64), f32(16, 64)), {}, donate_argnums=0)
    found = batch_dims(program, RuleCache(), 8)
    for op in program.graph.ops:
        if op.name in ("tanh", "concatenate") or (op.name == "mul" and op.outputs[0].shape == (16, 64)):
            assert {d for t, d in found if t is op.outputs[0]} == {0}, op.name


def test_a_step_without_state_has_its_batch_in_its_last_argument() -> None:
    program = trace(lambda w, x: jnp.sum(jnp.tanh(x @ w)), (f32(64, 64), f32(8, 64)), {})
    assert held(program) == {"[1]": 0}


@pytest.mark.parametrize(
    ("model", "where"),
    [
        ("wgan", {"[1]['images']": 1}),
        ("a3c", {f"[1]['{name}']": 1 for name in ("actions", "begins", "frames", "rewards")}),
        ("gpt", {"[1]['targets']": 0, "[1]['tokens']": 0}),
    ],
)
def test_batches_of_the_zoo(model, where) -> None:
    found = held(zoo(model))
    assert {name: d for name, d in found.items() if name.startswith("[1]")} == where
    assert all("variables" in name for name in found.keys() - where), "of the state only what is carried per example"
