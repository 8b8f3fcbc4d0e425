"""Meshes of many axes: start from plans of coarser meshes, then plan one axis anew while the others stay, exactly, in
turn.

A plan for a mesh (8) is a plan for (2, 4): both axes do what the one did. So plans of coarser meshes seed finer ones,
and no mesh is planned worse than one it refines. With three axes an op has hundreds of strategies; those that differ
from its current one along a single axis are few, and choosing among them for the whole program at once is a problem as
small as for one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from unity_jax.pcg.graph import Tensor
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.assemble import Decisions, unlift
from unity_jax.search.built import Built, Node, Solved
from unity_jax.search.limits import LIMITS
from unity_jax.search.problem import Edge, Problem, Shared, Usage
from unity_jax.search.solver import adapted, solve, store_for
from unity_jax.search.tables import Store


def by_one_axis_at_a_time(built: Built) -> bool:
    """Whether all axes together make too many choices: three axes always, two axes for thousands of ops."""
    axes = len(built.mesh.names)
    return axes > 2 or (axes == 2 and sum(node.size for node in built.nodes) > LIMITS.axis_choices)


def coarser(mesh: MeshAxes) -> Iterator[tuple[MeshAxes, tuple[int, ...]]]:
    """Meshes with two neighbouring axes merged into one, with the coarse axis that each axis belongs to."""
    for i in range(len(mesh.names) - 1):
        sizes = (*mesh.sizes[:i], mesh.sizes[i] * mesh.sizes[i + 1], *mesh.sizes[i + 2 :])
        group = tuple(j if j <= i else j - 1 for j in range(len(mesh.names)))
        yield MeshAxes(mesh.names[: len(sizes)], sizes, mesh.order), group


def refined(coarse: Built, assignment: Sequence[int], fine: Built, group: Sequence[int]) -> np.ndarray | None:
    """The assignment of the finer problem that does the same; None where some node cannot do it."""
    if len(coarse.nodes) != len(fine.nodes):
        return None
    known: dict[object, np.ndarray] = {}
    found = np.zeros(len(fine.nodes), np.int64)
    for i, (old, new, choice) in enumerate(zip(coarse.targets, fine.targets, map(int, assignment), strict=True)):
        if len(new) > 1:
            key = id(old), id(new), choice
            if key not in known:
                known[key] = np.flatnonzero((new == old[choice][list(group)]).all(axis=1))[:1]
            if not len(known[key]):
                return None
            found[i] = known[key][0]
    return found


def lifted(fine: Built, solved: Callable[[MeshAxes], Solved | None]) -> dict[MeshAxes, np.ndarray]:
    """The solutions of the meshes that one refines, of those that have one, as plans for that one."""
    found: dict[MeshAxes, np.ndarray] = {}
    for coarse, group in coarser(fine.mesh):
        known = solved(coarse)
        same = refined(known.built, known.assignment, fine, group) if known is not None else None
        if same is not None:
            found[coarse] = same
    return found


def carried(old: Built, assignment: Sequence[int], new: Built, store: Store, improving: bool = True) -> np.ndarray:
    """The assignment of a variant of a program for the same mesh: what both have in common is as it was; what is new,
    and what is next to that, is best for it; then single changes are made that are cheaper.

    **Arguments:** `improving`: whether those changes are made, which may take more memory.
    """
    known: dict[object, object] = {}
    for node, choice in zip(old.nodes, assignment, strict=True):
        known.update(_meanings(node, int(choice)))
    return _fitted(new, [_choice(node, known) for node in new.nodes], store, improving)


def decided(decisions: Decisions, new: Built, store: Store, like: Mapping[Tensor, Tensor]) -> np.ndarray:
    """The assignment of a program in which every tensor is as its like in another one, of which these are the
    decisions; what has none is best for it.

    **Arguments:** `like`: what the other program has in place of tensors of this one; a stack in place of one of its
    parts.
    """
    known: dict[object, object] = {(t, "op"): s for op, s in decisions.strategies.items() for t in op.outputs}

    def choice(node: Node) -> int | None:
        t = node.tensor and like.get(node.tensor, node.tensor)
        if t in decisions.layouts:
            is_part = node.lifted or (node.tensor is not None and t is not None and t.rank > node.tensor.rank)
            wanted = unlift(decisions.layouts[t]) if is_part else decisions.layouts[t]
            return node.layouts.index(wanted) if wanted in node.layouts else None
        return _choice(node, known, like)

    return _fitted(new, [choice(node) for node in new.nodes], store, False)


def _fitted(new: Built, choices: Sequence[int | None], store: Store, improving: bool) -> np.ndarray:
    """The assignment with these choices, and the best ones for nodes that have none and for those next to them."""
    keep = [np.arange(n.size) if c is None else np.array([c]) for n, c in zip(new.nodes, choices, strict=True)]
    fresh = {node.index for node, choice in zip(new.nodes, choices, strict=True) if choice is None}
    terms = [(e.i, e.j) for e in new.problem.edges] + [(s.producer, *s.consumers) for s in new.problem.shared]
    for i in {i for term in terms if not fresh.isdisjoint(term) for i in term}:
        keep[i] = np.arange(new.nodes[i].size)
    return adapted(new.problem, keep, store, improving)


def _meanings(node: Node, choice: int) -> Iterator[tuple[object, object]]:
    """What a choice means, by what stays in a variant: the tensors that ops make, the places of tensors."""
    for op, strategies in zip(node.ops, node.strategies, strict=True):
        yield from (((t, "op"), strategies[choice]) for t in op.outputs)
    if node.tensor is not None:
        yield (node.tensor, node.kind, node.lifted), node.layouts[choice]


def _choice(
    node: Node, known: Mapping[object, object], like: Mapping[Tensor, Tensor] = MappingProxyType({})
) -> int | None:
    """The choice of a node that means what is known; None if nothing is."""
    for op, strategies in zip(node.ops, node.strategies, strict=True):
        if not op.outputs:
            continue
        source = like.get(op.outputs[0], op.outputs[0])
        before = known.get((source, "op"))
        if isinstance(before, tuple) and source.rank > op.outputs[0].rank:  # of a stack, whose parts are elementwise
            before = tuple(s - (s > 0) for s in before) if 0 not in before else None
        if before is not None and before in strategies:
            return list(strategies).index(before)
    t = node.tensor
    before = None if t is None else known.get((like.get(t, t), node.kind, node.lifted))
    return node.layouts.index(before) if before in node.layouts else None


def by_axis(built: Built, seeds: Sequence[np.ndarray], rounds: int = 3) -> np.ndarray:
    """The best seed, improved by planning each axis anew, the others fixed, until no axis improves; never worse than a
    seed.
    """
    slices, store, actions = _Slices(built.problem), store_for(built.problem), built.targets
    best = min(seeds, key=built.problem.rank)
    axes, settled = len(built.mesh.names), 0  # how many axes in turn no longer improve
    for turn in range(rounds * axes):
        axis = axes - 1 - turn % axes
        keep = [np.array([0])] * len(built.nodes)
        for i, t in enumerate(actions):
            others = np.delete(t, axis, axis=1)
            keep[i] = np.flatnonzero((others == others[best[i]]).all(axis=1))
        start = np.array([np.flatnonzero(k == b)[0] for k, b in zip(keep, best, strict=True)])
        found = solve(slices.take(keep), seeds=[start], store=store)
        better = np.array([k[c] for k, c in zip(keep, found.assignment, strict=True)])
        settled = settled + 1 if built.problem.rank(better) >= built.problem.rank(best) else 0
        best = best if settled else better
        if settled == axes:
            break
    return best


class _Slices:
    """Problems over parts of the domains; equal slices of equal arrays stay one array, for the solver to recognise."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[object, np.ndarray] = {}

    def take(self, keep: Sequence[np.ndarray]) -> Problem:
        p = self.problem
        kept = [k.tobytes() for k in keep]
        return Problem(
            [self._cut(u, (kept[i], keep[i])) for i, u in enumerate(p.unary)],
            [Edge(e.i, e.j, self._cut(e.table, (kept[e.i], keep[e.i]), (kept[e.j], keep[e.j]))) for e in p.edges],
            [
                Shared(
                    s.producer,
                    s.consumers,
                    self._cut(s.source, (kept[s.producer], keep[s.producer])),
                    tuple(self._cut(t, (kept[c], keep[c])) for c, t in zip(s.consumers, s.targets, strict=True)),
                    s.cost,
                )
                for s in p.shared
            ],
            [Usage(u.node, self._cut(u.bytes, (kept[u.node], keep[u.node])), u.start, u.end) for u in p.usage],
            p.limit,
        )

    def _cut(self, array: np.ndarray, *along: tuple[bytes, np.ndarray]) -> np.ndarray:
        key = (id(array), *(b for b, _ in along))
        if key not in self.known:
            self.known[key] = np.ascontiguousarray(array[np.ix_(*(k for _, k in along))])
        return self.known[key]
