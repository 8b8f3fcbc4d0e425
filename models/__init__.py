"""The zoo: published models as pure, single-device JAX train steps, each also in a tiny size for tests.

    import models

    bert = models.get("bert")                            # the published size: bf16 compute, f32 parameters
    bert.num_parameters                                  # 336_226_108
    deep = models.get("bert", layers=48, batch_size=64)  # any field of the model's Config can be overridden
    test = models.get("bert", "tiny", dtype=jnp.float64)

    state, metrics = jax.jit(test.train_step, donate_argnums=0)(test.make_state(0), test.make_batch(0))
    big = models.get("gpt", "gpt3-175b").abstract_state()          # ShapeDtypeStructs, no memory

On the command line: `unity plan models:step bert tiny --machine v5e:2x4`.
One file per model; its docstring has the source and the table of sizes.
"""

import importlib
from typing import Any

import unity_jax as unity
from models._common import Batch, Metrics, Model, TrainState, resize

__all__ = ["FAMILIES", "Batch", "Metrics", "Model", "TrainState", "family", "get", "names", "sizes", "step"]

FAMILIES = {
    "transformers": "bert falcon gpt llama lora moe t5 transformer vit".split(),
    "convolutional": "faster_rcnn inception resnet resnext unet wgan".split(),
    "recurrent": "a3c deep_speech lstm_lm seq2seq".split(),
    "recommenders": "dlrm xdl".split(),
    "others": "candle_uno mlp".split(),
}
"""Models that are alike in what their steps spend time on; summaries are given by family."""

_FILES = {name: f"models.{name}" for name in sorted(name for family in FAMILIES.values() for name in family)}


def names() -> tuple[str, ...]:
    """The models, in alphabetical order."""
    return tuple(_FILES)


def family(name: str) -> str:
    """The family of a model."""
    return next(family for family, members in FAMILIES.items() if name in members)


def sizes(name: str) -> tuple[str, ...]:
    """The sizes of a model; `full` and `tiny` are always among them."""
    return tuple(_file(name).SIZES)


def get(name: str, size: str = "full", **overrides: Any) -> Model:
    """The model `name` at `size`, with fields of its Config overridden (dtype, batch_size, layers, dropout, ...).

    An override of None keeps the size's own value. `dtype` is that of the computation: bfloat16 keeps float32
    parameters, float32 and float64 are used throughout.
    """
    file = _file(name)
    if size not in file.SIZES:
        raise ValueError(f"{name} has no size {size!r}; it has: {', '.join(file.SIZES)}")
    changed = {field: value for field, value in overrides.items() if value is not None}
    return file.build(size, resize(file.SIZES[size], changed))


def step(name: str, size: str = "full") -> tuple[Any, tuple[Any, Any]]:
    """The train step of a model, its state donated, and the shapes of its arguments."""
    model = get(name, size)
    return unity.auto_shard(model.train_step, donate_argnums=0), (model.abstract_state(), model.abstract_batch())


def _file(name: str) -> Any:
    if name not in _FILES:
        raise ValueError(f"no model {name!r}; there are: {', '.join(_FILES)}")
    return importlib.import_module(_FILES[name])
