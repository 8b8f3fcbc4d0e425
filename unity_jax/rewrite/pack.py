"""Weights that a program concatenates every step, as one array of the state.

Where a rule merges products with weights `q`, `k`, `v`, the program that it makes concatenates them before it
multiplies, and cuts their gradients apart. If they are state, one input can hold them from step to step: each is a
slice of it, and the results that replace them are concatenated. What the optimizer does to each element alike is then
done to the whole, and takes the moments of the weights along: slices and concatenations cancel.

    unpacked:  dot(x, concat(q, k, v)),  q - c * mq', k - c * mk', v - c * mv'    with mq' = b * mq + slice(g), ...
    packed:    dot(x, p),                p - c * m'                               with m' = b * m + g
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence, Set

import jax
from jax import lax

from unity_jax import _compat
from unity_jax.ops.rules import is_pointwise
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.program import Program
from unity_jax.rewrite.apply import in_order
from unity_jax.rewrite.bind import same_function
from unity_jax.rewrite.packing import Group, Packed, Packing, others
from unity_jax.trace import build, without_dead_code

Allowed = Callable[[Packing, tuple[int, ...]], bool]


def packed(program: Program, allowed: Allowed = lambda packing, inputs: True) -> Program:
    """The program with what it concatenates of its donated state held as one array each, where that is `allowed`."""
    chosen = dict(_wanted(program, allowed))
    if not chosen:
        return program
    packer = _Packer(program, chosen)
    while (more := packer.run(allowed)) is not None:  # state that is joined for the sake of other state is packed too
        chosen[more[1]] = more[0]
        packer = _Packer(program, chosen)
    return packer.program()


def pack(program: Program, groups: Sequence[Group]) -> Program:
    """The program with these inputs held as one array each."""
    packer = _Packer(program, {inputs: packing for packing, inputs in groups})
    packer.run(lambda packing, inputs: False)
    return packer.program()


def _wanted(program: Program, allowed: Allowed) -> Iterator[tuple[tuple[int, ...], Packing]]:
    """Concatenations of state, as it is or in another dtype; each array is packed with one set of others only."""
    graph = program.graph
    state = {graph.inputs[i]: i for i in set(program.ties.values()) & set(program.donated)}
    taken: set[int] = set()
    for op in graph.ops:
        if op.name != "concatenate":
            continue
        inputs = tuple(state.get(_stored(t, graph), -1) for t in op.inputs)
        packing = Packing(tuple(t.shape for t in op.inputs), op.params["dimension"])
        if _is_free(inputs, taken, graph) and allowed(packing, inputs):
            taken.update(inputs)
            yield inputs, packing


def _is_free(inputs: tuple[int, ...], taken: Set[int], graph: Graph) -> bool:
    """Whether these are inputs of one dtype (but keys), none of which is packed."""
    if min(inputs) < 0 or len({*inputs, *taken}) < len(inputs) + len(taken):
        return False
    dtypes = {graph.inputs[i].dtype for i in inputs}
    return len(dtypes) == 1 and not any(map(_compat.is_key, dtypes))


def _stored(t: Tensor, graph: Graph) -> Tensor:
    """What a tensor is without casts and reshapes."""
    while (op := graph.producer.get(t)) is not None and op.name in ("convert_element_type", "reshape"):
        t = op.inputs[0]
    return t


class _Packer:
    """Rebuilds a graph in which some inputs are parts of packed ones."""

    def __init__(self, program: Program, chosen: dict[tuple[int, ...], Packing]) -> None:
        self.before, self.chosen = program, chosen
        self.graph = program.graph
        self.ops: list[Op] = []
        self.maker: dict[Tensor, Op] = dict(self.graph.producer)
        self.done: dict[tuple[tuple[int, ...], tuple[Tensor, ...]], tuple[Packing, Tensor]] = {}
        self.inputs: dict[tuple[int, ...], Tensor] = {}
        self.results: dict[tuple[int, ...], Tensor] = {}
        self.replaced: dict[Tensor, Tensor] = {}  # by what takes their place
        for inputs, packing in chosen.items():
            members = tuple(self.graph.inputs[i] for i in inputs)
            whole = Tensor(packing.shape, members[0].dtype, " | ".join(t.name for t in members))
            self.inputs[inputs] = whole
            self.done[packing.blocks, members] = packing, whole
            for i, t in enumerate(members):
                self.replaced[t] = self._traced(lambda x, i=i, t=t, p=packing: p.part(x, i, t.shape), [whole])

    def run(self, allowed: Allowed) -> tuple[Packing, tuple[int, ...]] | None:
        """Join what is concatenated; further state that should be packed, if there is some."""
        state = {self.graph.inputs[i]: i for i in set(self.before.ties.values()) & set(self.before.donated)}
        taken = {i for inputs in self.chosen for i in inputs}
        replaces = {i: o for o, i in self.before.ties.items()}
        for inputs, packing in self.chosen.items():
            if not all(i in replaces for i in inputs):
                continue
            outs = tuple(self.graph.outputs[replaces[i]] for i in inputs)
            whole = self._joined(packing, outs, True)
            assert whole is not None
            self.results[inputs] = whole
        for (_, tensors), (packing, _) in self.done.items():
            more = tuple(state.get(t, -1) for t in tensors)
            if _is_free(more, taken, self.graph) and allowed(packing, more):
                return packing, more
        for op in self.graph.ops:
            if op.name == "concatenate":
                packing = Packing(tuple(t.shape for t in op.inputs), op.params["dimension"])
                whole = self._joined(packing, tuple(op.inputs), False)
                if whole is not None:
                    self.replaced[op.outputs[0]] = whole
        return None

    def _joined(self, packing: Packing, tensors: tuple[Tensor, ...], always: bool) -> Tensor | None:
        """Tensors as one; None where that takes a concatenation, unless it is to be made `always`."""
        tensors = tuple(map(self._bare, tensors))
        key = packing.blocks, tensors
        if key not in self.done:
            found = self._known(packing, tensors, always)
            if found is None and always:
                found = self._traced(lambda *xs: packing.joined(xs), tensors)
            if found is None:
                return None
            self.done[key] = packing, found
        found = self.done[key][1]
        return (
            found if found.shape in ((), packing.shape) else self._traced(lambda x: x.reshape(packing.shape), [found])
        )

    def _bare(self, t: Tensor) -> Tensor:
        """A tensor before it was reshaped: in a packing each has a shape of its own."""
        while (op := self.maker.get(t)) is not None and op.name == "reshape":
            t = op.inputs[0]
        return t

    def _known(self, packing: Packing, tensors: tuple[Tensor, ...], always: bool) -> Tensor | None:
        first = tensors[0]
        if all(_same_scalar(t, first) for t in tensors):
            return first
        makers = [self.maker.get(t) for t in tensors]
        if any(op is None for op in makers):
            return None
        ops = [op for op in makers if op is not None]
        if _cover(ops, packing):
            return self._traced(lambda x: x.reshape(packing.shape), [ops[0].inputs[0]])
        if all(op.name == "broadcast_in_dim" and _same_scalar(op.inputs[0], ops[0].inputs[0]) for op in ops):
            return self._traced(lambda x: lax.broadcast_in_dim(x, packing.shape, ()), [ops[0].inputs[0]])
        if not all(is_pointwise(op) and len(op.outputs) == 1 and same_function(op, ops[0]) for op in ops):
            return None
        operands = [self._joined(packing, ts, always) for ts in zip(*(op.inputs for op in ops), strict=True)]
        if any(t is None for t in operands):
            return None
        out = Tensor(packing.shape, first.dtype)
        made = dataclasses.replace(ops[0], inputs=tuple(t for t in operands if t is not None), outputs=(out,))
        self.ops.append(made)
        self.maker[out] = made
        return out

    def _traced(self, fun: Callable[..., jax.Array], tensors: Sequence[Tensor]) -> Tensor:
        """What a function makes of tensors."""
        target = build(jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in tensors)))
        names = dict(zip(target.inputs, tensors, strict=True))
        for op in target.ops:
            made = dataclasses.replace(op, inputs=tuple(names.get(t, t) for t in op.inputs))
            self.ops.append(made)
            self.maker.update((t, made) for t in made.outputs)
        (out,) = target.outputs
        return names.get(out, out)

    def program(self) -> Program:
        """The program over packed state."""
        before, graph, new = self.before, self.graph, self.replaced
        replaces = {i: o for o, i in before.ties.items()}
        groups = tuple(
            Packed(packing, inputs, tuple(replaces[i] for i in inputs) if inputs in self.results else ())
            for inputs, packing in self.chosen.items()
        )
        if not groups:
            return before

        def now(t: Tensor) -> Tensor:
            while t in new:
                t = new[t]
            return t

        wholes = list(self.inputs.values())
        kept = others(len(graph.inputs), [(g.packing, g.inputs) for g in groups])
        outs = others(len(graph.outputs), [(g.packing, g.outputs) for g in groups])
        tied = [n for n, g in enumerate(groups) if g.outputs]
        ops = [dataclasses.replace(op, inputs=tuple(map(now, op.inputs))) for op in (*graph.ops, *self.ops)]
        results = (*(now(graph.outputs[o]) for o in outs), *(now(self.results[groups[n].inputs]) for n in tied))
        place = {op: i for i, op in enumerate(ops[: len(graph.ops)])}
        made = without_dead_code(Graph((*(graph.inputs[i] for i in kept), *wholes), results, in_order(ops, place)))
        at = {i: n for n, i in enumerate(kept)}
        ties = {n: at[before.ties[o]] for n, o in enumerate(outs) if before.ties.get(o) in at}
        ties |= {len(outs) + m: len(kept) + n for m, n in enumerate(tied)}
        donated = [at[i] for i in before.donated if i in at]
        donated += [len(kept) + n for n, g in enumerate(groups) if {*g.inputs} <= {*before.donated}]
        names = tuple(t.name for t in made.inputs[len(before.constants) :])
        paths = (*(before.out_paths[o] for o in outs), *(wholes[n].name for n in tied))
        return dataclasses.replace(
            before,
            graph=made,
            in_tree=jax.tree.structure((names, {})),
            out_tree=jax.tree.structure(list(paths)),
            in_paths=names,
            out_paths=paths,
            in_suffixes=names,
            donated=tuple(donated),
            ties=ties,
            packed=groups,
            unpacked=before,
            traced=before.traced or before,
        )


def _same_scalar(a: Tensor, b: Tensor) -> bool:
    if a.rank or b.rank:
        return False
    return a is b or (a.literal is not None and b.literal is not None and bool(a.literal == b.literal))


def _cover(ops: Sequence[Op], packing: Packing) -> bool:
    """Whether ops are slices of one tensor along one dimension that together, in order, are all of it."""
    whole, parts = ops[0].inputs[0], [op.outputs[0] for op in ops]
    if any(op.name != "slice" or op.inputs[0] is not whole for op in ops):
        return False
    if any(s != 1 for op in ops for s in op.params["strides"] or ()):
        return False
    cut = [d for d in range(whole.rank) if any(t.shape[d] != whole.shape[d] for t in parts)]
    if len(cut) != 1 or Packing(tuple(t.shape for t in parts), cut[0]).blocks != packing.blocks:
        return False
    ends = itertools.accumulate((t.shape[cut[0]] for t in parts), initial=0)
    return [op.params["start_indices"][cut[0]] for op in ops] == list(ends)[:-1]
