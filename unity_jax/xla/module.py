"""A program as XLA has it behind fusion: instructions, the buffers between them, and their schedule.

    %1  reduce_sum            after 0  makes b0:16384  takes 0.01 us  in place
    %2  reduce-start          after 1  reads b0  makes b1:16384  takes 1 us  in place
    %3  reduce-done           after 2  reads b1  takes 40.2 us
    %4  sort                  after 3  reads b1  makes b2:16384(result)  takes 0.01 us

A pass takes a module and changes it (`pipelines` has their order per compiler). What an instruction waits for is told
by a tensor, whoever makes that in the end, or by an instruction. `str(module)` is the text above: bytes of
buffers, microseconds as the compiler estimates them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import Collective
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.xla.aliases import base_tensors
from unity_jax.xla.kernel import Kernel
from unity_jax.xla.layout_assignment import Storage
from unity_jax.xla.schedule import BETWEEN, Schedule, Step
from unity_jax.xla.targets import Target, target_of
from unity_jax.xla.traffic import Traffic


class LatencyEstimator(Protocol):
    """What a compiler takes instructions for, in microseconds; and what they take."""

    def kernel(self, kernel: Kernel) -> float: ...

    def fill(self, nbytes: float) -> float:
        """Of an array with a constant."""
        ...

    def collectives(self, combined: Sequence[Collective]) -> float:
        """Of collectives of one kind that are combined, from their start to their end."""
        ...

    def seconds(self, kernel: Kernel) -> tuple[float, bool]:
        """How long a kernel really takes, and whether memory bounds it."""
        ...


@dataclass(eq=False, slots=True)
class Buffer:
    """Bytes for a tensor: `result`: of the program, for which there is memory all the time; `on_chip`: it is in the
    memory of the chip; `in_tuple`: nothing is written in its place, see `tuple_elements`."""

    tensor: Tensor
    size: float
    result: bool = False
    on_chip: bool = False
    in_tuple: bool = False

    @property
    def temporary(self) -> int:
        """Bytes of temporary memory that it takes."""
        return 0 if self.result or self.on_chip else round(self.size)


@dataclass(eq=False, slots=True)
class Instruction:
    """A kernel, a copy, or the start or the done of a collective.

    **Fields:** `after`: what must be there before; `collectives`: those that it is; `seconds`: how long it really
    takes; `streams`: it gains from operands on the chip; `bodies`: what it runs; the others as in `schedule.Step`.
    """

    opcode: str
    after: list[Tensor | Instruction]
    reads: list[Buffer]
    makes: list[Buffer]
    kernel: Kernel | None = None
    cost: float = BETWEEN
    start: Instruction | None = None
    latency: float = 0.0
    workspace: float = 0.0
    writes_over: bool = False
    late: bool = False
    seconds: float = 0.0
    streams: bool = True
    collectives: tuple[Collective, ...] = ()
    bodies: tuple[Module, ...] = ()


@dataclass(eq=False)
class Module:
    """A graph on its way through a compiler.

    **Fields:** `instructions` in the order of the program; `schedule`: those that run, in their order, once they are
    scheduled; `of`: the buffer of a tensor; `maker`: what a tensor is there after (another tensor, if it is the same
    one); `arguments`: the instructions that stand for them; `looped`: it is a body; `tuples`: how many tuples a TPU has
    for copies onto the chip and from there; `copies`: of tensors, that take so many bytes.
    """

    graph: Graph
    traffic: Traffic
    storage: Storage
    machine: Machine
    estimator: LatencyEstimator
    instructions: list[Instruction] = field(default_factory=list)
    schedule: list[Instruction] = field(default_factory=list)
    of: dict[Tensor, Buffer] = field(default_factory=dict)
    maker: dict[Tensor, Tensor | Instruction] = field(default_factory=dict)
    arguments: dict[Tensor, Instruction] = field(default_factory=dict)
    looped: bool = False
    tuples: int = 0
    copies: dict[tuple[Tensor, float], Instruction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = base_tensors(self.graph)
        self.inputs = {*self.graph.inputs}
        self.outputs = {self.base.get(t, t) for t in self.graph.outputs}

    @property
    def target(self) -> Target:
        return target_of(self.storage.device)

    def walk(self) -> Iterator[Module]:
        """The module, and all that its loops and branches run."""
        yield self
        for instruction in self.instructions:
            for body in instruction.bodies:
                yield from body.walk()

    def add(self, instruction: Instruction) -> Instruction:
        self.instructions.append(instruction)
        return instruction

    def buffer(self, t: Tensor) -> Buffer:
        """The buffer of a tensor; a new one, if it has none."""
        if t not in self.of:
            self.of[t] = Buffer(t, self.storage(t), t in self.outputs)
        return self.of[t]

    def made(self, t: Tensor | Instruction) -> Instruction:
        """The instruction that a tensor is there after."""
        while isinstance(t, Tensor):
            t = self.maker[t]
        return t

    def resolve(self) -> None:
        """Name instructions, each once, in place of the tensors that others wait for."""
        for instruction in self.instructions:
            instruction.after = list(dict.fromkeys(map(self.made, instruction.after)))

    def replace(self, by: Mapping[Instruction, Instruction]) -> None:
        """Take instructions out, and let others wait for those in their places."""
        if by:
            self.instructions = [i for i in self.instructions if i not in by]
            for i in self.instructions:
                i.after = [by.get(a, a) if isinstance(a, Instruction) else a for a in i.after]
            self.maker = {t: by.get(m, m) if isinstance(m, Instruction) else m for t, m in self.maker.items()}

    def ends(self) -> list[Instruction]:
        """The instructions that make the results, in their order."""
        results = dict.fromkeys(self.base.get(t, t) for t in self.graph.outputs)
        return [self.made(t) for t in results if t in self.maker]

    def numbered(self) -> Schedule:
        """The instructions by their numbers, to be scheduled. XLA:TPU schedules results in place of donated arguments,
        XLA:GPU as new memory."""
        self.resolve()
        steps, buffers = by_number(self.instructions)
        counts = self.target.counts_results
        return Schedule(steps, [b.size if counts else 0 if b.result else round(b.size) for b in buffers])

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def by_number(instructions: Sequence[Instruction]) -> tuple[list[Step], list[Buffer]]:
    """Instructions that wait for each other as steps, and their buffers, by whose numbers they name them."""
    number = {i: n for n, i in enumerate(instructions)}
    at: dict[Buffer, int] = {}
    steps = []
    for i in instructions:
        for b in (*i.makes, *i.reads):
            at.setdefault(b, len(at))
        after, start = tuple([number[a] for a in i.after if a in number]), None if i.start is None else number[i.start]
        reads, makes = tuple([at[b] for b in i.reads]), tuple([at[b] for b in i.makes])
        over = tuple([at[b] for b in i.reads if not b.in_tuple]) if i.writes_over else ()
        steps.append(Step(after, reads, makes, i.cost, start, i.latency, round(i.workspace), over, i.late))
    return steps, list(at)


def _lines(module: Module) -> Iterator[str]:
    """One line for each instruction; those of bodies are indented."""
    order = [*module.arguments.values(), *module.schedule] if module.schedule else module.instructions
    names = {b: f"b{n}" for n, b in enumerate(dict.fromkeys(b for i in order for b in (*i.makes, *i.reads)))}
    number = {i: n for n, i in enumerate(order)}
    for i in order:
        after = sorted({number[made] for a in i.after if (made := module.made(a)) in number})
        said = {
            "after": " ".join(map(str, after)),
            "reads": " ".join(names[b] for b in i.reads),
            "makes": " ".join(f"{names[b]}:{b.size:.0f}{_where(b)}" for b in i.makes),
            "needs": f"{i.workspace:.0f}" * bool(i.workspace),
            "takes": f"{i.latency or i.cost:.3g} us" * (i.opcode != "argument"),
            "really": f"{1e6 * i.seconds:.3g} us" * bool(i.seconds),
        }
        words = [f"{what} {text}" for what, text in said.items() if text]
        words += ["in place"] * i.writes_over
        yield "  ".join((f"%{number[i]:<3}{i.opcode:<20}", *words)).rstrip()
        for body in i.bodies:
            yield from (f"    {line}" for line in _lines(body))


def _where(b: Buffer) -> str:
    marks = {"result": b.result, "chip": b.on_chip, "tuple": b.in_tuple}
    return "".join(f"({mark})" for mark, holds in marks.items() if holds)
