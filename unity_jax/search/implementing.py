"""Which groups of a program run by an implementation of their own: those that are faster so on the machine.

Both ways are priced as they would be planned for all devices, if the program were nothing else. Large loops are laid
out over one mesh axis, or over two where one leaves much undivided: that two could save communication, too, makes no
difference in the zoo, and takes ten times as long to find out.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from unity_jax.implement.arrange import Arrangement
from unity_jax.implement.attention import with_kernels
from unity_jax.implement.bags import baggable, bagged
from unity_jax.implement.group import Group
from unity_jax.implement.loops import batchable, batched, widened
from unity_jax.implement.persistent import persistable, persisted
from unity_jax.implement.record import Attention, Bags, Implementation, Loops, Persistent, attending
from unity_jax.kernels.tiles import LANES, VMEM, padded, whole
from unity_jax.machine.device import Device
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Graph, Op, nested, part
from unity_jax.program import Program
from unity_jax.residuals.change import positions
from unity_jax.search.options import SearchOptions
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner
from unity_jax.xla.targets import target_of

WIDEST = 4.0
"""How many times what a loop slices and stacks there may be of new arrays of all its steps: an LSTM has four gates.
What a user computes by chunks or microbatches, so that such arrays are not there, stays so."""
WIDEST_ROW = 256
"""Bytes of the features of a position that a kernel for a GPU has memory for on every chip: on an L4 for 100 KiB."""
_ROOM = 2.0**27
"""Memory on the chip of a TPU, for plans of other devices whose loops are to be kernels."""
FEW = 64
"""How many ops of a part are planned in full: an attention has up to 49, the cell of a recurrent layer 31, a layer of a
transformer 179 and more."""
UNDIVIDED = 0.5
"""The part of a step that arithmetic takes beyond even shares, where other meshes are tried: of a batch of 32 over 64
devices in a row nearly all."""
MANY = 2**14
"""Ids of all bags: fewer take no time."""
HELD = 4
"""How many times what is read of all positions is on the chip: two arrays, and those of the next program."""


def implemented(program: Program, machine: Machine, options: SearchOptions) -> Program:
    """A program with those loops and attentions by another implementation that are faster so on a machine, or what
    `options` ask for; one that was rewritten since it was traced as it is."""
    if program.rewrites:
        return program
    price = _Price(machine)
    if options.loops != "xla":
        program = _with_loops(program, price, forced=options.loops in ("batch", "kernel"))
    if options.loops == "kernel" or (options.loops == "choose" and _keeps_loops(machine.device)):
        program = _with_persistent(program, price, forced=options.loops == "kernel")
    if options.attention == "kernel" or (options.attention == "choose" and has_kernels(machine.device)):
        program = _with_attentions(program, price, forced=options.attention == "kernel")
    if options.bags == "rows" or (options.bags == "choose" and target_of(machine.device).sorts):
        program = _with_bags(program, price, forced=options.bags == "rows")
    return program


def _with_loops(program: Program, price: _Price, forced: bool) -> Program:
    ways = {scan: _Way([scan], functools.partial(batched, scans=[scan])) for scan in batchable(program.graph)}
    return _with_ops(program, price, Loops, ways, lambda scan, saved: forced or (saved > 0 and _is_narrow(scan)))


def _with_persistent(program: Program, price: _Price, forced: bool) -> Program:
    room = (price.machine.device.chip_bytes or _ROOM) - VMEM
    bodies = persistable(program.graph, room)
    ways = {scan: _Way([scan], functools.partial(persisted, bodies={scan: body})) for scan, body in bodies.items()}
    record = functools.partial(Persistent, room=room)
    return _with_ops(program, price, record, ways, lambda _, saved: forced or saved > 0)


def _with_bags(program: Program, price: _Price, forced: bool) -> Program:
    ways = {
        op: _Way([rows, op], functools.partial(bagged, made=op.outputs))
        for op, (rows, bags) in baggable(program.graph).items()
        if forced or math.prod(bags.inputs[1].shape) >= MANY
    }
    return _with_ops(program, price, Bags, ways, lambda _, saved: forced or saved > 0)


def _is_narrow(scan: Op) -> bool:
    """Whether what is computed for all steps at once is not much larger than what there is already."""
    return widened(scan) <= WIDEST


class _Way(NamedTuple):
    """Ops of a program, and what makes of their graph that of their implementation."""

    ops: Sequence[Op]
    done: Callable[[Graph], Graph]


def _with_ops(
    program: Program,
    price: _Price,
    record: Callable[..., Implementation],
    ways: Mapping[Op, _Way],
    pays: Callable[[Op, float], bool],
) -> Program:
    """A program with those of some ops by another implementation where that pays.

    **Arguments:** `ways`: by the op that makes what they are for; `pays`: of that, by what it saves of a step in
    seconds.
    """
    chosen = defaultdict[str, list[tuple[Op, float]]](list)
    repeats = {op: repeat for _, graph, repeat in nested(program.graph) for op in graph.ops}
    for op, way in ways.items():
        before = part(way.ops, op.outputs)
        both = functools.partial(lambda before, way: (before, way.done(before)), before, way)
        saved = repeats[op] * price.difference((record, str(before)), both)
        if pays(op, saved):
            chosen[op.source].append((op, saved))
    for where, ops in chosen.items():
        places = positions(program.graph, (op.outputs[0] for op, _ in ops))
        done = record(places, where, sum(saved for _, saved in ops))
        program = program.implemented(done.applied(program.graph), (done,))
    return program


def _keeps_loops(device: Device) -> bool:
    """Whether a device has kernels for loops: TPUs that say how much memory there is on the chip."""
    return has_kernels(device) and target_of(device).lanes and device.chip_bytes > 0


def _with_attentions(program: Program, price: _Price, forced: bool) -> Program:
    kinds = defaultdict[object, list[_Priced]](list)

    def look(graph: Graph, groups: Sequence[Group], repeat: int) -> Sequence[Group]:
        for group in groups:
            kind = _kind(group)
            key = kind, tuple(group.gradients), group.scores.exp.backward
            saved = repeat * price.difference(key, functools.partial(_both, graph, group))
            kinds[kind].append(_Priced(group, saved))
        return ()

    attending(program.graph, look)
    device, trains = price.machine.device, any(op.backward for op in program.graph.ops)
    chosen = defaultdict[str, list[_Priced]](list)
    for alike in kinds.values():
        possible = is_possible(alike[0].group, device)
        if (possible and _pays(alike, trains)) or (forced and (possible or not has_kernels(device))):
            for one in alike:
                chosen[one.group.scores.exp.source].append(one)
    for where, same in chosen.items():
        places = positions(program.graph, (one.group.place for one in same))
        done = Attention(places, where, sum(one.saved for one in same))
        program = program.implemented(done.applied(program.graph), (done,))
    return program


class _Priced(NamedTuple):
    """An attention, and the seconds of a step that a kernel saves."""

    group: Group
    saved: float


def _pays(alike: Sequence[_Priced], trains: bool) -> bool:
    """Whether kernels save time for attentions that are alike, forward and backward: together, and those with gradients
    by themselves, since what these compute again may be kept. Without them, what is kept would be computed twice."""
    late = [one.saved for one in alike if one.group.gradients or not trains]
    return bool(late) and sum(late) > 0 and sum(one.saved for one in alike) > 0


def has_kernels(device: Device) -> bool:
    """Whether kernels are compiled for a device: GPUs that Triton compiles for (compute capability 8.0 and later)
    multiply bfloat16 as fast as float16, as TPUs do."""
    rate = device.flops_per_second
    return target_of(device).kernels and rate("bfloat16") >= rate("float16")


def is_possible(group: Group, device: Device) -> bool:
    """Whether a device has a kernel for it: of one type of at most 32 bits, its features in few bytes on a GPU, and on
    a TPU with all positions of a head, or of all heads that share keys, on the chip."""
    scores, arrangement = group.scores, Arrangement.of(group)
    assert scores.q is not None and scores.k is not None
    arrays = [of.tensor for of in (scores.q, scores.k, group.v)]
    if not has_kernels(device) or len({t.dtype for t in arrays}) > 1 or arrays[0].itemsize > 4:
        return False
    features = max(of.tensor.shape[of.dims.index(name)] for name, of in (("f", scores.q), ("fv", group.v)))
    if not target_of(device).lanes:
        return padded(features, device.compiler) * arrays[0].itemsize <= WIDEST_ROW
    size = [math.prod(arrangement.size[label] for label in of) for of in (arrangement.shared, arrangement.query)]
    positions = max(math.prod(size), arrangement.size[scores.key])
    held = HELD * positions * whole(features, LANES) * arrays[0].itemsize
    return held <= device.chip_bytes - VMEM


def _kind(group: Group) -> object:
    """What attentions of equal shapes are alike in, forward and backward."""
    scores = group.scores
    arrays = [scores.q, scores.k, group.v, *scores.biases, *(mask.which for mask in scores.masks)]
    shapes = tuple((of.tensor.shape, str(of.tensor.dtype), of.dims) for of in arrays if of is not None)
    return shapes, scores.causal, group.drop is None


class _Price:
    """What parts of a program take on the devices of a machine, each planned as a program of its own."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._meshes = [mesh for mesh in mesh_candidates(machine.num_devices, machine) if len(mesh.names) < 3]
        self._known: dict[object, float] = {}

    def difference(self, key: object, make: Callable[[], tuple[Graph, Graph]]) -> float:
        """Seconds by which the one takes longer than the other. Those of equal keys are equal, and made once."""
        if key not in self._known:
            before, after = map(self._seconds, make())
            self._known[key] = before - after
        return self._known[key]

    def _seconds(self, graph: Graph) -> float:
        names = ("",) * len(graph.inputs)
        program = Program("part", graph, (), None, None, names, ("",) * len(graph.outputs), names, (), {})
        planner, found = Planner(program, self.machine, math.inf), list[float]()
        if sum(1 for _ in graph.walk()) <= FEW:
            return planner.plan(self._meshes).seconds
        for mesh in self._meshes:
            found += [plan.seconds for plan in planner.sketch([mesh])]
            if planner.wasted(mesh) < UNDIVIDED * found[-1]:
                break
        return min(found)


def _both(graph: Graph, group: Group) -> tuple[Graph, Graph]:
    """An attention of a graph as it is, and with a kernel."""
    made = with_kernels(graph, [group])
    return _apart(graph, made), _apart(made, graph)


def _apart(graph: Graph, other: Graph) -> Graph:
    """The ops of a graph that compute what another one does not, and what others read of that."""
    ops = [op for op in graph.ops if not any(t in other.producer for t in op.outputs)]
    own = set(ops)
    read = {t for op in graph.ops if op not in own for t in op.inputs}.union(graph.outputs)
    return part(ops, [t for op in ops for t in op.outputs if t in read])
