"""unity_jax: a train step written for one device, run well on many.

import unity_jax as unity

@unity.auto_shard(donate_argnums=0)
def train_step(state, batch): ...
"""

from unity_jax import layers
from unity_jax.api import AutoSharded, auto_shard, plan
from unity_jax.errors import MemoryLimitError, PinError, PlanError, UnityError, UnsupportedError
from unity_jax.machine import Machine
from unity_jax.options import Options
from unity_jax.plan import Plan

__all__ = [
    "AutoSharded",
    "Machine",
    "MemoryLimitError",
    "Options",
    "PinError",
    "Plan",
    "PlanError",
    "UnityError",
    "UnsupportedError",
    "auto_shard",
    "layers",
    "plan",
]
