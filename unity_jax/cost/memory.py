"""Peak memory of a planned program: what is alive when its kernels run in the order that XLA would choose (`schedule`).

Arguments and results have memory for the whole step; a result takes that of a donated argument of its shape. What lies
between are `buffers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unity_jax.cost.buffers import Buffers
from unity_jax.cost.kernels import Traffic, base_tensors
from unity_jax.cost.storage import Storage
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.mesh import MeshAxes


@dataclass(frozen=True)
class Memory:
    """Peak bytes per device, gaps between buffers included, and what is alive at the peak, largest first."""

    peak_bytes: int
    alive: tuple[tuple[Tensor, int], ...]


def memory(graph: Graph, traffic: Traffic, mesh: MeshAxes, machine: Machine, donated: Sequence[int]) -> Memory:
    """Peak memory of a planned graph on one device.

    **Arguments:** `traffic`: of this graph; `donated`: indices of inputs whose memory results may take.
    """
    storage = Storage(graph, traffic, mesh, machine.device)
    base = base_tensors(graph)
    kept = {t: storage.outside(t) for t in graph.inputs}
    free: dict[object, list[Tensor]] = {}
    for t in (graph.inputs[i] for i in donated):
        free.setdefault((t.shape, str(t.dtype), t.layout), []).append(t)
    replacing: dict[Tensor, Tensor] = {}
    for t in dict.fromkeys(base.get(t, t) for t in graph.outputs):
        key = (t.shape, str(t.dtype), t.layout)
        if free.get(key):
            replacing[t] = free[key].pop(0)
        elif t not in kept and t.literal is None:
            kept[t] = storage.outside(t)
    peak, alive = Buffers(graph, traffic, storage, machine, replacing).peak()
    ranked = sorted([*kept.items(), *alive], key=lambda item: -item[1])
    return Memory(round(sum(kept.values()) + peak), tuple((t, round(n)) for t, n in ranked[:50]))
