"""Shardy's own sharding rules, as an oracle for ours.

`shardy_rule(fn, *args)` lowers a one-op function, lets Shardy derive its `OpShardingRule`, and returns it in the
same form as `our_rule(op, rule)`: a set of lines, one per factor, that do not depend on the names of factors:

    sum-like reduction of size 6:   "6 reduction: in0[2].0 in1[1].0"

reads: a factor of size 6, a reduction, is the major factor of dimension 2 of operand 0 and of dimension 1 of operand 1.
What may not be split is listed per dimension, since sharing such a factor between tensors means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.lowering import JaxIrContext, upstream_dialects
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import chlo, sdy, stablehlo

from unity_jax.ops.rule import Rule
from unity_jax.pcg.graph import Op, Tensor

# A wrongly nested pass aborts the process: keep this string as it is.
_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
_KINDS = {"sum": "reduction", "max": "reduction", "min": "reduction", "halo": "permutation"}

Dims = Sequence[Sequence[Sequence[int]]]
"""Per tensor, per dimension, the factors from major to minor."""


def our_rule(op: Op, rule: Rule) -> set[str]:
    """Our rule, one line per factor."""
    kinds = [_KINDS.get(f.kind, f.kind) for f in rule.factors]
    return _lines(op, [f.size for f in rule.factors], kinds, rule.operands, rule.results)


def shardy_rule(fn: Callable[..., Any], op: Op, *args: Any) -> set[str] | None:
    """Shardy's rule for the StableHLO op that `op` became in the lowering of `fn`; None if it has none."""
    text = jax.jit(fn).lower(*args).as_text()
    with _context():
        module = ir.Module.parse(text)
        passmanager.PassManager.parse(_PIPELINE).run(module.operation)
        for found in _walk(module.operation):
            if "sdy.sharding_rule" not in found.attributes:
                continue
            ins, outs = _match(found.operands, op.inputs), _match(found.results, op.outputs)
            if ins is not None and outs is not None:
                return _read(sdy.OpShardingRuleAttr(found.attributes["sdy.sharding_rule"]), op, ins, outs)
    return None


def _context() -> ir.Context:
    context = JaxIrContext()
    context.append_dialect_registry(upstream_dialects)
    context.load_all_available_dialects()
    for dialect in (sdy, stablehlo, chlo):
        dialect.register_dialect(context)
    return context


def _walk(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _walk(inner.operation)


def _match(values: Iterable[Any], tensors: Sequence[Tensor]) -> list[int] | None:
    """Which value each of our tensors became: the first unused one of its shape; StableHLO ops may have more values, in
    another order (initial values, the indices beside an argmax)."""
    shapes = [tuple(ir.RankedTensorType(v.type).shape) for v in values]
    found: list[int] = []
    for t in tensors:
        same = [i for i, shape in enumerate(shapes) if shape == t.shape and i not in found]
        if not same and t.rank:
            return None
        found.append(same[0] if same else -1)  # a scalar may have become an attribute
    return found


def _read(rule: Any, op: Op, ins: Sequence[int], outs: Sequence[int]) -> set[str]:
    kinds = ["pass"] * len(rule.factor_sizes)
    for kind, factors in (
        ("reduction", rule.reduction_factors),
        ("permutation", rule.permutation_factors),
        ("replicate", rule.need_replication_factors),
    ):
        for f in factors:
            kinds[f] = kind

    def side(mappings: Sequence[Any], order: Sequence[int]) -> Dims:
        tensors = [
            [list(sdy.DimMappingAttr(d).factor_indices) for d in sdy.TensorMappingAttr(t).dim_mappings]
            for t in mappings
        ]
        return [tensors[i] if i >= 0 else [] for i in order]

    sizes = list(rule.factor_sizes)
    return _lines(op, sizes, kinds, side(rule.operand_mappings, ins), side(rule.result_mappings, outs))


def _lines(op: Op, sizes: Sequence[int], kinds: Sequence[str], operands: Dims, results: Dims) -> set[str]:
    places: dict[int, list[tuple[str, int]]] = {f: [] for f in range(len(sizes))}
    replicated = set()
    for side, values, tensors in (("in", op.inputs, operands), ("out", op.outputs, results)):
        for t, dims in enumerate(tensors):
            for d, factors in enumerate(dims):
                real = [f for f in factors if sizes[f] != 1]
                if not real and values[t].shape[d] > 1:  # a dimension that may not be split
                    replicated.add(f"replicate {side}{t}[{d}]")
                for position, f in enumerate(real):
                    places[f].append((f"{side}{t}[{d}]", position))
    lines = set()
    for f, where in places.items():
        alone = len(where) == 1
        if kinds[f] == "replicate" or (kinds[f] == "permutation" and alone):
            replicated |= {f"replicate {dim}" for dim, _ in where}
        elif where and not (kinds[f] == "pass" and all(position for _, position in where)):  # minor: never split by us
            lines.add(f"{sizes[f]} {kinds[f]}: {' '.join(f'{dim}.{position}' for dim, position in where)}")
    return lines | replicated


def linked(lines: Iterable[str]) -> set[str]:
    """The factors that several dimensions share."""
    return {line for line in lines if not line.startswith("replicate") and len(line.split(": ")[1].split()) > 1}


def difference(ours: Iterable[str], theirs: Iterable[str] | None) -> str:
    """What differs, for people; empty if nothing does."""
    if theirs is None:
        return "Shardy has no rule"
    a, b = set(ours), set(theirs)
    return "; ".join([f"ours: {x}" for x in sorted(a - b)] + [f"Shardy: {x}" for x in sorted(b - a)])
