"""A ConvNet for digits as Flax's documentation teaches it, `nnx` objects split into a graph definition and a state.

Model, optimizer and metrics are one object graph; the step merges it, changes it in place and returns its state.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .train_step import TrainStep, of

SOURCE = "the digit classifier of Flax's documentation (nnx, batch norm, dropout, metrics), 4,096 images at a time"


class ConvNet(nnx.Module):
    def __init__(self, widths, hidden, *, rngs: nnx.Rngs):
        first, second = widths
        self.conv1 = nnx.Conv(1, first, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(first, rngs=rngs)
        self.drop1 = nnx.Dropout(0.025, rngs=rngs)
        self.conv2 = nnx.Conv(first, second, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(second, rngs=rngs)
        self.pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(7 * 7 * second, hidden, rngs=rngs)
        self.drop2 = nnx.Dropout(0.025, rngs=rngs)
        self.linear2 = nnx.Linear(hidden, 10, rngs=rngs)

    def __call__(self, x):
        x = self.pool(nnx.relu(self.norm1(self.drop1(self.conv1(x)))))
        x = self.pool(nnx.relu(self.norm2(self.conv2(x))))
        x = nnx.relu(self.drop2(self.linear1(x.reshape(x.shape[0], -1))))
        return self.linear2(x)


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, logits


def create(key, widths, hidden):
    model = ConvNet(widths, hidden, rngs=nnx.Rngs(key))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, b1=0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return nnx.split((model, optimizer, metrics))


def convnet_nnx(tiny: bool = False) -> TrainStep:
    rows, widths, hidden = (16, (4, 8), 16) if tiny else (4096, (32, 64), 256)
    graphdef, _ = nnx.eval_shape(lambda: create(jax.random.key(0), widths, hidden))

    def train_step(state, batch):
        model, optimizer, metrics = nnx.merge(graphdef, state)
        model.train()
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)
        return nnx.state((model, optimizer, metrics)), {"loss": loss, **metrics.compute()}

    def make(seed):
        model_key, image_key, label_key = jax.random.split(jax.random.key(seed), 3)
        batch = {
            "image": jax.random.uniform(image_key, (rows, 28, 28, 1)),
            "label": jax.random.randint(label_key, (rows,), 0, 10, jnp.int32),
        }
        return create(model_key, widths, hidden)[1], batch

    return of(train_step, make, SOURCE)
