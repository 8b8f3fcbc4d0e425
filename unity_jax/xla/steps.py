"""Steps of a program and the buffers that they read and make, as they are added one by one (`buffers`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unity_jax.cost.estimates import written_microseconds
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.xla.aliases import base_tensors
from unity_jax.xla.layout_assignment import Storage
from unity_jax.xla.scheduler import Step
from unity_jax.xla.targets import target_of


class Steps:
    """The steps of a graph so far: what makes a buffer, an argument or a copy of one, a constant."""

    def __init__(self, graph: Graph, storage: Storage, machine: Machine, replacing: Mapping[Tensor, Tensor]) -> None:
        self.graph, self.storage, self.machine = graph, storage, machine
        self.target = target_of(storage.device)
        self.steps: list[Step] = []
        self.tensors: list[Tensor] = []  # by buffer
        self.size: list[float] = []
        self.outside: list[bool] = []  # whether a buffer is a result of the graph
        self.of: dict[Tensor, int] = {}
        self.maker: dict[Tensor, int] = {}  # the step after which a tensor is there
        self.shared: dict[tuple[object, ...], int] = {}  # steps that several kernels wait for
        self.replacing = replacing  # results in place of donated arguments, which are these
        self.left: dict[int, float] = {}  # of steps, the bytes of the argument that nothing reads after them
        self.base = base_tensors(graph)
        self.copied = {a for t, a in self.replacing.items() if self.target.gathers_apart and self._is_gathered(t)}
        self.inputs, self.outputs = {*graph.inputs}, {self.base.get(t, t) for t in graph.outputs}

    def ends(self) -> list[int]:
        """The steps that make the results, in their order."""
        results = dict.fromkeys(self.base.get(t, t) for t in self.graph.outputs)
        return [self.maker[t] for t in results if t in self.maker]

    def add(self, step: Step) -> int:
        """A new step; its number."""
        self.steps.append(step)
        return len(self.steps) - 1

    def _argument(self, t: Tensor) -> int:
        if (t, "argument") not in self.shared:
            self.shared[t, "argument"] = self.add(Step((), (), ()))
        return self.shared[t, "argument"]

    def _copied(self, t: Tensor, size: float) -> int:
        """The step that copies an array, which takes so many bytes then."""
        if (t, size) not in self.shared:
            whole, reads = self.storage(t), tuple[int, ...]()
            if t in self.of:
                made, reads = self.maker[t], (self.of[t],)
            elif t in self.copied and size != whole:
                made = self._copied(t, whole)
                reads = self.steps[made].makes
            else:
                made = self._argument(t)
            cost = written_microseconds(size, self.machine)
            self.shared[t, size] = at = self.add(Step((made,), reads, (self.new(t, size),), cost))
            if t in self.copied and size == whole:
                self.left[at] = self.storage.outside(t)
        return self.shared[t, size]

    def _filled(self, t: Tensor) -> int:
        """The step that fills a new array with a constant."""
        key = (self.storage.local(t), str(t.dtype)) if self.target.joins_constants else (t, "filled")
        if key not in self.shared:
            self.shared[key] = self.add(Step((), (), (self._buffer(t),)))
        else:
            at = self.shared[key]
            self.steps[at] = Step((), (), (*self.steps[at].makes, self._buffer(t)))
        at = self.shared[key]
        nbytes = sum(self.size[b] for b in self.steps[at].makes)
        self.steps[at] = replace(self.steps[at], cost=written_microseconds(nbytes, self.machine))
        return at

    def _buffer(self, t: Tensor) -> int:
        if t not in self.of:
            self.of[t] = self.new(t, self.storage(t), t in self.outputs)
        return self.of[t]

    def new(self, t: Tensor, size: float, outside: bool = False) -> int:
        """A new buffer; its number."""
        self.tensors.append(t)
        self.size.append(size)
        self.outside.append(outside)
        return len(self.size) - 1

    def _is_gathered(self, t: Tensor) -> bool:
        made_by = self.graph.producer.get(t)
        return made_by is not None and "move" in made_by.params and made_by.params["move"].kind == "combine"
