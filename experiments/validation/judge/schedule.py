"""A walk over scheduled HLO with three streams: compute, network, and copies between the memories of a TPU.

Each instruction runs after the one before it; what is asynchronous starts where it stands on its own stream, and its
`-done` waits for it. Kernels take what XLA:TPU estimates in cycles, or their roofline on a GPU (`kernels`); collectives
what rings take (`network`). A loop runs twice, and all its later iterations as long as the second.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from unity_jax.aot.cycles import CLOCKS
from unity_jax.aot.hlo import Instruction, Module
from unity_jax.aot.sites import replica_groups, source_target_pairs

from .kernels import H100, NO_KERNEL, Computation, Gpu, kernel_seconds, traffic
from .nccl import Nodes
from .network import STEPS, Mesh2D, Network

COLLECTIVES = (*STEPS, "all-to-all", "collective-permute")
NETWORK, COPIES = "network", "copies"


@dataclass(frozen=True)
class Device:
    """How many devices there are, their network, bytes per second of the memory of one, and seconds of an instruction
    that computes."""

    count: int
    network: Network
    memory: float
    seconds: Callable[[Instruction, Computation, Module], float]


def device(machine: str) -> Device:
    """Of `h100:8`, `h100:4x8` (nodes x GPUs) or `v5e:2x4`."""
    kind, _, sizes = machine.partition(":")
    counts = [int(n) for n in sizes.split("x")]
    if kind == "h100" and len(counts) <= 2:
        return Device(math.prod(counts), Nodes(counts[-1]), H100.memory, _roofline(H100))
    if kind == "v5e" and len(counts) == 2:
        # 819 GB/s: https://docs.cloud.google.com/tpu/docs/v5e
        return Device(math.prod(counts), Mesh2D(*counts), 8.19e11, _cycles(CLOCKS[kind], 8.19e11))
    raise ValueError(f"no judge for {machine!r}: it knows h100:GPUS, h100:NODESxGPUS and v5e:XxY")


def _roofline(gpu: Gpu) -> Callable[[Instruction, Computation, Module], float]:
    return lambda op, computation, module: kernel_seconds(op, computation, module, gpu)


def _cycles(clock: float, memory: float) -> Callable[[Instruction, Computation, Module], float]:
    """The compiler's own estimate; where it gives none, as for gathers and scatters, the length of the schedule and the
    time of the bytes in the large memory that it reads and writes, for which it waits between rows."""

    def seconds(op: Instruction, computation: Computation, module: Module) -> float:
        if op.cycles is not None and op.scheduled is None:
            return op.cycles / clock
        arrays = [a for name in op.operands if name in computation for a in computation[name].arrays] + op.arrays
        if op.opcode in NO_KERNEL or op.opcode == "custom-call":
            return 0.0
        whole = sum(a.bytes for a in arrays if a.space == 0 and a.shape)
        return (op.scheduled or 0) / clock + min(whole, traffic(op, computation, module)) / memory

    return seconds


def judge(module: Module, machine: str) -> float:
    """Seconds of one step of a compiled program on a machine: see `device`."""
    run = _Run(module, device(machine))
    run.all(module.entry)
    return max(run.now, *run.free.values())


@dataclass
class _Run:
    """A walk over a schedule: what the time is on the compute stream, when the other streams are free, and when what
    was started ends."""

    module: Module
    device: Device
    now: float = 0.0
    free: dict[str, float] = field(default_factory=lambda: {NETWORK: 0.0, COPIES: 0.0})
    ends: dict[str, float] = field(default_factory=dict)

    def all(self, computation: str) -> None:
        for op in self.module.computations[computation].values():
            self._one(op, self.module.computations[computation])

    def _one(self, op: Instruction, computation: Computation) -> None:
        if op.opcode == "while":
            self._loop(op)
        elif op.opcode == "conditional":
            self._branches(op)
        elif op.opcode == "call":
            self.all(op.called[0])
        elif op.opcode.endswith("-done"):
            self.now = max(self.now, self.ends[op.operands[0]])
        elif op.opcode.endswith("-update"):
            self.ends[op.name] = self.ends[op.operands[0]]
        elif found := next(self._collectives(op, computation), None):
            self._collective(op, *found)
        elif op.opcode.endswith("-start"):  # a copy or a slice, from one memory to the other
            self.ends[op.name] = self._on(
                COPIES, op.arrays[-2 if op.opcode == "slice-start" else 0].bytes / self.device.memory
            )
        else:
            self.now += self.device.seconds(op, computation, self.module)

    def _on(self, stream: str, seconds: float) -> float:
        """Start something on a stream now, or when it is free; when it will end."""
        self.free[stream] = max(self.now, self.free[stream]) + seconds
        return self.free[stream]

    def _collectives(self, op: Instruction, computation: Computation) -> Iterator[tuple[Instruction, Computation]]:
        """The collectives that an instruction is or contains, with their computation."""
        if op.opcode.removesuffix("-start") in COLLECTIVES:
            yield op, computation
        elif op.opcode in ("fusion", "async-start"):
            for name in op.called:
                for inner in self.module.computations[name].values():
                    yield from self._collectives(inner, self.module.computations[name])

    def _collective(self, op: Instruction, collective: Instruction, computation: Computation) -> None:
        """One collective. XLA:TPU hides it behind a chain of fusions: the first starts it, the last awaits it."""
        seconds = self._collective_seconds(collective, computation)
        chain = re.search(r'chain_id="(\d+)"', collective.attributes)
        if chain is not None:
            inside = " ".join(i.attributes for i in computation.values())
            if '"AsyncCollectiveStart"' in inside:
                self.ends[chain[0]] = self._on(NETWORK, seconds)
            self.now += (op.cycles or 0) and self.device.seconds(op, computation, self.module)
            if '"AsyncCollectiveDone"' in inside:
                self.now = max(self.now, self.ends[chain[0]])
        elif op.opcode.endswith("-start"):
            self.ends[op.name] = self._on(NETWORK, seconds)
        else:
            self.now = self._on(NETWORK, seconds)

    def _collective_seconds(self, op: Instruction, computation: Computation) -> float:
        nbytes = float(sum(a.bytes for name in op.operands for a in computation[name].arrays))
        kind = op.opcode.removesuffix("-start")
        if kind == "collective-permute":
            return self.device.network.permute_seconds(source_target_pairs(op.attributes), nbytes)
        groups = tuple(map(tuple, replica_groups(op.attributes))) or (tuple(range(self.device.count)),)
        if len(groups[0]) == 1:
            return 0.0
        if kind == "all-gather":
            nbytes *= len(groups[0])
        root = next(i for i in computation.values() if i.root)
        if kind == "all-reduce" and root.opcode == "dynamic-slice" and op.name in root.operands:
            kind = "reduce-scatter"  # as XLA:TPU writes one that it made itself
        return self.device.network.seconds(kind, groups, nbytes)

    def _loop(self, op: Instruction) -> None:
        body = re.search(r"body=(%?[\w.\-]+)", op.attributes)
        assert body is not None, op
        trips = self.module.trips(op) or 1
        for _ in range(min(trips, 2)):
            began = self.now
            self.all(body[1])
        self._wait((self.now - began) * max(0, trips - 2))

    def _wait(self, seconds: float) -> None:
        """Later iterations of a loop: what still runs moves on with them."""
        for times in (self.free, self.ends):
            times.update({name: end + seconds for name, end in times.items() if end > self.now})
        self.now += seconds

    def _branches(self, op: Instruction) -> None:
        """The slowest of the branches."""
        ways = []
        for name in op.called:
            way = copy.copy(self)
            way.free, way.ends = dict(self.free), dict(self.ends)
            way.all(name)
            ways.append(way)
        slowest = max(ways, key=lambda way: way.now)
        self.now, self.free, self.ends = slowest.now, slowest.free, slowest.ends
