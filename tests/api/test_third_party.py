"""Train steps from the documentation of other libraries, with nothing changed but the decorator.

Each follows the page that its docstring names, with smaller sizes and synthetic data.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, struct
from flax.training import train_state

from tests.api.steps import close

pytestmark = pytest.mark.usefixtures("no_rewrites")
BATCH = 16


def digits(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(BATCH, 8, 8, 1)).astype(np.float32)
    return {"image": images, "label": rng.integers(0, 10, BATCH).astype(np.int32)}


def check(step: Callable[..., Any], decorated: Any, state: Any, steps: int = 2, **tolerance: float) -> None:
    """Both ways agree after some steps, and the plan is not that of one device."""
    found, expected, plain = state, state, jax.jit(step)
    for i in range(steps):
        found, metrics = decorated(found, digits(i))
        expected, reference = plain(expected, digits(i))
    close((found, metrics), (expected, reference), **tolerance)
    plan = decorated.plan(state, digits())
    assert any(leaf.layout.axis_dim for leaf in plan.inputs) and not plan.replicated


# Flax linen


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=32)(x))
        return nn.Dense(features=10)(x)


@struct.dataclass
class Metrics:
    """What `clu.metrics` does there."""

    total: jax.Array
    correct: jax.Array
    count: jax.Array


class MetricState(train_state.TrainState):
    metrics: Metrics


def test_linen_quick_start(sharded):
    """https://flax-linen.readthedocs.io/en/latest/quick_start.html"""
    cnn = CNN()

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        hits = (jnp.argmax(logits, -1) == batch["label"]).sum()
        old = state.metrics
        metrics = Metrics(old.total + loss * BATCH, old.correct + hits, old.count + BATCH)
        return state.replace(metrics=metrics), {"loss": loss}

    params = cnn.init(jax.random.key(0), jnp.ones([1, 8, 8, 1]))["params"]
    zero = Metrics(jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
    tx = optax.sgd(0.01, momentum=0.9)
    state = MetricState.create(apply_fn=cnn.apply, params=params, tx=tx, metrics=zero)
    check(step, sharded(step), state)


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.Dense(features=32)(x.reshape((x.shape[0], -1)))
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(rate=0.5, deterministic=not train)(x)
        return nn.Dense(features=10)(x)


class KeyState(train_state.TrainState):
    key: jax.Array
    batch_stats: Any


def test_linen_dropout_and_batch_statistics(sharded):
    """https://flax-linen.readthedocs.io/en/latest/guides/training_techniques/dropout.html and, beside it,
    batch_norm.html"""
    model = Normalized()

    def step(state, batch):
        dropout_train_key = jax.random.fold_in(key=state.key, data=state.step)

        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = state.apply_fn(
                variables, batch["image"], train=True, mutable=["batch_stats"], rngs={"dropout": dropout_train_key}
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"]).mean()
            return loss, updates

        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        return state.replace(batch_stats=updates["batch_stats"]), loss

    variables = model.init(jax.random.key(0), digits()["image"], train=False)
    state = KeyState.create(
        apply_fn=model.apply, tx=optax.sgd(0.1), key=jax.random.PRNGKey(1), **variables
    )  # the page has a raw key
    check(step, sharded(step), state)


# Flax nnx


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025, rngs=rngs)
        self.linear1 = nnx.Linear(128, 10, rngs=rngs)
        self.avg_pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))

    def __call__(self, x):
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x)))))
        return self.linear1(x.reshape(x.shape[0], -1))


def loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"]).mean(), logits


def test_nnx_functional_train_loop(sharded):
    """https://flax.readthedocs.io/en/latest/guides/performance.html, of the model and metrics of
    https://flax.readthedocs.io/en/latest/mnist_tutorial.html"""
    model = Model(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def step(graphdef, state, batch):
        model, optimizer, metrics = nnx.merge(graphdef, state)
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)
        return nnx.state((model, optimizer, metrics)), loss

    graphdef, state = nnx.split((model, optimizer, metrics))
    decorated, plain = sharded(step), jax.jit(step)
    found = expected = state
    for i in range(2):
        found, loss = decorated(graphdef, found, digits(i))
        expected, reference = plain(graphdef, expected, digits(i))
    close((found, loss), (expected, reference), rtol=2e-4)
    nnx.update((model, optimizer, metrics), found)
    assert float(metrics.compute()["loss"]) > 0
    plan = decorated.plan(graphdef, state, digits())
    assert any(leaf.layout.axis_dim for leaf in plan.inputs) and not plan.replicated


# Optax


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(features=32)(x.reshape((x.shape[0], -1))))
        return nn.Dense(features=10)(x)


net = MLP()


def classify(params, batch):
    logits = net.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"]).mean()


def initial():
    return net.init(jax.random.key(0), digits()["image"])


def test_optax_gradient_accumulation(sharded):
    """https://optax.readthedocs.io/en/latest/_collections/examples/gradient_accumulation.html"""
    opt = optax.MultiSteps(optax.sgd(1e-1), every_k_schedule=3)

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(classify)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    check(step, sharded(step), (initial(), opt.init(initial())), steps=4)


def test_optax_lookahead(sharded):
    """https://optax.readthedocs.io/en/latest/_collections/examples/lookahead_mnist.html"""
    optimizer = optax.lookahead(optax.adam(2e-3), sync_period=2, slow_step_size=0.1)

    def step(state, batch):
        params, optimizer_state = state
        loss, grads = jax.value_and_grad(classify)(params.fast, batch)
        updates, opt_state = optimizer.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = optax.LookaheadParams.init_synced(initial())
    check(step, sharded(step), (params, optimizer.init(params)), steps=3, rtol=2e-4)


def test_optax_adversarial_training(sharded):
    """https://optax.readthedocs.io/en/latest/_collections/examples/adversarial_training.html"""
    optimizer = optax.adam(1e-3)

    def pgd_attack(image, label, params, epsilon=0.1, maxiter=2):
        image_perturbation = jnp.zeros_like(image)

        def adversarial_loss(perturbation):
            return classify(params, {"image": image + perturbation, "label": label})

        grad_adversarial = jax.grad(adversarial_loss)
        for _ in range(maxiter):
            sign_grad = jnp.sign(grad_adversarial(image_perturbation))
            image_perturbation += (2 * epsilon / maxiter) * sign_grad
            image_perturbation = jnp.clip(image_perturbation, -epsilon, epsilon)
        return jnp.clip(image + image_perturbation, 0, 1)

    def step(state, batch):
        params, opt_state = state
        images_adv = pgd_attack(batch["image"], batch["label"], params)
        loss, grads = jax.value_and_grad(classify)(params, {**batch, "image": images_adv})
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    check(step, sharded(step), (initial(), optimizer.init(initial())), rtol=2e-4)


# Modules that are pytrees, and pairs of functions


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "bias"], meta_fields=["activation"])
@dataclasses.dataclass(frozen=True)
class Linear:
    weight: jax.Array
    bias: jax.Array
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x):
        return self.activation(self.weight @ x + self.bias)


def test_equinox_style(sharded):
    """https://docs.kidger.site/equinox/examples/mnist/: a model is a pytree of layers for one example, under `vmap`"""
    optim = optax.adamw(3e-4)

    def predict(model, x):
        return functools.reduce(lambda value, layer: layer(value), model, x.reshape(-1))

    def loss(model, x, y):
        pred_y = jax.nn.log_softmax(jax.vmap(predict, in_axes=(None, 0))(model, x))
        pred_y = jnp.take_along_axis(pred_y, jnp.expand_dims(y, 1), axis=1)
        return -jnp.mean(pred_y)

    def step(state, batch):
        model, opt_state = state
        loss_value, grads = jax.value_and_grad(loss)(model, batch["image"], batch["label"])
        updates, opt_state = optim.update(grads, opt_state, model)
        return (optax.apply_updates(model, updates), opt_state), loss_value

    rng = np.random.default_rng(0)
    model = [
        Linear(rng.normal(size=(n, m)).astype(np.float32) / m, np.zeros(n, np.float32), f)
        for n, m, f in ((32, 64, jax.nn.relu), (10, 32, jax.nn.relu))
    ]
    check(step, sharded(step), (model, optim.init(model)), rtol=2e-4)


class TrainingState(NamedTuple):
    params: dict[str, dict[str, jax.Array]]
    avg_params: dict[str, dict[str, jax.Array]]
    opt_state: Any


def test_haiku_style(sharded):
    """https://github.com/google-deepmind/dm-haiku/blob/main/examples/mnist.py: nested dicts, regularized, averaged"""
    optimiser = optax.adam(1e-3)

    def apply(params, images):
        x = images.reshape(images.shape[0], -1) / 255.0
        x = jax.nn.relu(x @ params["mlp/~/linear_0"]["w"] + params["mlp/~/linear_0"]["b"])
        return x @ params["mlp/~/linear_1"]["w"] + params["mlp/~/linear_1"]["b"]

    def loss(params, batch):
        labels = jax.nn.one_hot(batch["label"], 10)
        l2_regulariser = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree_util.tree_leaves(params))
        log_likelihood = jnp.sum(labels * jax.nn.log_softmax(apply(params, batch["image"])))
        return -log_likelihood / BATCH + 1e-4 * l2_regulariser

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        updates, opt_state = optimiser.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        avg_params = optax.incremental_update(params, state.avg_params, step_size=0.001)
        return TrainingState(params, avg_params, opt_state), value

    rng = np.random.default_rng(0)
    sizes = {"mlp/~/linear_0": (64, 32), "mlp/~/linear_1": (32, 10)}
    params = {
        name: {"w": rng.normal(size=s).astype(np.float32) / 8, "b": np.zeros(s[1], np.float32)}
        for name, s in sizes.items()
    }
    check(step, sharded(step), TrainingState(params, params, optimiser.init(params)), rtol=2e-4)


def test_modules_changed_in_place_are_said_to_be_lost(sharded):
    """As under `jax.jit`. Objects of nnx are updated as under `nnx.jit` (`test_nnx_objects`); an `nnx.State` is not."""

    def step(state, x):
        state["w"][...] = state["w"][...] - x.mean()
        return (x @ state["w"][...]).sum()

    def returning(state, x):
        return step(state, x), state

    def scratch(batch):
        batch["x"] = batch["x"] / 255
        return batch["x"].sum()

    arguments = nnx.State({"w": nnx.Param(jnp.ones((8, 8)))}), np.ones((8, 8), np.float32)
    with pytest.warns(UserWarning, match="step changes its argument .*'w'.* in place.*pass the objects themselves"):
        sharded(step).plan(*arguments)
    sharded(returning).plan(*arguments)  # warnings are errors here
    sharded(scratch).plan({"x": np.ones(8, np.float32)})
