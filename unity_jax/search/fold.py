"""A deep program folded: of each run of equal layers three are left, and the one in the middle stands for the others.

    BERT-Large, 24 layers, forward, backward and update: 18,719 ops    folded: about 3,000

Where a layer has one product only, two layers are one: they take turns to split columns and rows of their matrices. In
every pass the same layers are left; one whose first or last layer is not like the others has fewer.

A train step repeats itself in every pass, so its ops in program order are periodic where layers follow each other. What
is cut out has its like in the layer in the middle, whose tensors say for how many they stand (`Tensor.times`): a folded
program computes no function of interest, but every sum over its ops, with that as a factor, is that of the whole. So it
is planned in place of the whole, at the cost of three layers (`search.joint`), and the winner is done again on the
whole (`search.unfold`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.program import Program
from unity_jax.residuals.ranges import Layers, Parts
from unity_jax.rewrite.sites import fingerprint
from unity_jax.search.candidate import Pins
from unity_jax.search.limits import LIMITS
from unity_jax.xla.op_classes import PRODUCTS

LEFT = 3
"""Layers of a run that are left: the first, one that stands for all in the middle, the last."""

BEGINS = 8
"""Beginnings of a layer that are compared, those first where most turn from one layer to the next."""


class Folded(NamedTuple):
    """**Fields:** `program`: with the trees of the whole; `like`: what it has in place of each tensor of the whole;
    `pins`: those of the whole that are left; `layers`: how many the deepest stack has."""

    program: Program
    like: Mapping[Tensor, Tensor]
    pins: Pins
    layers: int


class Folds:
    """A program folded in several ways. **Fields:** `made`: all of them so far."""

    def __init__(self, program: Program, pins: Pins) -> None:
        self.whole, self.pins = program, pins
        self.made = dict[Layers | None, Folded]()
        every = folded(program, pins)
        if every is not None:
            pinned = pins.tensors or pins.outputs  # which are those of one way
            parts = None if pinned else Parts(every.layers, self._apart)
            self.made[None] = every._replace(program=dataclasses.replace(every.program, parts=parts))

    def _apart(self, layers: Layers) -> tuple[Program, Mapping[Tensor, Tensor]]:
        """The program folded with the first layers apart, and what it has in place of its tensors without that."""
        if layers not in self.made:
            found = folded(self.whole, self.pins, layers)
            assert found is not None
            self.made[layers] = found
        found, every = self.made[layers], self.made[None].like
        return found.program, {t: every[of] for of, t in found.like.items()}


def folded(program: Program, pins: Pins, part: Layers | None = None) -> Folded | None:
    """The program with all layers but three of each run cut out, or four; None if that is not much less of it.

    **Arguments:** `part`: the first layers, for which another one stands than for the rest.
    """
    cut = _Cut(program, pins, part)
    early = [run for run in _runs(program.graph.ops, pins.tensors) if not cut.follows(run)]
    for run in early:
        cut.read_later(run)
    ops = [op for op in program.graph.ops if op not in cut.gone]
    return _made(program, ops, cut, pins) if part or len(program.graph.ops) > 2 * len(ops) else None


class _Cut:
    """What is cut out of a program.

    **Fields:** `gone`: the ops; `like`: of tensors that are cut out those that are left; `times`: for how many those
    stand; `crossing`: what leaves a layer in the middle, and what that reads in its place.
    """

    def __init__(self, program: Program, pins: Pins, part: Layers | None) -> None:
        self.graph, self.part = program.graph, part
        self.gone = set[Op]()
        self.like: dict[Tensor, Tensor] = {}
        self.times: dict[Tensor, int] = {}
        self.crossing: dict[Tensor, Tensor] = {}
        self._layer_of: dict[Tensor, tuple[int, int]] = {}  # the stack of layers that a tensor is of, and which of them
        self._stacks: dict[int, _Stack] = {}

    @property
    def layers(self) -> int:
        """How many the deepest stack has."""
        return max(stack.layers for stack in self._stacks.values())

    def follows(self, run: _Run) -> bool:
        """Cut the layers of a run that follow each other, or those of the same stack as an earlier run has. False, and
        nothing is cut, of others: towers beside each other, which are stacked, or what is made ahead for each layer."""
        layers = _cut_right(run, self.graph.ops, self._layer_of).split(self.graph.ops)
        read, is_chain = _read_by_one(layers), _is_chain(layers)
        stack, which = _which(read, self._layer_of, len(layers))
        if stack in self._stacks or is_chain:
            self._cut(layers, read, stack, which, is_chain)
            return True
        return False

    def read_later(self, run: _Run) -> None:
        """Cut what is made of each layer of a stack ahead of the first one, known by which layer reads it."""
        layers = _cut_right(run, self.graph.ops, self._layer_of).split(self.graph.ops)
        stack, which = _which(_reads_one(layers, self.graph.ops), self._layer_of, len(layers))
        several = max(Counter(n for n in which if n >= 0).values(), default=0) > 1  # one layer reads several
        if stack in self._stacks and not several:
            self._cut(layers, _read_by_one(layers), stack, which, False)

    def _cut(
        self,
        layers: Sequence[Sequence[Op]],
        read: Mapping[Tensor, int],
        stack: int,
        which: Sequence[int],
        is_chain: bool,
    ) -> None:
        known = self._stacks.get(stack)
        unit = known.unit if known else 2 if sum(op.name in PRODUCTS for op in layers[0]) == 1 else 1
        ends = _ends(len(layers), unit, which[0] > which[-1])
        kept = {i for i, n in enumerate(which) if n < 0 or n in known.left} if known else ends
        known = self._stacks.setdefault(stack, _Stack(len(layers), unit, frozenset(ends)))
        if is_chain and not _is_run(set(range(len(layers))) - kept):
            kept = ends
        first = self.part.among(known.layers, unit) if self.part else 0
        turn = [(n < first, n % unit) for n in which]
        middle: dict[tuple[bool, int], int] = {}  # the layer that stands for others, of each turn
        cut = {i: m for i in range(len(layers)) if i not in kept and (m := middle.setdefault(turn[i], i)) != i}
        if not cut:
            return
        made = ((t, i) for i, ops in enumerate(layers) for op in ops for t in op.outputs)
        for t, i in (*read.items(), *made):
            self._layer_of.setdefault(t, (stack, which[i]))
        stood = Counter(cut.values())
        self.times.update((t, 1 + stood[m]) for m in middle.values() for op in layers[m] for t in op.outputs)
        for begins in {begins for begins, _ in middle}:
            some = [m for (n, _), m in middle.items() if n == begins]
            if any(stood[m] for m in some):
                self.crossing.update(_crossing(layers[max(some)], layers[max(some) + 1], layers[min(some)]))
        for i, m in cut.items():
            for op, by in zip(layers[i], layers[m], strict=True):
                self._stands(op, by, read)

    def _stands(self, op: Op, by: Op, read: Mapping[Tensor, int]) -> None:
        """Cut an op out; another one stands for it, and for what only its layer reads."""
        self.gone.add(op)
        self.like.update(zip(op.outputs, by.outputs, strict=True))
        for t, other in zip(op.inputs, by.inputs, strict=True):
            is_argument = t in read and t not in self.graph.producer  # a parameter, or what an optimizer keeps of one
            if is_argument and t not in self.like and _end(other, self.like) is not t:
                self.like[t] = other


class _Stack(NamedTuple):
    """Layers that follow each other in some pass. **Fields:** `layers`: how many; `unit`: of these take turns; `left`:
    which stand for themselves."""

    layers: int
    unit: int
    left: frozenset[int]


def _read_by_one(layers: Sequence[Sequence[Op]]) -> dict[Tensor, int]:
    """What is made outside of the layers and read by one of them, and by which."""
    made = {t for ops in layers for op in ops for t in op.outputs}
    readers: defaultdict[Tensor, set[int]] = defaultdict(set)
    for i, ops in enumerate(layers):
        for t in (t for op in ops for t in op.inputs if t.literal is None and t not in made):
            readers[t].add(i)
    return {t: i for t, found in readers.items() if len(found) == 1 for i in found}


def _reads_one(layers: Sequence[Sequence[Op]], ops: Sequence[Op]) -> dict[Tensor, int]:
    """What is made of one of the layers, and of which."""
    made = {t: i for i, layer in enumerate(layers) for op in layer for t in op.outputs}
    of = ((t, {made[x] for x in op.inputs if x in made}) for op in ops for t in op.outputs if t not in made)
    return {t: i for t, found in of if len(found) == 1 for i in found}


def _which(read: Mapping[Tensor, int], layer_of: Mapping[Tensor, tuple[int, int]], count: int) -> tuple[int, list[int]]:
    """Of which stack a run is the layers, and which of them each is: that of most of what it reads of other runs, or
    what those make of it. A new one, in order, where they read nothing of that."""
    votes = [Counter[tuple[int, int]]() for _ in range(count)]
    for t, i in read.items():
        if t in layer_of:
            votes[i][layer_of[t]] += 1
    stacks = Counter(stack for found in votes for stack, _ in found)
    if 2 * sum(map(bool, votes)) < count:
        return 1 + max((stack for stack, _ in layer_of.values()), default=0), list(range(count))
    stack = stacks.most_common(1)[0][0]
    ranked = (Counter({n: v for (s, n), v in found.items() if s == stack}) for found in votes)
    return stack, [found.most_common(1)[0][0] if found else -1 for found in ranked]


def _is_run(numbers: Set[int]) -> bool:
    """Whether some numbers follow each other."""
    return len(numbers) == max(numbers, default=-1) - min(numbers, default=0) + 1


def _ends(layers: int, unit: int, is_backward: bool) -> set[int]:
    """The layers at both ends that stand for themselves. The others take whole turns."""
    first, last = unit, unit + layers % unit
    first, last = (last, first) if is_backward else (first, last)
    return {i for i in range(layers) if i < first or i >= layers - last}


def _crossing(layer: Sequence[Op], following: Sequence[Op], like: Sequence[Op]) -> Iterator[tuple[Tensor, Tensor]]:
    """What a layer makes and the next one reads, with what that in the place of the next one (`like`) reads there."""
    made = {t for op in layer for t in op.outputs}
    for op, after in zip(like, following, strict=True):
        yield from ((y, x) for x, y in zip(op.inputs, after.inputs, strict=True) if y in made and x not in made)


def _is_chain(layers: Sequence[Sequence[Op]]) -> bool:
    """Whether some layer reads what another one makes."""
    at = {t: i for i, ops in enumerate(layers) for op in ops for t in op.outputs}
    return any(at.get(t, i) != i for i, ops in enumerate(layers) for op in ops for t in op.inputs)


def _end(t: Tensor, like: Mapping[Tensor, Tensor]) -> Tensor:
    while t in like:
        t = like[t]
    return t


def _made(program: Program, left: Sequence[Op], cut: _Cut, pins: Pins) -> Folded:
    """The program of the ops that are left."""
    graph = program.graph
    every = (*graph.inputs, *(t for op in graph.ops for t in op.outputs))
    ends = {t: _end(t, cut.like) for t in every}
    times = cut.times | Counter(ends[t] for t in graph.inputs)
    fresh = {t: dataclasses.replace(t, times=times.get(t, 1)) for t in dict.fromkeys(ends.values())}
    stands = {t: fresh[end] for t, end in ends.items()}
    for number, (y, x) in enumerate(cut.crossing.items(), 1):
        stands[x].enters = stands[y].leaves = number

    def over(ts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(stands.get(t, t) for t in ts)

    ops = [dataclasses.replace(op, inputs=over(op.inputs), outputs=over(op.outputs)) for op in left]
    results = over(graph.outputs)
    outputs = sorted({t: i for i, t in reversed(list(enumerate(results)))}.values())
    made = tuple(results[i] for i in outputs)
    read = {t for op in ops for t in op.inputs}.union(made, over([graph.inputs[i] for i in program.ties.values()]))
    unread = tuple(t for op in ops if read.isdisjoint(op.outputs) for t in op.outputs)  # only what is cut out reads it
    arguments = over(graph.inputs)
    inputs = sorted({t: i for i, t in reversed(list(enumerate(arguments))) if t in read}.values())
    inner = Graph(tuple(arguments[i] for i in inputs), made + unread, ops)
    place = {t: i for i, t in enumerate(inner.inputs)}
    n = len(program.constants)
    leaves = [i - n for i in inputs if i >= n]
    small = dataclasses.replace(
        program,
        graph=inner,
        constants=tuple(program.constants[i] for i in inputs if i < n),
        in_paths=tuple(program.in_paths[i] for i in leaves),
        in_suffixes=tuple(program.in_suffixes[i] for i in leaves),
        out_paths=tuple(program.out_paths[i] for i in outputs),
        donated=tuple(sorted({place[arguments[i]] for i in program.donated if arguments[i] in place})),
        ties={new: place[arguments[program.ties[old]]] for new, old in enumerate(outputs) if old in program.ties},
    )
    fixed = {new: pins.outputs[old] for new, old in enumerate(outputs) if old in pins.outputs}
    pinned = Pins({stands.get(t, t): layout for t, layout in pins.tensors.items()}, fixed)
    return Folded(small, stands, pinned, cut.layers)


# Runs


class _Run(NamedTuple):
    """Ops from `start` to `stop` that are each like the one a period later."""

    start: int
    stop: int
    period: int

    @property
    def layers(self) -> int:
        """How many whole periods there are."""
        return (self.stop - self.start) // self.period

    def split(self, ops: Sequence[Op]) -> list[Sequence[Op]]:
        """The ops of each whole period."""
        return [ops[self.start + i * self.period :][: self.period] for i in range(self.layers)]

    @property
    def cut(self) -> int:
        """How many ops are let go of."""
        return max(0, self.layers - LEFT) * self.period


def _runs(ops: Sequence[Op], pinned: Mapping[Tensor, Layout]) -> list[_Run]:
    """Runs that do not overlap, chosen by how many ops they let go of; in the order of the program."""
    kinds = _kinds(ops, pinned)
    found = [run for period in _periods(kinds) for run in _periodic(kinds, period)]
    taken, chosen = np.zeros(len(ops), bool), []
    layers = max(found, key=lambda r: r.cut).layers if found else 0  # of shorter periods there are parts of layers
    for run in sorted(found, key=lambda r: (-r.cut * (1 + (r.layers == layers)), r)):
        free = run.start + np.flatnonzero(~taken[run.start : run.stop])
        if len(free) and np.ptp(free) < len(free):  # what an earlier one took is at an end
            left = run._replace(start=int(free[0]), stop=int(free[-1]) + 1)
            if left.cut >= LIMITS.cut * len(ops):
                taken[left.start : left.stop] = True
                chosen.append(left)
    return sorted(chosen)


def _cut_right(run: _Run, ops: Sequence[Op], layer_of: Mapping[Tensor, tuple[int, int]]) -> _Run:
    """The run begun where each layer reads of earlier runs what belongs to one layer there; of such beginnings those
    that leave as many layers as there are, and of these the one that fewest tensors cross from layer to layer: layers
    that follow each other without reading each other have an order of their own."""
    made = {t: at for at, op in enumerate(ops[run.start : run.stop]) for t in op.outputs}
    crossed = np.zeros(run.period + 1, np.int64)  # at each beginning, but what crosses all of them
    reads = list[tuple[int, int]]()
    for at, op in enumerate(ops[run.start : run.stop]):
        reads += ((at, layer_of[t][1]) for t in op.inputs if t in layer_of)
        for begin in {made[t] for t in op.inputs if t in made}:
            if at - begin < run.period:
                first, last = (begin + 1) % run.period, at % run.period
                crossed[first] += 1
                crossed[last + 1] -= 1
                crossed[0] += first > last
    crossed = np.cumsum(crossed)[:-1]
    free = (run.stop - run.start) % run.period
    if not reads:
        return run._replace(start=run.start + int(np.argmin(crossed[: free + 1])))
    at, of = np.array(reads).T
    begins = _turns(at, of, run.period)
    likely = sorted(range(run.period), key=lambda b: (-begins[b], crossed[b]))[:BEGINS]
    best = min((_strays((at - b) // run.period, of), b > free, crossed[b], b) for b in {0, *likely})
    return run._replace(start=run.start + best[-1])


def _turns(at: np.ndarray, of: np.ndarray, period: int) -> np.ndarray:
    """How often, for each beginning of a period, ops at `at` turn there from reading of one layer to another."""
    turn = np.flatnonzero(np.diff(of))
    found = np.zeros(2 * period + 1, np.int64)
    first = (at[turn] + 1) % period
    np.add.at(found, first, 1)
    np.add.at(found, first + np.minimum(at[turn + 1] - at[turn], period), -1)
    return np.cumsum(found)[:-1].reshape(2, period).sum(axis=0)


def _strays(layer: np.ndarray, of: np.ndarray) -> int:
    """How many reads of layers are not of that layer which they read most of."""
    pairs, count = np.unique(np.stack([layer, of]), axis=1, return_counts=True)
    most = np.zeros(np.ptp(layer) + 1, np.int64)
    np.maximum.at(most, pairs[0] - layer.min(), count)
    return len(of) - int(most.sum())


def _kinds(ops: Sequence[Op], pinned: Mapping[Tensor, Layout]) -> np.ndarray:
    """A number for each op, equal for those that differ at most in the numbers that they are given: layers have their
    own."""
    numbers: dict[object, int] = {}
    known: dict[object, int] = {}  # of equal ops
    kinds = []
    for op in ops:
        pins = tuple([pinned.get(t) for t in (*op.inputs, *op.outputs)]) if pinned else ()
        same = op.signature, op.backward, pins
        if same not in known:
            name, ins, outs, params, *_ = op.signature
            bodies = tuple(fingerprint(b, numbers) for b in op.bodies)
            types = tuple((shape, dtype) for shape, dtype, _ in ins)
            kind = name, types, outs, "" if bodies else params, bodies, op.backward, pins
            known[same] = numbers.setdefault(kind, len(numbers))
        kinds.append(known[same])
    return np.array(kinds)


def _periods(kinds: np.ndarray) -> list[int]:
    order = np.argsort(kinds, kind="stable")
    same = kinds[order][1:] == kinds[order][:-1]
    gaps = Counter(np.diff(order)[same].tolist())
    return [gap for gap, _ in sorted(gaps.items(), key=lambda g: (-g[0] * g[1], g[0]))[: LIMITS.periods]]


def _periodic(kinds: np.ndarray, period: int) -> Iterator[_Run]:
    """Maximal runs of one period with more layers than are left."""
    same = np.concatenate([[False], kinds[period:] == kinds[:-period], [False]])
    edges = np.flatnonzero(same[1:] != same[:-1])
    starts, stops = edges[::2], edges[1::2]
    long = stops - starts >= LEFT * period
    for start, stop in zip(starts[long].tolist(), stops[long].tolist(), strict=True):
        yield _Run(start, stop + period, period)
