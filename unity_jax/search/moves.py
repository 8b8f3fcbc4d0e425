"""What it costs to move tensors between the nodes of a planning problem (`build`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.search.built import Layouts, Node, Port
from unity_jax.search.problem import Edge, Shared


@dataclass(eq=False)
class Moves:
    """From where tensors are made to where they are read, and from there to places that several readers share (`held`).

    What moves from one choice of a node to the same one is added to its costs (`unary`). **Arguments:** `keep`: the
    backward pass reuses what the forward pass gathered; `intern`: see `Builder`.
    """

    resharder: Resharder
    intern: Callable[[Hashable, Callable[[], Any]], Any]
    keep: bool
    nodes: Sequence[Node]
    unary: list[np.ndarray]
    made: Mapping[Tensor, Port]
    needed: Mapping[Tensor, list[Port]]
    held: Mapping[Tensor, Port]

    def all(self) -> tuple[list[Edge], list[Shared]]:
        """One edge per tensor and reader; readers of one pass share what they gather."""
        edges: list[Edge] = []
        shared: list[Shared] = []
        for t, ports in self.needed.items():
            source = self.made[t]
            if t in self.held:
                edges += self._edges(t, source, ports[:1])
                ports, source = ports[1:], self.held[t]
            ports = [p for p in ports if p.node != source.node or p.layouts != source.layouts]
            ports = [p for p in ports if not (self.nodes[p.node].size == 1 and self.nodes[source.node].size == 1)]
            groups: dict[tuple[bool, int], list[Port]] = {}
            for p in ports:
                groups.setdefault((p.backward and not self.keep, p.repeat), []).append(p)
            for group in groups.values():
                if len(group) == 1:
                    edges += self._edges(t, source, group)
                else:
                    shared.append(self._shared(t, source, group))
        return edges, shared

    def _edges(self, t: Tensor, source: Port, ports: Sequence[Port]) -> list[Edge]:
        found = []
        for p in ports:
            key = ("edge", t.shape, source.key, p.key, p.repeat)
            table = self.intern(key, lambda: self._table(t, source, p))  # noqa: B023
            if source.node == p.node:
                loop = self.intern(("diagonal", key), lambda: np.diagonal(table).copy())  # noqa: B023
                self.unary[p.node] = self.intern(
                    ("sum", id(self.unary[p.node]), ("diagonal", key)),
                    lambda: self.unary[p.node] + loop,  # noqa: B023
                )
            elif table.any():
                found.append(Edge(source.node, p.node, table))
        return found

    def _table(self, t: Tensor, source: Port, p: Port) -> np.ndarray:
        ids, table = self._costs(t, (*source.layouts, *p.layouts))
        rows = [ids[lay] for lay in source.layouts]
        columns = [ids[lay] for lay in p.layouts]
        return np.ascontiguousarray(table[np.ix_(rows, columns)] * p.repeat)

    def _costs(self, t: Tensor, wanted: Layouts) -> tuple[dict[Layout, int], np.ndarray]:
        distinct = tuple(dict.fromkeys(wanted))
        table = self.resharder.table(t.shape, t.dtype, distinct)
        return {lay: i for i, lay in enumerate(distinct)}, table

    def _shared(self, t: Tensor, source: Port, ports: Sequence[Port]) -> Shared:
        key = ("shared", t.shape, source.key, *[p.key for p in ports], ports[0].repeat)

        def make() -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
            ids, table = self._costs(t, tuple(lay for p in (source, *ports) for lay in p.layouts))
            return (
                np.array([ids[lay] for lay in source.layouts]),
                tuple(np.array([ids[lay] for lay in p.layouts]) for p in ports),
                table * ports[0].repeat,
            )

        sources, targets, cost = self.intern(key, make)
        return Shared(source.node, tuple(p.node for p in ports), sources, targets, cost)
