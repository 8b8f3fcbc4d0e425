"""Microbatches compute what the whole batch does, or the line is told that needs all of it at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.residuals import steps
from unity_jax.residuals.microbatch import microbatched
from unity_jax.residuals.region import NoRegionError


def by_microbatches(of, args, parts, batched):
    """The program with microbatches of the arguments at these positions, whose first dimension is the batch."""
    leaves = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    inputs = of.graph.inputs[len(of.constants) :]
    rows = [(t, 0) for t, arg in zip(inputs, leaves, strict=True) if arg in batched]
    return of.rewritten(microbatched(of.graph, rows, parts).graph, ())


def loop(changed):
    (op,) = (op for op in changed.graph.ops if op.name == "scan")
    return op


def check(loss, args, batched, parts):
    of = steps.program(steps.sgd(loss), *args)
    changed = by_microbatches(of, args, parts, batched)
    assert loop(changed).params["length"] == parts
    steps.same(changed, of, args)
    return changed


@pytest.mark.parametrize("parts", [2, 4, 16])
def test_layers_are_computed_by_microbatches(parts):
    changed = check(steps.mlp, (steps.parameters(), steps.batch()), {1}, parts)
    products = [op for op in changed.graph.walk() if op.name == "dot_general"]
    assert products and all(op not in changed.graph.ops for op in products)


@pytest.mark.parametrize("parts", [2, 8])
def test_dropout_masks_are_those_of_the_whole_batch(parts):
    changed = check(steps.dropped, (steps.parameters(), steps.batch(), jax.random.key(3)), {1}, parts)
    drawn = [op for op in changed.graph.walk() if op.name == "random_bits"]
    assert drawn and all(op.outputs[0].shape[0] == 16 // parts for op in drawn)


def test_what_is_drawn_with_a_key_for_each_example_is_the_same():
    def noisy(params, x, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)
        return steps.mlp(params, x + noise)

    check(noisy, (steps.parameters(1), steps.batch(), jax.random.split(jax.random.key(0), 16)), {1, 2}, 4)


def test_a_masked_mean_has_the_count_of_the_whole_batch():
    """It is computed before: of weights, not of logits."""
    changed = check(steps.classifier, steps.examples(16, 8), {1, 2, 3}, 4)
    before = changed.graph.ops[: changed.graph.ops.index(loop(changed))]
    assert "reduce_sum" in {op.name for op in before}
    assert all(t.shape[-1:] != (100,) or t.rank == 2 for op in before for t in op.outputs)


def scanned(params, x):
    def layer(x, weights):
        v, w = weights
        return x + jnp.tanh(jax.nn.gelu(x @ v) @ w), None

    return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).mean()


def test_loops_over_layers_are_within_the_loop_over_microbatches():
    params = tuple(np.stack(p) for p in zip(*steps.parameters(), strict=True))
    changed = check(scanned, (params, steps.batch()), {1}, 4)
    assert [op.params["length"] for op in loop(changed).bodies[0].ops if op.name == "scan"] == [3, 3]


def test_what_is_made_of_weights_behind_barriers_is_computed_anew():
    """`jax.checkpoint` ties the weights of an unrolled layer to what has rows, and then they are cast."""

    def cast(params, x):
        @jax.checkpoint
        def layer(x, v, w):
            v, w = v.astype(np.float32), w.astype(np.float32)
            return x + jnp.tanh(jax.nn.gelu(x @ v) @ w)

        for v, w in params:
            x = layer(x, v, w)
        return (x**2).mean()

    params = steps.parameters(dtype=np.float16)
    changed = check(cast, (params, steps.batch()), {1}, 4)
    within = [op.name for op in loop(changed).bodies[0].ops]
    assert "optimization_barrier" not in [op.name for op in changed.graph.ops]
    assert within.count("optimization_barrier") == len(params)


def test_random_bits_within_loops_over_layers_are_those_of_the_whole_batch():
    def dropped(params, x, key):
        def layer(x, now):
            v, i = now
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape)
            return x + jnp.where(kept, jnp.tanh(x @ v), 0.0), None

        return (jax.lax.scan(layer, x, (params, jnp.arange(3)))[0] ** 2).mean()

    params = np.stack([v @ w for v, w in steps.parameters()])
    check(dropped, (params, steps.batch(), jax.random.key(1)), {1}, 4)


def test_positions_in_the_batch_are_those_in_the_whole_batch():
    def weighted(params, x):
        rows = jnp.arange(x.shape[0], dtype=x.dtype)[:, None]
        return steps.mlp(params, x * rows)

    check(weighted, (steps.parameters(1), steps.batch()), {1}, 4)


def test_results_of_each_example_are_put_together():
    params, x = steps.parameters(1), steps.batch()

    def step(params, x):
        def loss(params):
            y = jnp.tanh(x @ params[0][0])
            return (y**2).mean(), y

        (value, y), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, y, y.T.reshape(-1)

    of = steps.program(step, params, x)
    changed = by_microbatches(of, (params, x), 4, {1})
    assert loop(changed)
    steps.same(changed, of, (params, x))


def test_sums_of_narrow_parts_are_added_up_in_a_wide_type():
    params, x = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (steps.parameters(1), steps.batch()))
    of = steps.program(steps.sgd(steps.mlp), params, x)
    changed = by_microbatches(of, (params, x), 4, {1})
    assert {t.dtype for t in loop(changed).outputs} == {np.dtype(np.float32)}
    steps.same(changed, of, (params, x), 2e-2)


# Where the whole batch is needed


def printed(params, x):
    y = x @ params[0][0]
    jax.debug.print("{}", y[0, 0])
    return (y**2).mean()


def ranked(params, x):
    y = jnp.sort(x @ params[0][0], axis=0)
    return (y @ params[0][1]).mean()


@pytest.mark.parametrize("loss", [steps.centred, ranked])
def test_the_line_is_told_that_needs_the_whole_batch(loss):
    args = steps.parameters(2), steps.batch()
    of = steps.program(steps.sgd(loss), *args)
    with pytest.raises(NoRegionError, match=rf"residuals/\w+.py:\d+:\d+ \({loss.__name__}\)"):
        by_microbatches(of, args, 4, {1})


def joined(params, x):
    y = jnp.concatenate([x, x]) @ params[0][0]
    return (y @ params[0][1]).mean()


def test_the_line_is_told_behind_which_there_are_no_rows():
    """Of pairs that are joined, as of a preference loss, no part is a block of rows."""
    args = steps.parameters(1), steps.batch()
    of = steps.program(steps.sgd(joined), *args)
    with pytest.raises(NoRegionError, match=rf"residuals/\w+.py:\d+:\d+ \({joined.__name__}\)"):
        by_microbatches(of, args, 4, {1})


def test_other_numbers_of_microbatches_are_refused():
    args = steps.parameters(1), steps.batch()
    of = steps.program(steps.sgd(steps.mlp), *args)
    for parts in (1, 3, 32):
        with pytest.raises(NoRegionError):
            by_microbatches(of, args, parts, {1})


def test_what_is_printed_is_printed_once():
    args = steps.parameters(1), steps.batch()
    of = steps.program(steps.sgd(printed), *args)
    changed = by_microbatches(of, args, 4, {1})
    assert [op.name for op in changed.graph.ops if "debug" in op.name or "callback" in op.name]


def test_what_is_printed_of_weights_behind_a_barrier_is_not_printed_for_each_microbatch():
    def told(params, x):
        @jax.checkpoint
        def layer(x, v, w):
            jax.debug.print("{}", (v * v).sum())
            return x + jnp.tanh(jax.nn.gelu(x @ v) @ w)

        for v, w in params:
            x = layer(x, v, w)
        return (x**2).mean()

    args = steps.parameters(2), steps.batch()
    of = steps.program(steps.sgd(told), *args)
    with pytest.raises(NoRegionError):
        by_microbatches(of, args, 4, {1})


def test_groups_of_rows_are_not_divided_otherwise():
    """Of 4 groups of 4 consecutive rows, none has the rows 0, 4, 8, 12 of 16: neither have those that go with them."""

    def grouped(params, x, groups):
        return steps.mlp(params, (x.reshape(4, 4, -1) * groups[:, None]).reshape(16, -1))

    args = steps.parameters(1), steps.batch(), steps.batch(4)
    of = steps.program(steps.sgd(grouped), *args)
    with pytest.raises(NoRegionError, match=r"test_microbatch.py:\d+|steps.py:\d+"):
        by_microbatches(of, args, 4, {1})
