"""Peak memory of a planned program: arguments, results, and what XLA needs between them.

Arguments and results have memory for the whole step, but for those on the host; a result takes that of a donated
argument of its shape. What lies between are the buffers of the program as the compiler of the machine shapes it
(`xla.pipelines`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from unity_jax.cost.estimates import Estimates
from unity_jax.cost.layers import more_bytes
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.xla.aliases import base_tensors
from unity_jax.xla.buffer_assignment import temporary
from unity_jax.xla.emission import emit
from unity_jax.xla.layout_assignment import Storage
from unity_jax.xla.module import Module
from unity_jax.xla.pipelines import compiled
from unity_jax.xla.traffic import Traffic


@dataclass(frozen=True)
class Memory:
    """**Fields:** `peak_bytes` per device, gaps between buffers included; `alive`: what is alive at the peak, largest
    first."""

    peak_bytes: int
    alive: tuple[tuple[Tensor, int], ...]


def memory(graph: Graph, traffic: Traffic, mesh: MeshAxes, machine: Machine, donated: Sequence[int]) -> Memory:
    """Peak memory of a planned graph on one device.

    **Arguments:** `traffic`: of this graph; `donated`: indices of inputs whose memory results may take.
    """
    module = scheduled(graph, traffic, mesh, machine)
    kept = held(graph, module.storage, donated)
    between, always = temporary(module), sum(kept.values()) + more_bytes(module)
    ranked = sorted([*kept.items(), *((b.tensor, b.temporary) for b in between.live)], key=lambda item: -item[1])
    alive = tuple((t, round(n)) for t, n in ranked[:50])
    return Memory(round(always + between.bytes), alive)


def scheduled(graph: Graph, traffic: Traffic, mesh: MeshAxes, machine: Machine) -> Module:
    """A planned graph as the compiler of the machine shapes and schedules it."""
    module = emit(graph, traffic, Storage(graph, traffic, mesh, machine.device), machine, Estimates(machine))
    compiled(module)
    return module


def held(graph: Graph, storage: Storage, donated: Sequence[int]) -> dict[Tensor, float]:
    """What has memory for the whole step, with its bytes: arguments, and results that take the place of none."""
    base = base_tensors(graph)
    kept = {t: t.times * storage.outside(t) for t in graph.inputs if not t.on_host}
    free = Counter(_kind(graph.inputs[i]) for i in donated if not graph.inputs[i].on_host)
    for t in dict.fromkeys(base.get(t, t) for t in graph.outputs if not t.on_host):
        if free[_kind(t)]:
            free[_kind(t)] -= 1
        elif t not in kept and t.literal is None:
            kept[t] = t.times * storage.outside(t)
    return kept


def _kind(t: Tensor) -> Hashable:
    """What a donated argument and a result that takes its memory have in common."""
    return t.shape, str(t.dtype), t.layout
