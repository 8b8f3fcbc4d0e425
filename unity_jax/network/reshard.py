"""The cheapest way to move one tensor from one layout to another.

    >>> resharder = Resharder(Machine.preset("h100:8"), MeshAxes(("data", "model"), (2, 4)))
    >>> source, target = Layout((("data", "model"), ())), Layout((("data",), ("model",)))
    >>> [str(m) for m in resharder.path((64, 64), "float32", source, target)]
    ['exchange [data+model,.] -> [data,model]']

A `Move` is one parallel op on one tensor, and at most one collective. The moves of a rank form a graph over all its
canonical layouts, built once per (rank, number of mesh axes); a shape fills in the costs, which are lines in the
payload bytes, and a min-plus closure (Floyd and Warshall) gives every pair at once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unity_jax import _compat
from unity_jax.machine.device import Device
from unity_jax.machine.machine import Machine
from unity_jax.machine.tiling import exchanging_bytes
from unity_jax.network.communication import Lines, all_lines
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import COLLECTIVES, Move

_KINDS = tuple(kind for kind in COLLECTIVES if kind != "shift")  # those that change layouts

# Passes over the result in device memory: slices and masks read and write it, shards of an inner dimension are copied
# into place. A small term beside the network's, which breaks ties the way a device would.
_PASSES = {"partition": 2, "replicate": 2, "combine": 1, "reduce": 0, "reduce_scatter": 1, "exchange": 1}

_MAX_STATES = 2048  # a closure of this many layouts takes about 20 seconds; more is a mistake


def payload_shape(move: Move, shape: tuple[int, ...], mesh: MeshAxes) -> tuple[int, ...]:
    """The per-device shape of the larger of a move's operand and result, padded as the collective needs it."""
    k = mesh.size(move.axes)
    before, after = list(move.before.local_shape(shape, mesh)), move.after.local_shape(shape, mesh)
    if move.kind == "combine" and move.dim is not None:
        before[move.dim] *= k
    elif move.kind == "reduce_scatter" and move.dim is not None:
        before[move.dim] = after[move.dim] * k
    elif move.kind == "exchange" and move.target_dim is not None:
        before[move.target_dim] = after[move.target_dim] * k
    return tuple(before)


def move_bytes(move: Move, shape: tuple[int, ...], dtype: Any, mesh: MeshAxes) -> int:
    """Payload bytes per device: an all-gather's result, any other collective's operand, 0 for a local move."""
    return 0 if move.collective is None else math.prod(payload_shape(move, shape, mesh)) * itemsize(dtype)


def turning_seconds(move: Move, shape: tuple[int, ...], dtype: Any, mesh: MeshAxes, device: Device) -> float:
    """Seconds to put in order what an all-to-all sends and what it brings; no other move needs that."""
    if move.kind != "exchange" or move.target_dim is None:
        return 0.0
    payload, parts = payload_shape(move, shape, mesh), mesh.size(move.axes)
    nbytes = exchanging_bytes(device, payload, move.target_dim, parts, itemsize(dtype))
    return nbytes / (device.memory_bandwidth * device.memory_efficiency)


def itemsize(dtype: Any) -> int:
    """Bytes per element; a typed PRNG key counts as its two 32-bit words."""
    return 8 if _compat.is_key(dtype) else np.dtype(dtype).itemsize


State = tuple[int, ...]
"""A layout as a number per mesh axis: the dimension that it splits, `rank` if replicated, `rank + 1` if partial."""


class _Edges(NamedTuple):
    """Moves between the states of one rank, as parallel arrays; `dim` and `target` are -1 where they do not apply."""

    kind: np.ndarray  # index into _KINDS
    axes: np.ndarray  # bit i: mesh axis i moves
    dim: np.ndarray
    target: np.ndarray
    before: np.ndarray  # index into the states
    after: np.ndarray


@functools.lru_cache(maxsize=64)
def _states(rank: int, num_axes: int, partial: bool) -> tuple[State, ...]:
    return tuple(itertools.product(range(rank + 1 + partial), repeat=num_axes))


@functools.lru_cache(maxsize=64)
def _edges(rank: int, num_axes: int, partial: bool) -> _Edges:
    """All moves that keep the canonical order. Padding is not looked at here: it depends on the shape."""
    choices = rank + 1 + partial
    place = [choices ** (num_axes - 1 - i) for i in range(num_axes)]  # a state's index is its number in this base
    rows = []
    for index, state in enumerate(_states(rank, num_axes, partial)):
        for now in set(state):
            group = [i for i, s in enumerate(state) if s == now]
            for axes in _movable(group, suffix=now < rank):
                bits = sum(1 << i for i in axes)
                step = sum(place[i] for i in axes)
                for new in range(choices):
                    kind = _kind(now, new, rank)
                    if kind is None or (new < rank and any(s == new and i > axes[0] for i, s in enumerate(state))):
                        continue
                    dim, target = (now, new) if kind == "exchange" else (min(now, new), -1)
                    rows.append(
                        (_KINDS.index(kind), bits, dim if dim < rank else -1, target, index, index + step * (new - now))
                    )
    return _Edges(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)


@functools.lru_cache(maxsize=64)
def _shards(rank: int, sizes: tuple[int, ...], partial: bool) -> np.ndarray:
    """(N, rank + 1) shards of each dimension in each state, on mesh axes of these sizes; 1 in the last column."""
    states = np.array(_states(rank, len(sizes), partial), dtype=np.int64).reshape(-1, len(sizes))
    columns = [np.where(states == d, sizes, 1).prod(axis=1) for d in range(rank)]
    return np.stack([*columns, np.ones(len(states), dtype=np.int64)], axis=1)


def _movable(group: list[int], suffix: bool) -> Iterable[tuple[int, ...]]:
    """The sets of axes that can leave a group at once: its minor-most ones in a dimension, any others elsewhere."""
    if suffix:
        return [tuple(group[i:]) for i in range(len(group))]
    return itertools.chain.from_iterable(itertools.combinations(group, n) for n in range(1, len(group) + 1))


def _kind(now: int, new: int, rank: int) -> str | None:
    """The move that takes axes from one state to another."""
    if now == new:
        return None
    if now < rank:
        return "exchange" if new < rank else "combine" if new == rank else None
    if now == rank:
        return "partition" if new < rank else "replicate"
    return "reduce_scatter" if new < rank else "reduce"


class _Costed(NamedTuple):
    """The moves that are legal for one shape, with what they cost."""

    edges: _Edges
    nbytes: np.ndarray  # payload per device
    seconds: np.ndarray


class Resharder:
    """Costs and cheapest paths between layouts on one machine and mesh.

    **Arguments:** `combined`: only what a move costs in any case: not what it reads and writes on its own device beside
    its collective, which a kernel may do by the way, nor the start of a collective of these kinds, which a compiler
    combines with others.
    """

    def __init__(self, machine: Machine, mesh: MeshAxes, combined: Collection[str] | None = None) -> None:
        self.machine, self.mesh = machine, mesh
        subsets = range(1 << len(mesh.names))
        self._group_size = np.array([math.prod(s for i, s in enumerate(mesh.sizes) if b >> i & 1) for b in subsets])
        kinds = [COLLECTIVES[k] or "" for k in _KINDS]
        lines = all_lines(machine, mesh, [k for k in kinds if k])
        # (kind of move, axes) -> the least over algorithms of the greatest of lines (seconds, seconds per byte)
        self._lines = _padded([[lines.get((k, b), (((0.0, 0.0),),)) for b in subsets] for k in kinds])
        if combined is not None:
            self._lines[[i for i, k in enumerate(_KINDS) if k in combined], ..., 0] = 0.0
        self._passes = np.array([_PASSES[k] * (combined is None) for k in _KINDS]) / machine.device.memory_bandwidth
        # Closures are up to a megabyte each and are shared by all layouts of a shape; tables and paths are small.
        self._closure = functools.lru_cache(maxsize=128)(self._make_closure)
        self._table = functools.cache(self._make_table)
        self._path = functools.cache(self._make_path)
        self._seconds = functools.cache(self._make_seconds)
        self._index = functools.cache(self._make_index)

    def table(self, shape: tuple[int, ...], dtype: Any, layouts: Sequence[Layout]) -> np.ndarray:
        """Seconds of the cheapest path between all pairs: entry (i, j) takes `layouts[i]` to `layouts[j]`.

        Infinite where there is none (between partial layouts that mix reductions). Read-only. Raises `ValueError` for a
        layout that is not canonical on this mesh.
        """
        return self._table(tuple(shape), itemsize(dtype), tuple(layouts))

    def seconds(self, shape: tuple[int, ...], dtype: Any, source: Layout, target: Layout) -> float:
        """Seconds of the cheapest path between two layouts, as in `table`."""
        return self._seconds(tuple(shape), itemsize(dtype), source, target)

    def path(self, shape: tuple[int, ...], dtype: Any, source: Layout, target: Layout) -> tuple[Move, ...]:
        """The cheapest moves from `source` to `target`; of equally cheap paths the fewest moves, then the fewest bytes.

        Raises `ValueError` where there is no path.
        """
        return self._path(tuple(shape), itemsize(dtype), source, target)

    def _make_seconds(self, shape: tuple[int, ...], size: int, source: Layout, target: Layout) -> float:
        reductions = {_reduction(source), _reduction(target)} - {None}
        if len(reductions) > 1 or "mixed" in reductions:
            return float(self._table(shape, size, (source, target))[0, 1])
        (reduction,) = reductions or (None,)
        at, to = (self._index(layout, len(shape), reduction is not None) for layout in (source, target))
        return float(self._distances(shape, size, reduction, [at, to])[at, to])

    def _make_table(self, shape: tuple[int, ...], size: int, layouts: tuple[Layout, ...]) -> np.ndarray:
        rank = len(shape)
        reductions = [_reduction(layout) for layout in layouts]
        out = np.full((len(layouts), len(layouts)), np.inf)
        groups = {r: [i for i, q in enumerate(reductions) if q == r] for r in dict.fromkeys(reductions)}
        groups.setdefault(None, [])
        to_plain, from_plain = {}, {}
        plain = self._indices(_states(rank, len(self.mesh.names), False), rank, True)
        for reduction, members in groups.items():
            if reduction == "mixed":
                continue
            partial = reduction is not None
            rows = {i: self._index(layouts[i], rank, partial) for i in dict.fromkeys(members + groups[None])}
            ids = list(rows)
            at = list(rows.values())
            distance = self._distances(shape, size, reduction, at)
            out[np.ix_(ids, ids)] = distance[np.ix_(at, at)]
            if partial:
                mine = [rows[i] for i in members]
                to_plain[reduction] = distance[np.ix_(mine, plain)]
                from_plain[reduction] = distance[np.ix_(plain, mine)]
        for r, q in itertools.permutations(to_plain, 2):  # a partial sum becomes a partial max by being finished
            out[np.ix_(groups[r], groups[q])] = (to_plain[r][:, :, None] + from_plain[q][None]).min(axis=1)
        for i, j in itertools.product(groups.get("mixed", []), range(len(layouts))):
            if layouts[i] == layouts[j]:
                out[i, j] = 0.0
        out.flags.writeable = False
        return out

    def _make_path(self, shape: tuple[int, ...], size: int, source: Layout, target: Layout) -> tuple[Move, ...]:
        if source == target:
            return ()
        rank, r, q = len(shape), _reduction(source), _reduction(target)
        if "mixed" in (r, q):
            raise ValueError(f"no path from {source} to {target}: reductions of different kinds do not commute")
        if r is not None and q is not None and r != q:  # through the best finished value
            plain = [self._layout(s, rank, None) for s in _states(rank, len(self.mesh.names), False)]
            table = self._make_table(shape, size, (source, target, *plain))
            middle = plain[int(np.argmin(table[0, 2:] + table[2:, 1]))]
            return self._path(shape, size, source, middle) + self._path(shape, size, middle, target)
        reduction = r or q
        start, goal = (self._index(layout, rank, reduction is not None) for layout in (source, target))
        distance = self._distances(shape, size, reduction, [start, goal])[:, goal]
        costed = self._costed(shape, size, reduction)
        e = costed.edges
        # The edges of cheapest paths, searched breadth first: fewest moves, then fewest bytes, then edge order.
        tight = np.flatnonzero(costed.seconds + distance[e.after] <= distance[e.before] + 1e-9 * distance[start])
        leaving: dict[int, list[int]] = {}
        for edge in tight:
            leaving.setdefault(int(e.before[edge]), []).append(int(edge))
        best: dict[int, tuple[int, tuple[int, ...]]] = {start: (0, ())}
        seen = {start}
        while goal not in best:
            layer: dict[int, tuple[int, tuple[int, ...]]] = {}
            for node, (nbytes, trail) in best.items():
                for edge in leaving.get(node, ()):
                    after = int(e.after[edge])
                    candidate = (nbytes + int(costed.nbytes[edge]), (*trail, edge))
                    if after not in seen and (after not in layer or candidate < layer[after]):
                        layer[after] = candidate
            if not layer:
                raise ValueError(f"no path from {source} to {target} of shape {shape}")
            seen.update(layer)
            best = layer
        return tuple(self._move(e, edge, rank, reduction) for edge in best[goal][1])

    def _distances(self, shape: tuple[int, ...], size: int, reduction: str | None, at: list[int]) -> np.ndarray:
        """(N, N) seconds between states, of which those at some indices count: on the way between two of which none is
        so, no dimension has as many empty shards as others, which are sent, too."""
        split: np.ndarray = _shards(len(shape), self.mesh.sizes, reduction is not None)[:, :-1]
        can: np.ndarray = np.all(split < 2 * np.maximum(shape, 1), axis=1)
        return self._closure(shape, size, reduction, None if not can[at].all() else can.tobytes())

    def _make_closure(self, shape: tuple[int, ...], size: int, reduction: str | None, can: bytes | None) -> np.ndarray:
        """(N, N) seconds between all states, or between those that can be."""
        costed = self._costed(shape, size, reduction)
        n = len(_states(len(shape), len(self.mesh.names), reduction is not None))
        whole = np.full((n, n), np.inf)
        whole[costed.edges.before, costed.edges.after] = costed.seconds
        np.fill_diagonal(whole, 0.0)
        states = np.arange(n) if can is None else np.flatnonzero(np.frombuffer(can, bool))
        distance = whole[np.ix_(states, states)]
        through = np.empty_like(distance)
        for k in range(len(states)):
            np.add(distance[:, k, None], distance[None, k, :], out=through)
            np.minimum(distance, through, out=distance)
        whole[np.ix_(states, states)] = distance
        return whole

    def _costed(self, shape: tuple[int, ...], size: int, reduction: str | None) -> _Costed:
        """The moves that padding allows, with bytes and seconds.

        A dimension split over more or fewer axes must keep its elements in place: either one side is unsplit (drop or
        add the padding), or the blocks of the finer split tile those of the coarser one, padding included.
        """
        rank, num_axes, partial = len(shape), len(self.mesh.names), reduction is not None
        if (count := (rank + 1 + partial) ** num_axes) > _MAX_STATES:
            raise ValueError(f"too many layouts of rank {rank} on mesh {self.mesh}: {count} > {_MAX_STATES}")
        e = _edges(rank, num_axes, partial)
        split = _shards(rank, self.mesh.sizes, partial)  # (N, rank + 1); the last column stands for "no dimension"
        local = -(-np.array((*shape, 1)) // split)
        k = self._group_size[e.axes]

        def tiles(dim: np.ndarray, finer: np.ndarray, coarser: np.ndarray) -> np.ndarray:
            unsplit = split[coarser, dim] == 1
            return (dim < 0) | unsplit | (local[finer, dim] * k == local[coarser, dim])

        leaves = np.isin(e.kind, [_KINDS.index(s) for s in ("combine", "exchange")])
        legal = tiles(e.dim, np.where(leaves, e.before, e.after), np.where(leaves, e.after, e.before))
        legal &= tiles(e.target, e.after, e.before)
        if reduction in ("max", "min"):
            legal &= e.kind != _KINDS.index("reduce_scatter")
        e = _Edges(*(a[legal] for a in e))
        k = k[legal]

        payload, rows = local[e.before], np.arange(len(k))
        padded = {"combine": (e.dim, e.before), "reduce_scatter": (e.dim, e.after), "exchange": (e.target, e.after)}
        for kind, (dim, state) in padded.items():
            at = rows[e.kind == _KINDS.index(kind)]
            payload[at, dim[at]] = local[state[at], dim[at]] * k[at]
        local_bytes = local.prod(axis=1) * size
        has_collective = np.array([COLLECTIVES[k] is not None for k in _KINDS])[e.kind]
        nbytes = payload.prod(axis=1) * size * has_collective
        latency, per_byte = np.moveaxis(self._lines[e.kind, e.axes], -1, 0)
        seconds = (latency + per_byte * nbytes[:, None, None]).max(axis=2).min(axis=1)
        seconds += self._passes[e.kind] * local_bytes[e.after]
        if (device := self.machine.device).layout_tile[1]:
            for i in rows[e.kind == _KINDS.index("exchange")]:
                turned = exchanging_bytes(device, tuple(payload[i].tolist())[:rank], int(e.target[i]), int(k[i]), size)
                seconds[i] += turned / (device.memory_bandwidth * device.memory_efficiency)
        return _Costed(e, nbytes, seconds)

    def _indices(self, states: Iterable[State], rank: int, partial: bool) -> list[int]:
        base = rank + 1 + partial
        return [functools.reduce(lambda index, s: index * base + s, state, 0) for state in states]

    def _make_index(self, layout: Layout, rank: int, partial: bool) -> int:
        """The index of a layout among the states."""
        held = (*itertools.chain.from_iterable(layout.dims), *layout.partial_axes)
        ordered = all(self.mesh.ordered(axes) == axes for axes in layout.dims)
        if len(layout.dims) != rank or not ordered or len(set(held)) != len(held) or set(held) - set(self.mesh.names):
            raise ValueError(
                f"layout {layout} is not one of a rank-{rank} tensor on mesh {self.mesh}: each mesh axis is used at "
                "most once, and the axes of one dimension are in mesh order"
            )
        where = {**layout.axis_dim, **dict.fromkeys(layout.partial_axes, rank + 1)}
        return self._indices([tuple(where.get(a, rank) for a in self.mesh.names)], rank, partial)[0]

    def _layout(self, state: State, rank: int, reduction: str | None) -> Layout:
        names = self.mesh.names
        dims = tuple(tuple(a for a, s in zip(names, state, strict=True) if s == d) for d in range(rank))
        partial = (a for a, s in zip(names, state, strict=True) if s == rank + 1)
        return Layout(dims, () if reduction is None else tuple((a, reduction) for a in partial))

    def _move(self, e: _Edges, i: int, rank: int, reduction: str | None) -> Move:
        states = _states(rank, len(self.mesh.names), reduction is not None)
        axes = tuple(a for bit, a in enumerate(self.mesh.names) if e.axes[i] >> bit & 1)
        dim, target = (None if d < 0 else int(d) for d in (e.dim[i], e.target[i]))
        before, after = (self._layout(states[s[i]], rank, reduction) for s in (e.before, e.after))
        return Move(_KINDS[e.kind[i]], axes, dim, target, before, after)


def _padded(rows: list[list[Lines]]) -> np.ndarray:
    """(kinds, axes, algorithms, lines, 2): algorithms and lines are repeated to equal numbers."""
    flat = [lines for row in rows for lines in row]
    algorithms, most = max(map(len, flat)), max(len(algorithm) for lines in flat for algorithm in lines)

    def fill(lines: Lines) -> list[list[tuple[float, float]]]:
        full = [[*a, *[a[-1]] * (most - len(a))] for a in lines]
        return [*full, *[full[-1]] * (algorithms - len(full))]

    return np.array([[fill(lines) for lines in row] for row in rows])


def _reduction(layout: Layout) -> str | None:
    """The one reduction of a partial layout; `"mixed"` if it has several, which no order of moves could finish."""
    kinds = {r for _, r in layout.partial}
    return None if not kinds else kinds.pop() if len(kinds) == 1 else "mixed"
