"""What an op reads and computes to have its operands: through aliases, and through what it absorbs."""

from __future__ import annotations

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.xla.aliases import is_alias
from unity_jax.xla.producer_fusion import Absorbed


class Reading:
    """Of every op of a graph and each of its operands: the tensors to read from memory, the absorbed ops to compute,
    and the tensors to wait for that are not read, behind an `optimization_barrier`."""

    def __init__(self, graph: Graph, absorbed: Absorbed) -> None:
        self._graph, self._kept, self.loops = graph, absorbed.kept, absorbed.loops
        self._sources: dict[Tensor, tuple[Tensor, ...]] = {}
        self._taken: dict[Tensor, tuple[Op, ...]] = {}
        self._held: dict[Tensor, tuple[Tensor, ...]] = {}
        for op in graph.ops:
            alias = is_alias(op)
            if not alias and op not in absorbed.ops:
                continue
            held = dict.fromkeys(s for t in op.inputs if t in self._held for s in self._held[t])
            if op.name == "optimization_barrier":
                held.update(dict.fromkeys(s for t in op.inputs for s in self.read(op, t)))
            if held:
                self._held.update(dict.fromkeys(op.outputs, tuple(held)))
            if alias:  # one operand per result
                for i, o in zip(op.inputs, op.outputs, strict=False):
                    self._sources[o], self._taken[o] = self.read(op, i), self.taken(op, i)
                continue
            reads = dict.fromkeys(s for t in op.inputs for s in self.read(op, t))
            ops = dict.fromkeys(p for t in op.inputs for p in self.taken(op, t))
            if op in absorbed.fills:
                reads[absorbed.fills[op].outputs[0]] = None
            else:
                ops[op] = None
            self._sources.update(dict.fromkeys(op.outputs, tuple(reads)))
            self._taken.update(dict.fromkeys(op.outputs, tuple(ops)))

    def read(self, op: Op, t: Tensor) -> tuple[Tensor, ...]:
        """What an op reads from memory to have an operand."""
        if (whole := self._whole(op, t)) is not None:
            return (whole,)
        return self._sources.get(t, (t,) if t.literal is None else ())

    def taken(self, op: Op, t: Tensor) -> tuple[Op, ...]:
        """The absorbed ops that an op computes to have an operand."""
        return () if self._whole(op, t) is not None else self._taken.get(t, ())

    def held(self, t: Tensor) -> tuple[Tensor, ...]:
        """What a reader of a tensor waits for."""
        return self._held.get(t, ())

    def result(self, t: Tensor) -> tuple[Tensor, ...]:
        """What is in memory to have a result of the program."""
        return self._sources.get(t, (t,))

    def _whole(self, op: Op, t: Tensor) -> Tensor | None:
        """What an operand is a view of, if that is in memory for the op although others compute it again."""
        if not self._kept:
            return None
        made_by = self._graph.producer.get(t)
        while made_by is not None and is_alias(made_by) and made_by.name != "optimization_barrier":
            t = made_by.inputs[made_by.outputs.index(t)]
            made_by = self._graph.producer.get(t)
        return t if made_by is not None and op in self._kept.get(made_by, ()) else None
