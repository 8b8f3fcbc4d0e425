"""The Parallel Computation Graph: tensors, compute ops, explicit parallel ops.

One type serves the program as traced (tensors without layouts) and the program as planned (every tensor has its layout,
and every change of layout is an op of its own): the plan is the program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unity_jax import _compat
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.parallel import Move


@dataclass(eq=False, slots=True)
class Tensor:
    """A value of the program: global shape, dtype, the literal it stands for (if any) and, once planned, its layout and
    whether it is in the memory of the host.

    In a program that is folded (`search.fold`), `times`: how many values it stands for, one for each layer; `enters`
    and `leaves`: equal numbers, if not 0, where what leaves a layer enters the next one in place of another value.
    """

    shape: tuple[int, ...]
    dtype: Any
    name: str = ""
    literal: Any = None
    layout: Layout | None = None
    times: int = 1
    enters: int = 0
    leaves: int = 0
    on_host: bool = False

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element; a typed PRNG key counts as its two 32-bit words."""
        return _itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Of the whole tensor, however it lies."""
        return math.prod(self.shape) * _itemsize(self.dtype)

    def __str__(self) -> str:
        if self.literal is not None:
            return f"{self.literal}"
        layout = self.layout or Layout.replicated(self.rank)
        return layout.typeof(self.shape, self.dtype) + " on the host" * self.on_host


@functools.lru_cache(maxsize=256)
def _itemsize(dtype: Any) -> int:
    return 8 if _compat.is_key(dtype) else np.dtype(dtype).itemsize


class Signature(tuple[Any, ...]):
    """What ops are equal in (`Op.signature`). Equal ones are one object, so that caches, which are asked for it
    everywhere, need not look inside."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


_SIGNATURES: dict[tuple[Any, ...], Signature] = {}


@dataclass(eq=False)
class Op:
    """One operation. `eqn` is the jaxpr equation it came from (None for parallel ops and barriers added by tracing).

    `callers` are the inlined calls around it, outermost first. `bodies` are the sub-graphs of `scan`, `while` (cond,
    body) and `cond` (one per branch). In a planned graph `shard` says how a compute op is split (an `ops.rule.Shard`),
    `traced` is the op of the traced graph, and `move` is what a parallel op does.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    params: dict[str, Any] = field(default_factory=dict)
    bodies: tuple[Graph, ...] = ()
    eqn: Any = None
    callers: tuple[Any, ...] = ()
    backward: bool = False
    shard: Any = None
    traced: Op | None = None
    move: Move | None = None

    @functools.cached_property
    def source(self) -> str:
        """`file.py:12:4 (function)` of the user's line."""
        lines = (_compat.source_line(e) for e in (self.eqn, *reversed(self.callers)) if e is not None)
        return next((line for line in lines if line), "")

    @functools.cached_property
    def scope(self) -> str:
        """The name stack, as in profiles: `transpose(jvp(Mlp))/dense`."""
        stacks = (_compat.name_stack(e) for e in (*self.callers, self.eqn) if e is not None)
        return "/".join(s for s in stacks if s)

    @functools.cached_property
    def signature(self) -> Signature:
        """Equal for ops that have equal rules, costs and local programs: the key of every cache over ops."""
        own = bool(self.bodies) or any(k in self.params for k in _JAXPRS)  # programs in parameters are not compared
        params = str(sorted((k, v) for k, v in self.params.items() if k not in _UNSIGNED)) if self.params else ""
        ins = tuple((t.shape, t.dtype, None if t.literal is None else str(t.literal)) for t in self.inputs)
        outs = tuple((t.shape, t.dtype) for t in self.outputs)
        stable = self.name.startswith("random_") and self.eqn is not None and _compat.threefry_partitionable(self.eqn)
        found = self.name, ins, outs, params, stable, self.move
        return Signature(found) if own else _SIGNATURES.setdefault(found, Signature(found))

    @property
    def times(self) -> int:
        """How many ops it stands for (`Tensor.times`)."""
        return self.outputs[0].times if self.outputs else 1

    def reading(self, names: Mapping[Tensor, Tensor]) -> Op:
        """The op with other operands in place of some; itself if it reads none of these."""
        if names.keys().isdisjoint(self.inputs):
            return self
        return dataclasses.replace(self, inputs=tuple(names.get(t, t) for t in self.inputs))

    @property
    def label(self) -> str:
        """A short name for tables and errors: the scope's last part and the primitive."""
        scope = self.scope.rstrip("/").rsplit("/", 1)[-1]
        return f"{scope}/{self.name}" if scope else self.name


_JAXPRS = ("jaxpr", "call_jaxpr", "branches", "body_jaxpr", "cond_jaxpr", "callback", "kernel", "computation")
_UNSIGNED = (*_JAXPRS, "sharding", "out_sharding", "weak_type", "accuracy", "mesh")


@dataclass(eq=False)
class Graph:
    """A straight-line program over tensors. `inputs` are its arguments; `outputs` may repeat, or be inputs or
    literals."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    ops: list[Op]

    @functools.cached_property
    def producer(self) -> dict[Tensor, Op]:
        """The op that makes each tensor; inputs and literals have none."""
        return {t: op for op in self.ops for t in op.outputs}

    @functools.cached_property
    def readers(self) -> dict[Tensor, list[Op]]:
        """The ops that read each tensor, in program order, once for each operand; not those inside of bodies."""
        readers: dict[Tensor, list[Op]] = {}
        for op in self.ops:
            for t in op.inputs:
                readers.setdefault(t, []).append(op)
        return readers

    def walk(self) -> Iterator[Op]:
        """Every op, those of sub-graphs included, in program order."""
        for op in self.ops:
            for body in op.bodies:
                yield from body.walk()
            yield op

    def __str__(self) -> str:
        return "\n".join(_lines(self, {}, ""))


def _lines(graph: Graph, names: dict[Tensor, str], indent: str) -> Iterator[str]:
    def name(t: Tensor) -> str:
        if t.literal is not None:
            return str(t.literal) if np.ndim(t.literal) == 0 else f"const{list(np.shape(t.literal))}"
        return names.setdefault(t, t.name or f"%{len(names)}")

    yield f"{indent}inputs " + ", ".join(f"{name(t)}: {t}" for t in graph.inputs)
    for op in graph.ops:
        outs = ", ".join(f"{name(t)}: {t}" for t in op.outputs)
        detail = f"[{op.move}]" if op.move is not None else ""
        yield f"{indent}{outs} = {op.name}{detail} " + " ".join(name(t) for t in op.inputs)
        for body in op.bodies:
            yield from _lines(body, names, indent + "    ")
    yield f"{indent}outputs " + ", ".join(name(t) for t in graph.outputs)


def part(ops: Sequence[Op], results: Iterable[Tensor]) -> Graph:
    """Some ops of a graph as a graph of their own, with those of the results that they make."""
    made = {t for op in ops for t in op.outputs}
    read = dict.fromkeys(t for op in ops for t in op.inputs if t.literal is None and t not in made)
    return Graph(tuple(read), tuple(t for t in results if t in made), list(ops))


Path = tuple[tuple[int, int], ...]
"""The way to a graph within a program: positions of ops, and which of their bodies."""


def nested(graph: Graph, path: Path = (), repeat: int = 1) -> Iterator[tuple[Path, Graph, int]]:
    """A graph and those of its loops and branches, each with how often it runs in a step."""
    yield path, graph, repeat
    for i, op in enumerate(graph.ops):
        for j, body in enumerate(op.bodies):
            yield from nested(body, (*path, (i, j)), repeat * op.times * trips(op))


def trips(op: Op) -> int:
    """How often a body runs: the length of a scan; once for a branch, and for a while loop, whose count is unknown."""
    return int(op.params["length"]) if op.name == "scan" else 1


def with_layout(tensor: Tensor, layout: Layout) -> Tensor:
    """The planned twin of a traced tensor."""
    t = tensor
    return Tensor(t.shape, t.dtype, t.name, t.literal, layout, t.times, t.enters, t.leaves, t.on_host)


def barrier(tensors: Iterable[Tensor], backward: bool = True) -> Op:
    """What passes on planned tensors once all of them are there."""
    given = tuple(tensors)
    return Op("optimization_barrier", given, tuple(map(dataclasses.replace, given)), backward=backward)
