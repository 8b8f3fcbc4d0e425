"""The copies from the host and to it in a program, read from its StableHLO, to be compared with a plan.

    stablehlo_copies(lowered.compiler_ir("stablehlo"))     Counter({("from_host", 65536): 8, ("to_host", 65536): 8})

A copy counts once per place inside the `shard_map`, by its bytes per device. XLA:CPU, which has one memory, is told of
none.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from jax.extend.mlir import ir

from unity_jax.aot.collectives import parse_stablehlo, places, tensor_bytes
from unity_jax.cost.program import local_bytes
from unity_jax.pcg.graph import Graph
from unity_jax.pcg.loops import prefetched
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import HOST, SPILLED


def stablehlo_copies(program: str | ir.Module) -> Counter[tuple[str, int]]:
    """Of each kind and bytes, those of `jax.stages.Lowered.as_text()` or `.compiler_ir("stablehlo")`."""
    return places(parse_stablehlo(program), _copy)


def copies_difference(graph: Graph, program: str | ir.Module, mesh: MeshAxes) -> list[str]:
    """One line for each kind and bytes whose counts differ between a planned graph and its program."""
    copies = [op for op in graph.walk() if op.name in HOST]
    copies += [op for loop in graph.walk() for op in prefetched(loop) if op.params[SPILLED]]  # the first of each
    planned = Counter((op.name, local_bytes(op.inputs[0], mesh)) for op in copies)
    lowered = stablehlo_copies(program)
    return [
        f"{kind}, {size:,} bytes: planned {planned[kind, size]}, lowered {lowered[kind, size]}"
        for kind, size in sorted(planned.keys() | lowered.keys())
        if planned[kind, size] != lowered[kind, size]
    ]


def _copy(op: ir.Operation) -> tuple[str, int] | None:
    if not _is_placement(op):
        return None
    placed = ir.StringAttr(ir.DictAttr(op.attributes["mhlo.frontend_attributes"])["_xla_buffer_placement"]).value
    if op.parent is not None and op.parent.name == "func.func" and _name(op.parent) == "main":
        # JAX may tell of every result where it is: of one that was copied there, or made on the device.
        told = all(use.owner.name == "func.return" for use in op.results[0].uses)
        maker: Any = op.operands[0].owner
        there = not isinstance(maker, ir.Block) and (
            _is_placement(maker.operation) or maker.name == "sdy.manual_computation"
        )
        if told and (placed == "device" or there):
            return None
    return "from_host" if placed == "device" else "to_host", tensor_bytes(op.results[0].type)


def _name(op: ir.Operation) -> str:
    return ir.StringAttr(op.attributes["sym_name"]).value


def _is_placement(op: ir.Operation) -> bool:
    target = op.attributes["call_target_name"] if op.name == "stablehlo.custom_call" else None
    return target is not None and ir.StringAttr(target).value == "annotate_device_placement"
