"""Train steps that change `flax.nnx` objects in place, as Flax's documentation writes them, against `nnx.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.api.steps import close

pytestmark = pytest.mark.usefixtures("no_rewrites")
BATCH = 16
ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1, momentum=0.9)


def examples(seed=0, shape=(8,)):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, *shape)).astype(np.float32)
    return {"x": x, "label": rng.integers(0, 8, BATCH).astype(np.int32)}


def check(step, decorated, make, shape=(8,), steps=3, rtol=2e-4):
    """Equal results and equal objects after some steps from the same start, by a plan that is not that of one device.

    **Returns:** the objects of `nnx.jit` and ours.
    """
    expected, found, plain = make(), make(), nnx.jit(step)
    for i in range(steps):
        close(decorated(*found, examples(i, shape)), plain(*expected, examples(i, shape)), rtol=rtol)
    close(nnx.state(found), nnx.state(expected), rtol=rtol)
    plan = decorated.plan(*found, examples(0, shape))
    assert any(leaf.layout.axis_dim for leaf in plan.inputs) and not plan.replicated
    assert len(decorated._known) == 1  # what a step leaves behind is an argument of the next
    return expected, found


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


# A classifier with an optimizer and metrics


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.linear1 = nnx.Linear(8, 32, rngs=rngs)
        self.linear2 = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.linear2(nnx.relu(self.linear1(x)))


def classifier():
    model = MLP(nnx.Rngs(0))
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), metrics


def loss_fn(model, batch):
    logits = model(batch["x"])
    return cross_entropy(logits, batch), logits


def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)
    return loss


def eval_step(model, metrics, batch):
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


def test_classifier_with_metrics_and_an_evaluation_step(sharded):
    decorated = sharded(train_step)
    (expected, _, _), (model, _, metrics) = check(train_step, decorated, classifier)
    assert float(metrics.compute()["loss"]) > 0
    metrics.reset()
    evaluate = sharded(eval_step, like=decorated)
    assert evaluate(model, metrics, examples(9)) is None
    reference = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    nnx.jit(eval_step)(expected, reference, examples(9))
    close(metrics.compute(), reference.compute(), rtol=2e-4)
    layouts = {leaf.path: leaf.layout for leaf in decorated._known[0].inputs}
    plan = evaluate.plan(model, metrics, examples(9))
    model_leaves = [leaf for leaf in plan.inputs if leaf.path.startswith("[0]")]
    assert [leaf.path for leaf in model_leaves] == [f"[0].linear{i}.{k}" for i in (1, 2) for k in ("bias", "kernel")]
    assert all(leaf.layout == layouts[leaf.path] for leaf in model_leaves)


def test_a_plan_names_parameters_and_ties_them_to_what_replaces_them(sharded):
    plan = sharded(train_step).plan(*nnx.eval_shape(classifier), examples())
    program = plan.program
    assert "[1].opt_state[0].mu.linear1.kernel" in program.in_paths and "[2].loss.total" in program.in_paths
    assert program.out_paths == (*program.in_paths[:-2], "")
    assert program.ties == {i: i for i in range(len(program.in_paths) - 2)}
    assert ".linear1" in str(plan) and ".{mu,nu}" in str(plan)


# Batch statistics


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.linear = nnx.Linear(8 * 4, 8, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), window_shape=(2, 2), strides=(2, 2))
        return self.linear(x.reshape(x.shape[0], -1))


def test_batch_norm_in_training_and_evaluation(sharded):
    def make():
        model = CNN(nnx.Rngs(0))
        return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)

    def step(model, optimizer, batch):
        model.train()
        (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        optimizer.update(model, grads)
        return loss

    def evaluate(model, batch):
        model.eval()
        return loss_fn(model, batch)

    decorated = sharded(step)
    expected, found = check(step, decorated, make, shape=(4, 4, 1))
    assert np.abs(found[0].norm.mean[...]).max() > 1e-3
    mean = np.asarray(found[0].norm.mean[...])
    batch = examples(5, (4, 4, 1))
    close(sharded(evaluate, like=decorated)(found[0], batch), nnx.jit(evaluate)(expected[0], batch), rtol=2e-4)
    assert found[0].norm.use_running_average and (np.asarray(found[0].norm.mean[...]) == mean).all()


# Random streams


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.linear1 = nnx.Linear(8, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear2 = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x, rngs):
        x = self.dropout(nnx.relu(self.linear1(x)) + 1.0)
        return self.linear2(x + 0.1 * rngs.noise.normal(x.shape)), x == 0


def test_dropout_and_streams_draw_the_same_bits(sharded):
    def make():
        model = Noisy(nnx.Rngs(params=0, dropout=1))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), nnx.Rngs(noise=2)

    def step(model, optimizer, rngs, batch):
        def loss(model, rngs):
            logits, mask = model(batch["x"], rngs)
            return cross_entropy(logits, batch), mask

        (value, mask), grads = nnx.value_and_grad(loss, has_aux=True)(model, rngs)
        optimizer.update(model, grads)
        return value, mask

    decorated = sharded(step)
    expected, found = check(step, decorated, make)
    assert int(found[2].noise.count[...]) == 3 and int(found[0].dropout.rngs.count[...]) > 0
    (_, a), (_, b) = nnx.jit(step)(*expected, examples()), decorated(*found, examples())
    assert (np.asarray(a) == np.asarray(b)).all() and 0.4 < np.asarray(a).mean() < 0.6


# Several models and optimizers


def test_two_models_with_an_optimizer_each(sharded):
    """A generator and a discriminator, trained in turn within one step."""

    def make():
        generator, discriminator = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(1))
        optimizers = {"g": nnx.Optimizer(generator, ADAM, wrt=nnx.Param)}
        return generator, discriminator, optimizers | {"d": nnx.Optimizer(discriminator, SGD, wrt=nnx.Param)}

    def step(generator, discriminator, optimizers, batch):
        def judge(discriminator, fake):
            real, fake = discriminator(batch["x"])[:, 0], discriminator(fake)[:, 0]
            return jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(fake))

        def deceive(generator):
            return jnp.mean(jax.nn.softplus(-discriminator(generator(batch["x"]))[:, 0]))

        d_loss, grads = nnx.value_and_grad(judge)(discriminator, jax.lax.stop_gradient(generator(batch["x"])))
        optimizers["d"].update(discriminator, grads)
        g_loss, grads = nnx.value_and_grad(deceive)(generator)
        optimizers["g"].update(generator, grads)
        return {"d": d_loss, "g": g_loss}

    decorated = sharded(step, donate_argnums=(0, 1, 2))
    check(step, decorated, make, steps=2)
    paths = decorated._known[0].program.in_paths
    assert "[2]['d'].opt_state[0].trace.linear1.kernel" in paths and "[1].linear2.bias" in paths


# Shared modules


class Tied(nnx.Module):
    """A language model whose last layer is its embedding, and whose two blocks are one."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(8, 16, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs)])
        self.blocks.append(self.blocks[0])
        self.readout = self.embed

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + nnx.gelu(block(x))
        return self.readout.attend(x)


def test_shared_modules_and_arguments_are_one_state(sharded):
    def make():
        model = Tied(nnx.Rngs(0))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), model.embed

    def step(model, optimizer, embed, batch):
        assert model.readout is model.embed is embed and model.blocks[0] is model.blocks[1]

        def loss(model):
            return cross_entropy(model(batch["label"]), {"label": (batch["label"] + 1) % 8})

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value, embed

    decorated = sharded(step)
    expected, found = make(), make()
    for i in range(3):
        reference, _ = nnx.jit(step)(*expected, examples(i))
        loss, embed = decorated(*found, examples(i))
        close(loss, reference, rtol=2e-4)
        assert embed is found[2] is found[0].embed is found[0].readout and found[0].blocks[0] is found[0].blocks[1]
    close(nnx.state(found), nnx.state(expected), rtol=2e-4)
    paths = [p for p in decorated._known[0].program.in_paths if not p.startswith("[1]")]
    assert paths[:3] == ["[0].blocks[0].bias", "[0].blocks[0].kernel", "[0].embed.embedding"] and "[2]" not in paths[3]


# Transformers


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + nnx.gelu(self.mlp(x))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.project = nnx.Linear(4, 16, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        x = self.project(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(axis=1))


def update(model, optimizer, batch):
    (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    optimizer.update(model, grads)
    return loss


def test_transformer(sharded):
    def make():
        model = Transformer(nnx.Rngs(0))
        return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)

    decorated = sharded(update)
    check(update, decorated, make, shape=(8, 4), steps=2)
    assert "[0].layers[1].attention.query.kernel" in decorated._known[0].program.in_paths


class Stack(nnx.Module):
    """Layers made by `nnx.vmap`, run by `nnx.scan`."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs):
            return nnx.Linear(8, 8, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return x + nnx.gelu(layer(x))

        return run(x, self.layers)


def test_layers_under_scan(sharded):
    def make():
        model = Stack(nnx.Rngs(0))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    check(update, sharded(update), make)
