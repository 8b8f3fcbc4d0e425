"""What every model shares: the train state, the pure train step, precision and synthetic ids.

A model is an `nnx.Module` with one method, `loss(batch, key) -> (loss, metrics)`; `Model` turns it into a pure
function of pytrees:

    model = models.get("bert", "tiny")
    state = model.make_state(0)                          # TrainState(step, params, opt_state, key, variables)
    state, metrics = jax.jit(model.train_step, donate_argnums=0)(state, model.make_batch(0))
    metrics["loss"]                                      # f32[]

Parameters are plain nested dicts of arrays, so a leaf is named `.params['layers'][0]['attention']['query']['kernel']`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Array = jax.Array
Batch = dict[str, Any]
Metrics = dict[str, Array]


class TrainState(NamedTuple):
    """Everything a step reads and replaces; each leaf keeps its shape and dtype, so the whole state can be donated.

    step: i32[], steps taken; params: nested dict; opt_state: optax state; key: typed PRNG key[], the root of all
    dropout masks (a step folds its number in, so a restart replays the same masks); variables: nested dict of what
    is neither trained nor drawn (batch statistics, recurrent carries), empty for most models.
    """

    step: Array
    params: dict[str, Any]
    opt_state: Any
    key: Array
    variables: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Precision:
    """compute: dtype of activations and matmul inputs; param: of parameters and optimizer state; both floating.

    Softmax, losses and normalization statistics are in `param`, never below float32.
    """

    compute: Any
    param: Any

    @property
    def kwargs(self) -> dict[str, Any]:
        """The two dtypes as nnx layers take them."""
        return {"dtype": self.compute, "param_dtype": self.param}


def make_precision(dtype: Any) -> Precision:
    """bfloat16 -> bf16 compute with f32 parameters; float32 and float64 -> that dtype throughout."""
    compute = jnp.dtype(dtype)
    if compute == jnp.float64 and not jax.config.jax_enable_x64:
        raise ValueError("dtype=float64 needs jax_enable_x64; set it (or enter jax.enable_x64()) before models.get")
    return Precision(compute, jnp.promote_types(compute, jnp.float32))


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model of the zoo at one size: pure step functions, and makers (concrete and abstract) of their arguments.

    name, size, config: what was asked for, after overrides.
    make_module: rngs -> nnx.Module with `loss(batch, key)`; key None means evaluation.
    optimizer: the optax transformation of the published recipe.
    batch_spec: pytree of ShapeDtypeStruct; make_numpy_batch: numpy generator -> numpy arrays of that spec.
    published_parameters: the parameter count in the literature, None where there is none.
    zero_gradients: parts of the paths of leaves whose gradient is zero in exact arithmetic; Adam scales their
    rounding noise up, so comparisons of two runs skip them or look before the optimizer.
    """

    name: str
    size: str
    config: Any
    make_module: Callable[[nnx.Rngs], nnx.Module]
    optimizer: optax.GradientTransformation
    batch_spec: Batch
    make_numpy_batch: Callable[[np.random.Generator], Batch]
    published_parameters: int | None = None
    zero_gradients: tuple[str, ...] = ()

    @functools.cached_property
    def _graphdef(self) -> nnx.GraphDef:
        module = nnx.eval_shape(lambda: self.make_module(nnx.Rngs(0)))
        return nnx.split(module, nnx.Param, ...)[0]

    def make_state(self, key: Array | int) -> TrainState:
        """A fresh state from a typed PRNG key or a seed; traceable, so it can be jitted with output shardings."""
        key = jax.random.key(key) if isinstance(key, int) else key
        init_key, dropout_key = jax.random.split(key)
        graphdef, params, variables = nnx.split(self.make_module(nnx.Rngs(init_key)), nnx.Param, ...)
        self.__dict__.setdefault("_graphdef", graphdef)  # making a deep module again takes seconds
        params = nnx.to_pure_dict(params)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.optimizer.init(params),
            key=dropout_key,
            variables=nnx.to_pure_dict(variables),
        )

    def make_batch(self, seed: int = 0) -> Batch:
        """Synthetic numpy arrays with the shapes and distributions of the real data; equal seeds, equal batches."""
        return self.make_numpy_batch(np.random.default_rng(seed))

    def abstract_state(self) -> TrainState:
        """The state as ShapeDtypeStructs; needs no memory at any size."""
        return jax.eval_shape(self.make_state, jax.eval_shape(lambda: jax.random.key(0)))

    def abstract_batch(self) -> Batch:
        """The batch as ShapeDtypeStructs."""
        return self.batch_spec

    @functools.cached_property
    def num_parameters(self) -> int:
        """Trained scalars, counted on the abstract state."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.abstract_state().params))

    def _apply(
        self, params: dict[str, Any], variables: dict[str, Any], batch: Batch, key: Array | None
    ) -> tuple[Array, tuple[Metrics, dict[str, Any]]]:
        module = nnx.merge(self._graphdef, params, variables)
        loss, metrics = module.loss(batch, key)
        _, _, variables = nnx.split(module, nnx.Param, ...)
        return loss, ({"loss": loss, **metrics}, nnx.to_pure_dict(variables))

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step: forward, backward, update. Pure; every leaf of the state may be donated."""
        key = jax.random.fold_in(state.key, state.step)
        gradient = jax.value_and_grad(self._apply, has_aux=True)
        (_, (metrics, variables)), grads = gradient(state.params, state.variables, batch, key)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state, state.key, variables), metrics

    def eval_step(self, state: TrainState, batch: Batch) -> Metrics:
        """The metrics of a batch, without dropout and with running statistics; the state is only read."""
        _, (metrics, _) = self._apply(state.params, state.variables, batch, None)
        return metrics


def fold(key: Array | None, index: Array | int) -> Array | None:
    """The `index`-th child of a dropout key; None (evaluation) stays None."""
    return None if key is None else jax.random.fold_in(key, index)


def drop(layer: nnx.Dropout, x: Array, key: Array | None) -> Array:
    """Dropout with an explicit key; the identity in evaluation (key None)."""
    return layer(x, deterministic=key is None, rngs=key)


def adamw(
    learning_rate: float,
    *,
    b2: float,
    eps: float,
    weight_decay: float,
    clip: float,
    warmup: int,
    total: int,
    b1: float = 0.9,
    cosine_to: float | None = None,
) -> optax.GradientTransformation:
    """AdamW after clipping by global norm, linear warm-up then linear decay; no warm-up means a constant rate.

    **Arguments:** `cosine_to`: decay by a cosine instead, to this part of the rate.

    Only matrices decay: kernels and embeddings, not biases or normalization scales.
    """
    rate: optax.ScalarOrSchedule = learning_rate
    if warmup:
        up = optax.linear_schedule(learning_rate / warmup, learning_rate, warmup)
        if cosine_to is None:
            down = optax.linear_schedule(learning_rate, 0.0, total - warmup)
        else:
            down = optax.cosine_decay_schedule(learning_rate, total - warmup, cosine_to)
        rate = optax.join_schedules([up, down], [warmup])
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=is_matrix),
    )


def is_matrix(params: Any) -> Any:
    """A pytree of bools: which leaves are weights proper, by name, so that stacked layers are judged alike."""
    names = {"kernel", "embedding", "gate", "up", "down"}

    def named(path: tuple[Any, ...], _: Any) -> bool:
        return getattr(path[-1], "key", None) in names

    return jax.tree_util.tree_map_with_path(named, params)


def uniform_within(bound: float) -> Callable[..., Array]:
    """An initializer: uniform within `bound` of zero."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any, **kwargs: Any) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound, **kwargs)

    return init


def zipf(rng: np.random.Generator, shape: tuple[int, ...], size: int) -> np.ndarray:
    """Ids i32[shape] in [0, size) whose frequency falls as 1/rank (Zipf's law), by the inverse of its distribution."""
    ranks = np.exp(rng.random(shape) * math.log(size + 1)) - 1.0
    return np.minimum(ranks.astype(np.int32), size - 1)


def next_token_batch(rng: np.random.Generator, rows: int, length: int, vocabulary: int) -> Batch:
    """Zipf text: tokens and targets i32[rows, length], the targets one token ahead."""
    text = zipf(rng, (rows, length + 1), vocabulary)
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def next_token_model(
    name: str,
    size: str,
    config: Any,
    module: Callable[..., nnx.Module],
    optimizer: optax.GradientTransformation,
    published: int | None = None,
) -> Model:
    """A language model of `module(config, precision, rngs)`, trained on `next_token_batch`."""
    precision = make_precision(config.dtype)
    ids = jax.ShapeDtypeStruct((config.batch_size, config.length), jnp.int32)
    return Model(
        name=name,
        size=size,
        config=config,
        make_module=lambda rngs: module(config, precision, rngs),
        optimizer=optimizer,
        batch_spec={"tokens": ids, "targets": ids},
        make_numpy_batch=lambda rng: next_token_batch(rng, config.batch_size, config.length, config.vocabulary),
        published_parameters=published,
    )


def sentence_pairs(rng: np.random.Generator, rows: int, length: int, vocabulary: int) -> Batch:
    """Sentences with translations: source and target i32[rows, length]: Zipf ids from 2, then 1 (end), then 0.

    A batch holds sentences of a like length, as training sorts them: each fills the columns by half or more, and its
    translation is up to a quarter shorter or longer.
    """
    lengths = rng.integers(length // 2, length + 1, rows)
    translated = np.clip(np.round(lengths * rng.uniform(0.75, 1.25, rows)), 2, length)

    def sentences(lengths: np.ndarray) -> np.ndarray:
        columns, ends = np.arange(length), lengths[:, None] - 1
        words = zipf(rng, (rows, length), vocabulary - 2) + 2
        return np.where(columns < ends, words, columns == ends).astype(np.int32)

    return {"source": sentences(lengths), "target": sentences(translated)}


def smoothed_cross_entropy(logits: Array, labels: Array, smoothing: float) -> Array:
    """Cross-entropy f[...] of logits f[..., V] when the label has all but `smoothing`, spread over all classes."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return log_z - (1 - smoothing) * right - smoothing * logits.mean(axis=-1)


def causal_mask(length: int) -> Array:
    """bool[length, length]: query (row) sees key (column) if it is not later."""
    position = jnp.arange(length, dtype=jnp.int32)
    return position[:, None] >= position[None, :]


def resize(config: Any, overrides: Mapping[str, Any]) -> Any:
    """`config` with overrides; says which fields exist when one does not."""
    fields = {field.name for field in dataclasses.fields(config)}
    unknown = sorted(set(overrides) - fields)
    if unknown:
        raise ValueError(f"no such override: {', '.join(unknown)}; this model has: {', '.join(sorted(fields))}")
    return dataclasses.replace(config, **overrides)
