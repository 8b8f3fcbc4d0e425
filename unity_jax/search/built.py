"""What a planning problem is made of: its nodes, where tensors come from and who reads them (`build`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from unity_jax.ops.rule import Strategy
from unity_jax.pcg.graph import Op, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.assemble import Decisions, lift
from unity_jax.search.problem import Problem

Layouts = tuple[Layout, ...]
PARTIAL = 99  # where a place's layout holds partial sums


@dataclass(eq=False)
class Node:
    """One decision. `layouts` for a place, `strategies` of `ops` for ops; `apply(decisions, choice)` records the
    choice.
    """

    index: int
    kind: str  # "input", "place", "op" or "cluster"
    size: int
    ops: tuple[Op, ...] = ()
    tensor: Tensor | None = None
    layouts: Layouts = ()
    strategies: tuple[Sequence[Strategy], ...] = ()  # per op
    lifted: bool = False
    repeat: int = 1

    def apply(self, decisions: Decisions, choice: int) -> None:
        for op, strategies in zip(self.ops, self.strategies, strict=True):
            decisions.strategies[op] = strategies[choice]
        if self.tensor is not None:
            layout = self.layouts[choice]
            decisions.layouts[self.tensor] = lift(layout) if self.lifted else layout


@dataclass(frozen=True)
class Space:
    """Layouts to choose from, with a number that stands for them."""

    key: int
    layouts: Layouts


class Port(NamedTuple):
    """One end of a tensor: the node, and the layout that each of its choices makes or needs. `key`: a number that
    stands for the layouts."""

    node: int
    layouts: Layouts
    key: int
    repeat: int
    backward: bool


class Choices(NamedTuple):
    """What an op brings to every problem of a mesh that it runs alike in: a number that stands for it; its strategies,
    the seconds that each adds to a step and those it takes at least (a row each), those in which its kernels start, and
    of each operand and result its layouts, with the key of its port."""

    number: int
    strategies: Sequence[Strategy]
    seconds: np.ndarray
    start: float
    ins: list[tuple[Layouts, int]]
    outs: list[tuple[Layouts, int]]


class OpSeconds(NamedTuple):
    """The node that decides an op; the seconds that each of its choices takes at least, whatever overlaps, and those in
    which the op's kernels start, each time it runs; how often that is."""

    node: int
    least: np.ndarray
    start: float
    repeat: int


@dataclass(eq=False)
class Built:
    """A problem with the meaning of its nodes. `made` and `needed`: where each tensor comes from and who reads it.
    `arithmetic`: of each choice of a node, what it adds to a step at least, whatever overlaps; `of_ops`: the same op by
    op.
    """

    problem: Problem
    arithmetic: list[np.ndarray]
    of_ops: dict[Op, OpSeconds]
    nodes: list[Node]
    made: dict[Tensor, Port]
    needed: dict[Tensor, list[Port]]
    inputs: list[int]
    outputs: list[int]
    mesh: MeshAxes

    @functools.cached_property
    def targets(self) -> list[np.ndarray]:
        """What each choice of a node does with each mesh axis: (choices, axes), a factor or dimension, -1 for nothing.
        Nodes with the same choices share one array."""
        known: dict[int, np.ndarray] = {}
        found = []
        for node in self.nodes:
            of: Sequence[Strategy] | Layouts = node.strategies[0] if node.kind == "op" else node.layouts
            if id(of) not in known:
                does = of if node.kind == "op" else [self._does(lay) for lay in node.layouts]
                known[id(of)] = np.array(does, np.int64)
            found.append(known[id(of)])
        return found

    def _does(self, layout: Layout) -> list[int]:
        does = {**layout.axis_dim, **dict.fromkeys(layout.partial_axes, PARTIAL)}
        return [does.get(a, -1) for a in self.mesh.names]

    @functools.cached_property
    def least_seconds(self) -> float:
        """No plan takes less: the arithmetic of every op, split as well as it can be."""
        return self._summed(np.min)

    @functools.cached_property
    def most_seconds(self) -> float:
        """The arithmetic of every op under its worst strategy."""
        return self._summed(np.max)

    def _summed(self, of: Callable[[np.ndarray], float]) -> float:
        """Over all ops, one figure of the arithmetic of each under its strategies; equal ops share an array."""
        figures = {i: float(of(x)) for i, x in {id(x): x for x in self.arithmetic}.items()}
        return sum([figures[id(x)] for x in self.arithmetic])

    def decisions(self, assignment: Sequence[int], keep: bool) -> Decisions:
        """What an assignment of choices to nodes means."""
        found = Decisions(keep=keep)
        for node, choice in zip(self.nodes, assignment, strict=True):
            node.apply(found, int(choice))
        found.outputs = tuple(self.nodes[i].layouts[int(assignment[i])] for i in self.outputs)
        return found


class Solved(NamedTuple):
    """A problem without a memory limit, the best assignment found, plans of coarser meshes where that began, that of
    the program before it was rewritten, and whether the assignment is proved to be the best."""

    built: Built
    assignment: np.ndarray
    lifted: dict[MeshAxes, np.ndarray]
    before: np.ndarray | None
    exact: bool

    @property
    def cost(self) -> float:
        """Seconds of the assignment, all of it added up."""
        return self.built.problem.cost(self.assignment)
