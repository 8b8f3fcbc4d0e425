"""The part of the zoo that no constant of the cost model was looked at with: published widths, few layers."""

from __future__ import annotations

from typing import Any

import models

from .train_step import TrainStep

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("full", {"layers": 2, "batch_size": 512, "scan": False, "remat": False}),
    "t5": ("full", {"layers": 1, "batch_size": 128, "scan": False, "remat": False}),
    "unet": ("full", {"batch_size": 16}),
    "llama": ("1.3b", {"layers": 1, "batch_size": 16, "scan": False, "remat": False}),
    "transformer": ("full", {"layers": 1, "scan": False}),
    "deep_speech": ("full", {"layers": 1, "batch_size": 128}),
    "faster_rcnn": ("full", {"stages": (1, 1, 1), "head": 1}),
}
"""Of each model the size in its file, and the fields of its Config that differ here."""


def zoo(name: str, tiny: bool = False) -> TrainStep:
    """The train step of a model of the zoo."""
    size, changed = ("tiny", {}) if tiny else SIZES[name]
    model = models.get(name, size, **changed)
    return TrainStep(
        model.train_step,
        (model.abstract_state(), model.abstract_batch()),
        lambda seed: (model.make_state(seed), model.make_batch(seed)),
        f"models/{name}.py, whose docstring names the paper",
    )
