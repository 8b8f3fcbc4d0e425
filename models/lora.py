"""LoRA: LLaMA fine-tuned by low-rank adapters that are merged into its weights in every step.

Sources: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685); 7b and full are the
recipe of alpaca-lora (github.com/tloen/alpaca-lora), qlora-7b the adapters and batches of Dettmers et al. 2023,
"QLoRA" (arXiv 2305.14314), without its 4-bit weights; parameter counts of the released adapters. A weight W, frozen, in
the dtype of the computation, is W + alpha / rank A B, with A and B trained: the model is LLaMA's own code
(`models/llama.py`), called with merged weights, as a user would adapt any model without touching it. As it is written a
step makes the gradient of every adapted weight in full, to multiply it by A and B then; that nothing so large need be
made, or reduced over the devices, is left to the planner.

| size     | base | rank | alpha | adapted projections     | batch | tokens | trained parameters |
|----------|------|------|-------|-------------------------|-------|--------|--------------------|
| 7b       | 7b   | 8    | 16    | query, value            | 128   | 256    | 4,194,304          |
| qlora-7b | 7b   | 64   | 16    | all seven of each layer | 16    | 512    | 159,907,840        |
| tiny     | tiny | 2    | 4     | all seven of each layer | 16    | 16     |                    |

`full` is 7b. Layers are unrolled and not rematerialized. The dropout before A is left out: merged, there is no such
place.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from flax import nnx

from models import llama
from models._common import Array, Batch, Metrics, Model, Precision, adamw, next_token_model, uniform_within

ALL = ("query", "key", "value", "out", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and recipe; see the table above. `base`: a size of `models/llama.py`; `layers`: of its layers, how many."""

    base: str
    layers: int
    rank: int
    alpha: float
    targets: tuple[str, ...] = ("query", "value")
    length: int = 256
    batch_size: int = 128
    learning_rate: float = 3e-4
    clip: float = 1.0
    warmup: int = 100
    steps: int = 1_170
    dropout: float = 0.0
    dtype: Any = jnp.bfloat16

    @property
    def llama(self) -> "llama.Config":
        """LLaMA as it is adapted."""
        changed = {"layers": self.layers, "length": self.length, "batch_size": self.batch_size, "dtype": self.dtype}
        return dataclasses.replace(llama.SIZES[self.base], **changed, dropout=self.dropout, scan=False, remat=False)

    @property
    def vocabulary(self) -> int:
        return self.llama.vocabulary


_7B = Config("7b", 32, 8, 16)
SIZES = {
    "full": _7B,
    "7b": _7B,
    "qlora-7b": Config(
        "7b", 32, 64, 16, ALL, length=512, batch_size=16, learning_rate=2e-4, clip=0.3, warmup=0, steps=10_000
    ),
    "tiny": Config(
        "tiny", 2, 2, 4, ALL, length=16, batch_size=16, learning_rate=0.04, warmup=0, dropout=0.1, dtype=jnp.float32
    ),
}
PUBLISHED = {"full": 4_194_304, "7b": 4_194_304, "qlora-7b": 159_907_840}


class Frozen(nnx.Variable):
    """A weight that is not trained."""


class Adapter(nnx.Module):
    """A and B of a weight W f[*N, *M], where N are its first `inputs` dimensions: f[*N, R], uniform as a linear layer
    begins, and f[R, *M], zero."""

    def __init__(
        self, shape: tuple[int, ...], inputs: int, config: Config, precision: Precision, rngs: nnx.Rngs
    ) -> None:
        rank, begin = config.rank, uniform_within(math.prod(shape[:inputs]) ** -0.5)
        self.down = nnx.Param(begin(rngs.params(), (*shape[:inputs], rank), precision.param))
        self.up = nnx.Param(jnp.zeros((rank, *shape[inputs:]), precision.param))
        self.scale = config.alpha / rank
        self.compute = precision.compute

    def __call__(self) -> Array:
        """alpha / rank A B, f[*N, *M]."""
        down, up = (self.scale * self.down[...]).astype(self.compute), self.up[...].astype(self.compute)
        return jnp.tensordot(down, up, 1)


class Lora(nnx.Module):
    """LLaMA, frozen, with an adapter beside the kernel of each adapted projection."""

    def __init__(self, config: Config, precision: Precision, rngs: nnx.Rngs) -> None:
        self.llama = llama.Llama(config.llama, precision, rngs)
        for path, layer in list(nnx.iter_modules(self.llama)):
            for name, weight in list(vars(layer).items()):
                if isinstance(weight, nnx.Param):
                    dtype = precision.param if weight.ndim == 1 else precision.compute
                    setattr(layer, name, Frozen(weight[...].astype(dtype)))
            if path and path[-1] in config.targets:
                inputs = layer.kernel.ndim - 1 if path[-1] == "out" else 1
                layer.adapter = Adapter(layer.kernel.shape, inputs, config, precision, rngs)

    def loss(self, batch: Batch, key: Array | None) -> tuple[Array, Metrics]:
        """LLaMA's, f[], with W + alpha / rank A B for W."""
        merged = nnx.clone(self.llama)
        for _, layer in nnx.iter_modules(merged):
            if hasattr(layer, "adapter"):
                layer.kernel = Frozen(layer.kernel[...] + layer.adapter())
        return merged.loss(batch, key)


def build(size: str, config: Config) -> Model:
    """The model for a configuration; see `models.get`."""
    optimizer = adamw(
        config.learning_rate,
        b2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        clip=config.clip,
        warmup=config.warmup,
        total=config.steps,
    )
    published = PUBLISHED.get(size) if config.layers == SIZES[size].layers else None
    return next_token_model("lora", size, config, Lora, optimizer, published)
