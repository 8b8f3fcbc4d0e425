"""Programs that the cost model was not made on: figures about predictions are believed for these.

    from experiments.validation.programs import VALIDATION

    program = VALIDATION["bert_linen"]()                 # shapes only, whatever its size
    jax.jit(program.step, donate_argnums=program.donate_argnums).trace(*program.arguments)
    small = VALIDATION["bert_linen"](tiny=True)
    state, metrics = small.step(*small.make(0))

Some are models of the zoo at published widths; the others are written as their users write them, each on its own, and
share nothing with the zoo. No constant or pass of the cost model is to be changed to suit one of them; what one shows
of a compiler is followed where the compiler's source says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from . import zoo
from .attention_layer import attention_layer
from .bert_linen import bert_linen
from .clip_linen import clip_linen
from .convnet_nnx import convnet_nnx
from .diffusion_linen import diffusion_linen
from .dlrm_stacked import dlrm_stacked
from .gpt_pytree import gpt_pytree
from .gru_scan import gru_scan
from .mesh_graph_net import mesh_graph_net
from .ssm_chunks import ssm_chunks
from .train_step import TrainStep

__all__ = ["VALIDATION", "TrainStep"]

VALIDATION: dict[str, Callable[..., TrainStep]] = {
    **{name: functools.partial(zoo.zoo, name) for name in zoo.SIZES},
    "attention_layer": attention_layer,
    "bert_linen": bert_linen,
    "clip_linen": clip_linen,
    "convnet_nnx": convnet_nnx,
    "diffusion_linen": diffusion_linen,
    "dlrm_stacked": dlrm_stacked,
    "gpt_pytree": gpt_pytree,
    "gru_scan": gru_scan,
    "mesh_graph_net": mesh_graph_net,
    "ssm_chunks": ssm_chunks,
}
"""Name to maker; a maker takes `tiny=True` for a size that a CPU trains."""
