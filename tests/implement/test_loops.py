"""What need not be in a loop is before and after it, and computes the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import models
from tests.implement import cells
from tests.numerics.harness import error
from tests.numerics.steps import slow
from tests.residuals import steps
from unity_jax.implement import batchable, batched, widened
from unity_jax.implement.record import Loops, Persistent
from unity_jax.machine.machine import Machine
from unity_jax.pcg.loops import Scan
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.residuals import Microbatch
from unity_jax.search import implementing, joint
from unity_jax.search.candidate import NO_PINS
from unity_jax.search.implementing import WIDEST, implemented
from unity_jax.search.options import SearchOptions
from unity_jax.trace import has_effects


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def divided(of):
    return of.rewritten(batched(of.graph, batchable(of.graph)), ())


def scans(graph):
    return [op for op in graph.walk() if op.name == "scan"]


def count(graph, name="dot_general"):
    return sum(op.name == name for op in graph.ops)


def products(of):
    """How many products are in the body of each loop."""
    return [count(op.bodies[0]) for op in scans(of.graph)]


def same(after, of, args, tolerance=1e-12):
    """Both programs compute the same on one device."""
    inputs = steps.flat(of, *args)
    got, want = steps.alone(after)(inputs), steps.alone(of)(inputs)
    assert max(error(w, g, 1e-3) for w, g in zip(want, got, strict=True)) < tolerance


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 64))])
def test_random_cells(seed):
    cell = cells.Cell(seed)
    args = cell.arguments()
    for fn in (cell.run, jax.grad(cell.loss, (0, 1, 2))):
        of = trace(fn, args, {})
        after = divided(of)
        if batchable(of.graph):
            same(after, of, args)
        else:
            assert after.graph is of.graph


def test_lstm_by_hand():
    """Of an x W + h V, and the gradients of x, W and V: h V and dg V^T are left."""
    args = cells.parameters(), cells.inputs()
    of = trace(jax.grad(lambda *a: (cells.lstm(*a) ** 2).sum(), (0, 1)), args, {})
    after = divided(of)
    assert (products(of), products(after)) == ([2, 4], [1, 1])
    assert count(after.graph) - count(of.graph) == 4
    forward, backward = scans(after.graph)
    assert len(backward.outputs) == 3, "two that are carried, and the gradient of the gates, once"
    assert len(forward.outputs) == len(scans(of.graph)[0].outputs)
    same(after, of, args)


def test_lines_and_passes_stay():
    args = cells.parameters(), cells.inputs()
    of = trace(jax.grad(lambda *a: (cells.lstm(*a) ** 2).sum(), (0, 1)), args, {})
    new = [op for op in divided(of).graph.ops if op.name == "dot_general"]
    assert all("cells.py" in op.source for op in new)
    assert [op.backward for op in new] == [False, True, True, True]


@pytest.mark.parametrize("reverse", [False, True])
def test_forward_alone(reverse):
    args = cells.parameters(), cells.inputs()
    of = trace(lambda *a: cells.lstm(*a, reverse=reverse), args, {})
    after = divided(of)
    assert (products(of), products(after)) == ([2], [1])
    same(after, of, args)


def flax(layer, **call):
    x = cells.inputs().swapaxes(0, 1)
    params = layer.init(jax.random.key(0), x)

    def loss(params, x):
        return (layer.apply(params, x, **call) ** 2).sum()

    return jax.grad(loss, (0, 1)), (params, x)


def rnn(cell, **config):
    return linen.RNN(cell(cells.WIDTH, param_dtype=np.float64), **config)


@pytest.mark.parametrize(
    "cell, before, left",
    [
        (linen.OptimizedLSTMCell, [2, 4], [1, 1]),
        (linen.LSTMCell, [8, 16], [4, 4]),
        (linen.GRUCell, [6, 12], [3, 3]),
        (linen.MGUCell, [4, 8], [2, 2]),
        (linen.SimpleCell, [2, 4], [1, 1]),
    ],
)
def test_flax_cells(cell, before, left):
    fn, args = flax(rnn(cell))
    of = trace(fn, args, {})
    after = divided(of)
    assert (products(of), products(after)) == (before, left)
    stacked = [t.shape for op in scans(after.graph)[1:] for t in op.outputs[Scan.of(op.params).stacked]]
    assert len(stacked) <= 4, "no gradient of a gate twice"
    same(after, of, args)


@pytest.mark.parametrize("lengths", [False, True])
def test_both_directions(lengths):
    cell = linen.OptimizedLSTMCell
    layer = linen.Bidirectional(rnn(cell), rnn(linen.GRUCell, reverse=True, keep_order=True))
    fn, args = flax(layer, seq_lengths=jnp.asarray([5, 2, 4])) if lengths else flax(layer)
    of = trace(fn, args, {})
    after = divided(of)
    assert (sum(products(of)), sum(products(after))) == (6 + 18, 2 + 6)
    same(after, of, args)


def test_checkpoint_in_the_loop():
    """What is computed again stays behind a barrier, before the loop too, where the state of each step is known."""

    def layer(params, xs):
        w, v, b = params

        @jax.checkpoint
        def step(h, x):
            h = jnp.tanh(x @ w + h @ v + b)
            return h, h * 2

        return jax.lax.scan(step, jnp.zeros((cells.ROWS, v.shape[1])), xs)[1]

    (w, v, b), xs = cells.parameters(), cells.inputs()
    args = (w[:, :4], v[:, :4], b[:4]), xs
    of = trace(jax.grad(lambda *a: (layer(*a) ** 2).sum(), (0, 1)), args, {})
    after = divided(of)
    assert (products(of), products(after)) == ([2, 6], [1, 1])
    barriers = [op for op in after.graph.walk() if op.name == "optimization_barrier"]
    assert len(barriers) > 1 and {len(op.outputs) > 1 for op in barriers} == {False, True}
    same(after, of, args)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_of_loops(remat):
    """The loop over time within the loop over layers."""

    def loss(params, xs):
        def layer(xs, params):
            return cells.lstm(params, xs), None

        return (jax.lax.scan(jax.checkpoint(layer) if remat else layer, xs, params)[0] ** 2).sum()

    params = jax.tree.map(lambda *ws: jnp.stack(ws), *(cells.parameters(cells.WIDTH, seed=i) for i in range(3)))
    args = params, cells.inputs(width=cells.WIDTH)
    of = trace(jax.grad(loss, (0, 1)), args, {})
    after = divided(of)
    inner = [op for op in scans(after.graph) if not any(o.name == "scan" for o in op.bodies[0].ops)]
    assert max(count(op.bodies[0]) for op in inner) == 1
    same(after, of, args)


def test_what_may_not_move():
    """Random bits, prints, and a body of which all is carried or elementwise."""

    def noisy(w, xs, key):
        def step(h, now):
            x, key = now
            x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)
            return jnp.tanh(x @ w + h), h

        return jax.lax.scan(step, xs[0], (xs, jax.random.split(key, len(xs))))

    def printing(w, xs, key):
        def step(h, x):
            jax.debug.print("{x}", x=(x @ w)[0, 0])
            return h + x, None

        return jax.lax.scan(step, xs[0], xs)

    def elementwise(w, xs, key):
        return jax.lax.scan(lambda h, x: (h * 0.5 + x * w[0], jnp.exp(x)), xs[0], xs)

    def own(w, xs, key):
        return jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), h), xs[0], jnp.stack([w] * 3))

    args = cells.parameters(4)[1][:, :4], cells.inputs(width=4), jax.random.key(0)
    for fn in (noisy, elementwise, own):
        of = trace(fn, args, {})
        assert not batchable(of.graph)
        assert divided(of).graph is of.graph
    of = trace(printing, args, {})
    (op,) = scans(divided(of).graph)
    assert any(has_effects(op) for op in op.bodies[0].ops) and not count(op.bodies[0])


def test_a_product_of_weights_runs_once():
    def fn(v, w, x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ (v @ w)), (h, v @ w)), x, length=3)

    args = cells.parameters(4)[1], cells.parameters(4)[1].T, cells.inputs(width=4)[0]
    of = trace(fn, args, {})
    after = divided(of)
    assert (products(of), products(after), count(after.graph)) == ([3], [1], 1)
    same(after, of, args)


def test_convolutions():
    """A cell that convolves: its input and its gradients are convolutions of all steps."""

    def layer(v, w, xs):
        def conv(x, w):
            return jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

        def step(h, x):
            h = jnp.tanh(conv(x, v) + conv(h, w))
            return h, h

        return jax.lax.scan(step, jnp.zeros((2, 6, 3)), xs)[1]

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s)) for s in ((3, 4, 3), (3, 3, 3), (5, 2, 6, 4))]
    of = trace(jax.grad(lambda *a: (layer(*a) ** 2).sum(), (0, 1, 2)), args, {})
    after = divided(of)
    kinds = [[count(op.bodies[0], "conv_general_dilated") for op in scans(p.graph)] for p in (of, after)]
    assert kinds == [[2, 4], [1, 1]]
    same(after, of, args)


def test_embedding_and_loss_in_the_loop():
    """Two layers in one cell; the gradient of the embedding is one scatter, and the loss is one of all steps."""

    def loss(params, table, tokens, targets):
        w, v, u, r, out = params

        def step(carry, now):
            h, g, total = carry
            h = jnp.tanh(table[now[0]] @ w + h @ v)
            g = jnp.tanh(h @ u + g @ r)
            found = jnp.take_along_axis(jax.nn.log_softmax(g @ out), now[1][:, None], 1)
            return (h, g, total - found.mean()), None

        zeros = jnp.zeros((cells.ROWS, cells.WIDTH))
        return jax.lax.scan(step, (zeros, zeros, 0.0), (tokens, targets))[0][2]

    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(4, n))) for n in (4, 4, 4, 4, 11)]
    tokens, targets = rng.integers(11, size=(2, 6, cells.ROWS))
    args = params, jnp.asarray(rng.normal(size=(11, 4))), jnp.asarray(tokens), jnp.asarray(targets)
    of = trace(jax.value_and_grad(loss, (0, 1)), args, {})
    after = divided(of)
    assert (products(of), products(after)) == ([5, 10], [3, 3])
    assert all(not count(op.bodies[0], "scatter-add") for op in scans(after.graph))
    assert max(np.prod(t.shape) for op in after.graph.ops for t in op.outputs) == 6 * cells.ROWS * 11
    same(after, of, args)


def test_a_loop_that_carries_nothing_is_none():
    def fn(w, xs):
        return jax.lax.scan(lambda total, x: (total + (x @ w).T @ x, x), jnp.ones((4, 4)), xs)

    args = cells.parameters(4)[1][:, :4], cells.inputs(width=4)
    of = trace(fn, args, {})
    after = divided(of)
    assert not scans(after.graph) and count(after.graph) == 2
    same(after, of, args)


def test_bfloat16():
    """Sums over steps are not less exact: at most twice as far from the run in float32 as the loop in bfloat16 is."""

    def loss(params, xs):
        return (cells.lstm(params, xs).astype(jnp.float32) ** 2).sum()

    def run(change, dtype, half):
        args = cells.parameters(dtype=jnp.float32), cells.inputs(40, dtype=jnp.float32).astype(dtype)
        args = (jax.tree.map(lambda w: w.astype(jnp.bfloat16), args[0]), args[1]) if half else args
        of = trace(jax.grad(loss, (0, 1)), args, {})
        return steps.alone(change(of))(steps.flat(of, *args))

    exact = [np.float64(x) for x in run(lambda of: of, jnp.float32, False)]
    for half in (False, True):
        found = [run(change, jnp.bfloat16, half) for change in (divided, lambda of: of)]
        for now, before, want in zip(*found, exact, strict=True):
            assert error(want, np.float64(now)) <= 2 * error(want, np.float64(before))


@pytest.mark.parametrize("name", ["lstm_lm", "seq2seq", "deep_speech"])
def test_models(name):
    """No gradient of a weight is added up step by step."""
    model = models.get(name, "tiny", dtype=jnp.float64)
    of = trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {}, donate_argnums=0)
    after = divided(of)
    recurrent = [[op for op in scans(p.graph) if op.backward and count(op.bodies[0])] for p in (of, after)]
    assert len(recurrent[0]) == len(recurrent[1]) > 1
    for old, new in zip(*recurrent, strict=True):
        assert (count(old.bodies[0]), count(new.bodies[0])) == (2, 1)
        assert len(new.outputs[Scan.of(new.params).last]) < len(old.outputs[Scan.of(old.params).last])


@pytest.mark.parametrize("on", ["v5e:1x1", "h100:8"])
def test_a_wide_cell_of_few_rows_is_divided(on):
    shapes = jax.eval_shape(lambda: (cells.parameters(512, 512, np.float32), cells.inputs(35, 24, 512, np.float32)))
    of = trace(jax.grad(lambda *a: (cells.lstm(*a) ** 2).sum(), (0, 1)), shapes, {})
    assert max(map(widened, batchable(of.graph))) < WIDEST
    made = implemented(of, Machine.preset(on), SearchOptions())
    assert [type(done) for done in made.implementations] == [Loops, Persistent][: 2 if on.startswith("v5e") else 1]
    assert all(done.saved > 0 for done in made.implementations)
    assert implemented(of, Machine.preset(on), SearchOptions(loops="xla")) is of


def test_what_one_implementation_saves_is_not_what_another_does(monkeypatch):
    """Of a loop that is no faster with its products at once a kernel may be."""
    asked = []
    monkeypatch.setattr(implementing._Price, "difference", lambda _, key, make: asked.append((key, *make())) or -1.0)
    shapes = jax.eval_shape(lambda: (jnp.ones((8, 8)), jnp.ones((4, 8, 8))))
    of = trace(lambda w, xs: jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x @ w), h), xs[0], xs), shapes, {})
    assert implemented(of, Machine.preset("v5e:1x1"), SearchOptions()) is of
    (batch, before, _), (kernel, same, _) = asked
    assert str(before) == str(same) and batch != kernel


def accumulated(w, batch):
    """Gradients that a user adds up over microbatches."""

    def add(total, x):
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2))(w), None

    return jax.lax.scan(add, jnp.zeros_like(w), batch)[0]


def chunked(w, x):
    """A loss of many classes by chunks of rows."""

    def loss(w, x):
        step = jax.checkpoint(lambda total, x: (total + jnp.sum(jax.nn.logsumexp(x @ w, axis=-1)), None))
        return jax.lax.scan(step, 0.0, x)[0]

    return jax.grad(loss, (0, 1))(w, x)


@pytest.mark.parametrize(
    ("fn", "shapes"), [(accumulated, ((64, 64), (8, 1024, 64))), (chunked, ((64, 8192), (8, 256, 64)))]
)
def test_what_is_in_a_loop_for_its_memory_stays_there(fn, shapes):
    of = trace(fn, tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), {})
    assert batchable(of.graph)
    assert implemented(of, Machine.preset("h100:8"), SearchOptions()) is of


@pytest.mark.slow
def test_a_plan_that_needs_less_memory():
    """By microbatches, and what loops compute again, where nothing can be on the host: they stack what they did not
    before."""
    machine = slow()
    devices = tuple(dataclasses.replace(device, host_bandwidth=0.0) for device in machine.devices)
    machine = dataclasses.replace(machine, devices=devices)
    model, meshes, options = models.get("lstm_lm", "tiny"), [MeshAxes(("x", "y"), (2, 4))], SearchOptions(rewrite=False)
    with jax.enable_x64(False):
        of = divided(trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {}, donate_argnums=0))
        free = joint.plan(of, machine, None, NO_PINS, meshes, [], options)
        found = joint.plan(of, machine, 0.52 * free.memory.peak_bytes, NO_PINS, meshes, [], options)
    assert {type(how) for how in found.program.savings} >= {Microbatch}
