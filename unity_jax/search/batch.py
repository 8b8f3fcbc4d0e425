"""Which dimensions run over the examples of a batch, found by following factors from the batch arguments."""

from __future__ import annotations

import collections

from unity_jax import _compat
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.program import Program
from unity_jax.search.assemble import RuleCache

Dims = set[tuple[Tensor, int]]


def batch_inputs(program: Program) -> list[Tensor]:
    """The graph inputs that hold a batch: those that no output replaces, of the batch's leading size.

    A function that replaces nothing has its batch in its last argument.
    """
    state = set(program.ties.values())
    n = len(program.constants)
    names = program.in_paths
    candidates = [t for i, t in enumerate(program.graph.inputs) if i >= n and i not in state and t.rank > 0]
    if not state and names:
        last = max(name.split("]")[0] for name in names)
        inputs = program.graph.inputs[n:]
        candidates = [t for t, name in zip(inputs, names, strict=True) if name.startswith(last) and t.rank > 0]
    sizes = collections.Counter(t.shape[0] for t in candidates)
    if not sizes:
        return []
    common = max(sizes, key=lambda s: (sizes[s], s))
    return [t for t in candidates if t.shape[0] == common]


def batch_dims(program: Program, rules: RuleCache, dim: int = 0) -> Dims:
    """Every (tensor, dimension) of the traced graph, sub-graphs included, that comes from dimension `dim` of the batch.

    Dimension 0 indexes examples; in batches of token sequences dimension 1 indexes positions.
    """
    found: Dims = {(t, dim) for t in batch_inputs(program) if t.rank > dim}
    _visit(program.graph, rules, found)
    return found


def _visit(graph: Graph, rules: RuleCache, found: Dims) -> None:
    for op in graph.ops:
        if op.name == "optimization_barrier":
            found |= {
                (o, d) for i, o in zip(op.inputs, op.outputs, strict=True) for d in range(i.rank) if (i, d) in found
            }
        elif op.bodies:
            _visit_bodies(op, rules, found)
        else:
            rule, factors = rules(op), batch_factors(op, rules, found)
            found |= {
                (t, d)
                for t, dims in zip(op.outputs, rule.results, strict=True)
                for d, f in enumerate(dims)
                if f and f[0] in factors
            }


def batch_factors(op: Op, rules: RuleCache, found: Dims) -> set[int]:
    """The factors of an op that one of the dimensions in `found` indexes."""
    rule = rules(op)
    return {
        f[0]
        for t, dims in zip(op.inputs, rule.operands, strict=True)
        for d, f in enumerate(dims)
        if f and (t, d) in found
    }


def _visit_bodies(op: Op, rules: RuleCache, found: Dims) -> None:
    def bind(inner: Tensor, outer: Tensor, shift: int = 0) -> None:
        found.update((inner, d - shift) for d in range(shift, outer.rank) if (outer, d) in found)

    for body in op.bodies:
        if op.name == "scan":
            consts, carries = _compat.scan_arity(op.params)
            for i, (inner, outer) in enumerate(zip(body.inputs, op.inputs, strict=True)):
                bind(inner, outer, int(i >= consts + carries))
            for _ in range(2):  # what a carry learns in the first trip reaches everything in the second
                _visit(body, rules, found)
                for i, t in enumerate(body.outputs[:carries]):
                    bind(body.inputs[consts + i], t)
            for i, (inner, outer) in enumerate(zip(body.outputs, op.outputs, strict=True)):
                shift = int(i >= carries)
                found.update((outer, d + shift) for d in range(inner.rank) if (inner, d) in found)
        else:
            skip = 1 if op.name == "cond" else len(op.inputs) - len(body.inputs)
            for inner, outer in zip(body.inputs, op.inputs[skip:], strict=True):
                bind(inner, outer)
            _visit(body, rules, found)
            if body.outputs and len(body.outputs) == len(op.outputs):
                for inner, outer in zip(body.outputs, op.outputs, strict=True):
                    bind(outer, inner)
