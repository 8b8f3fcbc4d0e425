"""Expert plans: what a practitioner would write down, completed to full plans. They seed the search and are its
yardstick.

Data parallelism, ZeRO-1 (arXiv:1910.02054), FSDP (ZeRO-3), Megatron tensor parallelism (arXiv:1909.08053) with and
without sequence sharding (arXiv:2205.05198), and their two-dimensional combinations; for recommendation models, tables
split over the devices and everything else data parallel (arXiv:2104.05158).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from unity_jax.ops.bags import GATHER, SCATTER
from unity_jax.ops.numbers import is_gather
from unity_jax.ops.rule import Strategy
from unity_jax.pcg.graph import Op, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program
from unity_jax.search.built import Built, Node
from unity_jax.search.parameters import Roles
from unity_jax.search.refine import coarser
from unity_jax.search.rule_cache import RuleCache


@dataclass(frozen=True)
class Expert:
    """A style of parallelism: which axes split the batch, which the weights, and what the batch axes shard besides."""

    data: tuple[str, ...]
    model: tuple[str, ...] = ()
    shard_params: bool = False  # over the data axes (FSDP)
    shard_state: bool = False  # optimizer state over the data axes (ZeRO-1)
    sequence: bool = False  # activations between tensor-parallel blocks are split too
    tables: tuple[str, ...] = ()  # of the data axes, those that split tables of rows instead of the batch
    over: tuple[str, ...] = ()  # of the data axes, those that shard parameters, if not all do (hybrid sharding)

    @property
    def name(self) -> str:
        data = f"fsdp({','.join(self.over)}) of dp" if self.over else ""
        data = data or ("fsdp" if self.shard_params else "zero1" if self.shard_state else "dp")
        model = "tp+sp" if self.sequence else "tp"
        styles = {data: self.data, model: self.model, "tables": self.tables}
        return " x ".join(f"{style}({','.join(axes)})" for style, axes in styles.items() if axes)

    @property
    def is_combined(self) -> bool:
        """Whether it does different things on different axes; other experts are those of a coarser mesh."""
        return bool((self.data and self.model) or self.over) or len(self.tables) not in (0, len(self.data))

    def named(self, mesh: MeshAxes) -> Iterator[tuple[MeshAxes, str]]:
        """What it is called on a mesh and, unless it is combined, on the coarser ones, where it does the same."""
        yield mesh, self.name
        for coarse, _ in () if self.is_combined else coarser(mesh):
            axes = {of: coarse.names for of in ("data", "model", "tables") if getattr(self, of)}
            yield coarse, replace(self, **axes).name


def experts(mesh: MeshAxes) -> Iterator[Expert]:
    """The experts of a mesh: every split of its axes into data (outer) and model (inner) axes, in every style; and data
    parallelism with tables over all axes or one. On three axes, parameters are sharded over one data axis, too.
    """
    names = mesh.names
    for cut in range(len(names), -1, -1):
        data, model = names[:cut], names[cut:]
        styles = [(False, False), (False, True), (True, True)] if data else [(False, False)]
        for params, state in styles:
            for sequence in (False, True) if model else (False,):
                yield Expert(data, model, params, state, sequence)
                if params and len(data) > 1 and len(names) > 2:
                    yield from (Expert(data, model, True, True, sequence, over=(a,)) for a in data)
    for tables in dict.fromkeys([names, *((name,) for name in names)]):
        yield Expert(names, tables=tables)


def divides(program: Program, devices: int) -> bool:
    """Whether each matrix of the state has a dimension that so many devices divide. Where they do not, an expert of all
    axes of a mesh shards it over those that do (hybrid sharding), which no coarser mesh has."""
    state = (program.graph.inputs[i] for i in program.ties.values())
    return all(t.rank < 2 or any(n % devices == 0 for n in t.shape) for t in state)


def expert_seeds(
    program: Program,
    built: Built,
    mesh: MeshAxes,
    rules: RuleCache,
    styles: Iterable[Expert] | None = None,
    known: dict[Expert, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """A full assignment of the problem for every expert, by name; those that come out equal are kept once.

    **Arguments:** `styles`: the experts to complete, all of the mesh by default; `known`: those completed before, for
    the same program and mesh, to which the others are added.
    """
    completed = {} if known is None else known
    completion = functools.cache(lambda: _Completion(program, built, mesh, rules))
    found: dict[bytes, str] = {}
    seeds: dict[str, np.ndarray] = {}
    wanted = list(experts(mesh) if styles is None else styles)
    missing = [e for e in wanted if e not in completed and (not e.tables or completion().roles.tables)]
    if missing:
        completed.update(zip(missing, completion().complete(missing), strict=True))
    for expert in (e for e in wanted if e in completed):
        assignment = completed[expert]
        if np.isfinite(built.problem.cost(assignment)) and assignment.tobytes() not in found:
            found[assignment.tobytes()] = expert.name
            seeds[expert.name] = assignment
    return seeds


@dataclass(frozen=True)
class _Neighbour:
    node: int
    table: np.ndarray  # (choices of the neighbour, choices of this node)


class _Completion:
    """Completes the rules of thumb of experts to plans, op by op in program order, each as cheaply as what is decided
    allows; all experts at once, whose choices are the columns of one array.

    Weights and what is computed from weights alone wait until the first op that mixes them with activations has
    decided.
    """

    def __init__(self, program: Program, built: Built, mesh: MeshAxes, rules: RuleCache) -> None:
        self.built, self.mesh, self.rules = built, mesh, rules
        self.roles = Roles.of(program, rules, mesh.num_devices)
        self.neighbours: list[list[_Neighbour]] = [[] for _ in built.nodes]
        for e in built.problem.edges:
            self._join(e.i, e.j, e.table)
        for s in built.problem.shared:
            for c, targets in zip(s.consumers, s.targets, strict=True):
                self._join(s.producer, c, s.cost[np.ix_(s.source, targets)])
        self.arrays: dict[int, np.ndarray] = {}  # strategies, by identity
        self.lazy = [self._waits(n) for n in built.nodes]
        self.wants = [self._batch_of(n) for n in built.nodes]
        self.along = [self.roles.along[n.ops[0]] if n.ops else frozenset() for n in built.nodes]
        numbers: dict[object, int] = {}
        self.alike = [numbers.setdefault(self._kind(n), len(numbers)) for n in built.nodes]

    def _join(self, i: int, j: int, table: np.ndarray) -> None:
        if i != j:
            self.neighbours[i].append(_Neighbour(j, table.T))
            self.neighbours[j].append(_Neighbour(i, table))

    def _batch_of(self, node: Node) -> list[Set[int]]:
        """Per op of a node its batch factors; for a place or input, its batch dimensions."""
        if node.ops:
            return [self.roles.batch_of[op] for op in node.ops]
        t = node.tensor
        shift = 1 if node.lifted else 0
        return [{d - shift for d in range(t.rank) if (t, d) in self.roles.batch}] if t is not None else [set()]

    def _waits(self, node: Node) -> bool:
        if node.kind == "input":
            return not any((node.tensor, d) in self.roles.batch for d in range(node.tensor.rank if node.tensor else 0))
        if node.kind == "output":
            return True
        if node.ops:
            return not any(self.roles.batch_of[op] for op in node.ops) and not node.ops[0].backward
        return not any(self._batch_of(node))

    def complete(self, experts: Sequence[Expert]) -> list[np.ndarray]:
        """The assignment of each expert."""
        first: dict[int, Node] = {}
        for node, number in zip(self.built.nodes, self.alike, strict=True):
            first.setdefault(number, node)
        considered = {n: np.array([self._allowed(node, e) for e in experts]) for n, node in first.items()}
        allowed = [considered[number] for number in self.alike]  # of each node: (experts, choices)
        chosen = np.full((len(allowed), len(experts)), -1)
        decided = [False] * len(allowed)
        for node in self.built.nodes:
            if not self.lazy[node.index]:
                self._settle(node.index, chosen, decided, allowed, experts)
        for node in self.built.nodes:
            self._settle(node.index, chosen, decided, allowed, experts)
        stale = [True] * len(allowed)  # whether a neighbour has changed since the node was last chosen
        for _ in range(2):
            for i in range(len(allowed)):
                if stale[i]:
                    stale[i], now = False, self._best(i, chosen, decided, allowed[i])
                    if (now != chosen[i]).any():
                        chosen[i] = now
                        for n in self.neighbours[i]:
                            stale[n.node] = True
        return list(np.ascontiguousarray(chosen.T))

    def _settle(
        self,
        i: int,
        chosen: np.ndarray,
        decided: list[bool],
        allowed: list[np.ndarray],
        experts: Sequence[Expert],
    ) -> None:
        stack = [i]
        while stack:
            j = stack.pop()
            if decided[j]:
                continue
            node = self.built.nodes[j]
            if node.ops:
                narrow = self._tensor_parallel if node.kind == "op" else self._elementwise
                narrowed = allowed[j].copy()
                for c, expert in enumerate(experts):
                    if expert.model:
                        narrowed[c] &= narrow(node, expert, chosen[:, c])
                allowed[j] = np.where(np.any(narrowed, axis=1)[:, None], narrowed, allowed[j])
            chosen[j] = self._best(j, chosen, decided, allowed[j], others=allowed)
            decided[j] = True
            stack += [n.node for n in reversed(self.neighbours[j]) if not decided[n.node] and self.lazy[n.node]]

    def _tensor_parallel(self, node: Node, expert: Expert, chosen: np.ndarray) -> np.ndarray:
        """Megatron's rule for an op with a weight: where the activation arrives split over the contracted dimension,
        contract it (row parallel), else split the weight's own dimension (column parallel); an embedding is split over
        its rows.
        """
        (op,), (strategies,) = node.ops, node.strategies
        everything = np.ones(node.size, bool)
        if op.name not in ("dot_general", "conv_general_dilated") and not is_gather(op):
            return everything
        rule = self.rules(op)
        weights = [
            i for i, t in enumerate(op.inputs) if (p := self.built.made.get(t)) is not None and self.lazy[p.node]
        ]
        factors = [{f[0] for f in dims if f} for dims in rule.operands]
        summed = {i for i, f in enumerate(rule.factors) if f.kind == "sum"}
        own = set().union(*(factors[i] for i in weights)) if weights else set().union(*map(set, factors)) - summed
        if weights and not is_gather(op):
            contracted = any(
                f and f[0] in summed and set(made.dims[d]) & set(expert.model)
                for i, dims in enumerate(rule.operands)
                if i not in weights and (made := self._layout_of(op.inputs[i], chosen)) is not None
                for d, f in enumerate(dims)
            )
            own = own & summed if contracted else own - summed
        elif is_gather(op):
            own &= summed
        return np.all(self._split(strategies, expert.model, own), axis=1)

    def _split(self, strategies: Sequence[Strategy], axes: Sequence[str], factors: Iterable[int]) -> np.ndarray:
        """(strategies, axes) whether an axis splits one of some factors."""
        if id(strategies) not in self.arrays:
            self.arrays[id(strategies)] = np.array(strategies, np.int64).reshape(len(strategies), -1)
        at = self.arrays[id(strategies)][:, [self.mesh.names.index(a) for a in axes]]
        return (at[:, :, None] == np.array(sorted(factors), np.int64)).any(axis=2)

    def _elementwise(self, node: Node, expert: Expert, chosen: np.ndarray) -> np.ndarray:
        """Without sequence sharding, what lies between the matmuls is split over model axes only where it already
        arrives so.
        """
        if expert.sequence or self.lazy[node.index] or not self.wants[node.index][0]:
            return np.ones(node.size, bool)
        shape = node.ops[0].outputs[0].shape
        operands = {t for op in node.ops for t in op.inputs if t.shape == shape}
        arrived = {
            (a, d)
            for t in operands
            if (made := self._layout_of(t, chosen)) is not None
            for a, d in made.axis_dim.items()
        }
        split = ([(a, lay.axis_dim[a]) for a in expert.model if a in lay.axis_dim] for lay in node.layouts)
        return np.array([arrived.issuperset(s) for s in split])

    def _layout_of(self, t: Tensor, chosen: np.ndarray) -> Layout | None:
        port = self.built.made.get(t)
        return None if port is None or chosen[port.node] < 0 else port.layouts[chosen[port.node]]

    def _best(
        self,
        i: int,
        chosen: np.ndarray,
        decided: list[bool],
        allowed: np.ndarray,
        others: list[np.ndarray] | None = None,
    ) -> np.ndarray:
        """The cheapest choice of each expert given what is decided; of what waits (`others`) the best is hoped for."""
        cost = np.where(allowed, self.built.problem.unary[i], np.inf)
        if cost.shape[1] > 1:
            for n in self.neighbours[i]:
                if decided[n.node]:
                    cost += n.table[chosen[n.node]]
                elif others is not None and self.lazy[n.node]:
                    cost += np.where(others[n.node][:, :, None], n.table, np.inf).min(axis=1)
        return cost.argmin(axis=1)

    def _kind(self, node: Node) -> object:
        """Equal for nodes of which every expert considers the same choices."""
        wants = frozenset(self.wants[node.index][0])
        if not node.ops:
            held = node.tensor in self.roles.params, node.tensor in self.roles.layers, self._is_table([node.tensor])
            return id(node.layouts), wants, node.kind, held
        first = node.ops[0]
        kind = first.name in _WEIGHTED, self._is_table(first.inputs[:1]), self._is_statistic(node)
        return id(node.strategies[0]), wants, self.along[node.index], kind

    def _allowed(self, node: Node, expert: Expert) -> np.ndarray:
        """Which choices of a node the expert would consider; all, if none of them is possible."""
        if node.ops:
            allowed = self._allowed_op(node, expert, self.along[node.index])
        elif node.kind == "output":
            allowed = np.ones(node.size, bool)
        else:
            allowed = self._allowed_place(node, expert)
        return allowed if allowed.any() else np.ones(node.size, bool)

    def _allowed_place(self, node: Node, expert: Expert) -> np.ndarray:
        where = self._dims(node.layouts)[:, [self.mesh.names.index(a) for a in expert.data]]
        everything, whole = np.ones(node.size, bool), np.all(where < 0, axis=1)
        if expert.tables and self._is_table([node.tensor]):
            wanted = np.array([a in expert.tables for a in expert.data])
            return everything if node.kind != "input" else np.all((where >= 0) == wanted, axis=1)
        dims = self.wants[node.index][0]
        if dims:
            on_batch: np.ndarray = np.all(np.isin(where, sorted(dims)), axis=1)
            return on_batch if on_batch.any() else everything
        layer = node.tensor in self.roles.layers
        if node.kind != "input" and not (layer and expert.shard_params):
            return everything if expert.shard_params else whole
        if not (expert.shard_params if layer or node.tensor in self.roles.params else expert.shard_state):
            return whole
        if expert.over:
            return np.all((where >= 0) == np.array([a in expert.over for a in expert.data]), axis=1)
        together: np.ndarray = np.all((where == where[:, :1]) & (where >= 0), axis=1)
        if together.any():
            return together
        # Where not all data axes can split a tensor, as many as can do (hybrid sharding), and the others hold copies.
        shards = np.where(where >= 0, [self.mesh[a] for a in expert.data], 1).prod(axis=1)
        return np.equal(shards, shards.max())

    def _dims(self, layouts: Sequence[Layout]) -> np.ndarray:
        """(layouts, axes) the dimension that each axis splits, -1 for none."""
        if id(layouts) not in self.arrays:
            where = [[lay.axis_dim.get(a, -1) for a in self.mesh.names] for lay in layouts]
            self.arrays[id(layouts)] = np.array(where, np.int64).reshape(len(layouts), -1)
        return self.arrays[id(layouts)]

    def _allowed_op(self, node: Node, expert: Expert, positions: frozenset[int]) -> np.ndarray:
        """Data axes split the batch wherever an op has one; model axes split what else the op has."""
        first, strategies, batch = node.ops[0], node.strategies[0], self.wants[node.index][0]
        if expert.tables and first.name in _ROWS and self._is_table(first.inputs[:1]):
            return self._allowed_rows(first, strategies, batch, expert)
        allowed = np.ones(node.size, bool)
        if batch:
            on_batch = self._split(strategies, expert.data, batch).all(axis=1)
            if on_batch.any():
                allowed &= on_batch
        elif self._is_statistic(node) or not (expert.tables or expert.shard_params or expert.shard_state):
            # Whoever keeps weights whole sums gradients whole and updates all of them everywhere. The moments of a
            # batch norm are no weights: two sums that all devices need are one collective.
            allowed &= ~self._split(strategies, expert.data, range(len(self.rules(first).factors))).any(axis=1)
        if expert.model:
            # Model axes never split the batch, and split positions only between the matmuls, if at all.
            moves = expert.sequence and first.name not in _WEIGHTED
            kept = batch if moves else batch | positions
            allowed &= ~self._split(strategies, expert.model, kept).any(axis=1)
        return allowed

    def _allowed_rows(self, op: Op, strategies: Sequence[Strategy], batch: set[int], expert: Expert) -> np.ndarray:
        """Axes of tables split rows or columns. The others split the batch of a lookup; of the updates whatever is
        cheapest: the tables are alike along them.
        """
        own = {f[0] for f in self.rules(op).operands[0] if f}
        wanted = [own if a in expert.tables else batch if is_gather(op) else None for a in self.mesh.names]
        return np.array([all(w is None or f in w for f, w in zip(s, wanted, strict=True)) for s in strategies])

    def _is_statistic(self, node: Node) -> bool:
        return any(t in self.roles.statistics for op in node.ops for t in op.outputs)

    def _is_table(self, tensors: Sequence[Tensor | None]) -> bool:
        return any(t is not None and t.shape in self.roles.tables for t in tensors)


_ROWS = ("gather", "scatter-add", GATHER, SCATTER)
_WEIGHTED = ("dot_general", "conv_general_dilated", *_ROWS)
