"""Where the collectives of a compiled program stand.

    compiled_collectives(jax.jit(step).lower(x).compile().as_text(), MeshAxes(("data", "model"), (2, 4)))
    # [Collective(kind='all_gather', axes=('model',), bytes=1024, count=2), ...]

An asynchronous pair counts once, a combined collective once with its total bytes. XLA:TPU may spread one collective
over a chain of fusions with the matmuls it hides behind: the chain counts once. It writes a reduce-scatter that it made
itself as a fusion of an all-reduce and a slice, named `all-reduce-scatter`: read as a reduce-scatter.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unity_jax.aot.collectives import (
    KINDS,
    Collective,
    Groups,
    Key,
    counted,
    group_axes,
    mesh_axes_groups,
    permute_axes,
)
from unity_jax.aot.hlo import Array, Instruction, Module, parse
from unity_jax.pcg.mesh import MeshAxes

Path = tuple[tuple[str, Instruction], ...]
"""The calls that lead to a computation, outermost first: each the calling computation and instruction."""


@dataclass(frozen=True)
class Site:
    """One collective at its place in a compiled program.

    **Fields:** `path` and `computation`: where `op` stands; `kind` and `axes` as in `Collective`; `operands` and
    `results`: the arrays it takes and makes, one of each for every array of a combined collective; `trips`: how often
    it runs in a step, where a loop of unknown length counts as one.
    """

    path: Path
    computation: str
    op: Instruction
    kind: str
    axes: tuple[str, ...]
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    trips: int

    @property
    def bytes(self) -> int:
        """The larger of its operands and its results."""
        return max(sum(array.bytes for array in side) for side in (self.operands, self.results))


def compiled_collectives(hlo_text: str, mesh: MeshAxes) -> list[Collective]:
    """The collectives of `jax.stages.Compiled.as_text()` (CPU, GPU or TPU), merged and sorted."""
    return module_collectives(parse(hlo_text), mesh)


def module_collectives(module: Module, mesh: MeshAxes) -> list[Collective]:
    """The collectives of a compiled module, merged and sorted."""
    counts: Counter[Key] = Counter((s.kind, s.axes, s.bytes) for s in sites(module, mesh))
    return counted(counts)


def sites(module: Module, mesh: MeshAxes) -> list[Site]:
    """Every collective of a module between more than one device, in program order."""
    found: dict[object, Site] = {}
    for i, site in enumerate(_walk(module, mesh, module.entry, (), 1)):
        chain = re.search(r'chain_id="(\d+)"', site.op.attributes)
        key = chain[1] if chain else i
        if site.axes and (key not in found or site.trips < found[key].trips):  # a chain may reach into a loop
            found[key] = site
    return list(found.values())


def _walk(module: Module, mesh: MeshAxes, computation: str, path: Path, trips: int) -> Iterator[Site]:
    instructions = module.computations[computation]
    for op in instructions.values():
        if op.opcode.endswith(("-done", "-update")):
            continue
        kind = KINDS.get(op.opcode.removesuffix("-start").replace("-", "_"))
        if kind is not None and ("replica_groups=" in op.attributes or "source_target_pairs=" in op.attributes):
            if kind == "all_reduce" and computation.startswith("%all-reduce-scatter"):
                kind = "reduce_scatter"
            operands = tuple(
                array for name in op.operands if name in instructions for array in instructions[name].arrays
            )
            results = tuple(_results(op, instructions))
            yield Site(path, computation, op, kind, _axes(op.attributes, mesh), operands, results, trips)
            continue
        inside = trips * (module.trips(op) or 1) if op.opcode == "while" else trips
        for called in op.called:
            if called in module.computations:
                yield from _walk(module, mesh, called, (*path, (computation, op)), inside)


def _results(op: Instruction, instructions: dict[str, Instruction]) -> list[Array]:
    """What it makes. A `-start` lists its operands among its results; its `-done` does not."""
    if not op.opcode.endswith("-start"):
        return op.arrays
    done = (i.arrays for i in instructions.values() if i.opcode.endswith("-done") and op.name in i.operands)
    return next(done, [])


_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(\[?([\d,]*)\]?(?:T\(([\d,]*)\))?\))? \{([^}]*)\}"
)


def _axes(attributes: str, mesh: MeshAxes) -> tuple[str, ...]:
    if "source_target_pairs=" in attributes:
        return permute_axes(source_target_pairs(attributes), mesh)
    return group_axes(replica_groups(attributes), mesh)


def source_target_pairs(attributes: str) -> list[list[int]]:
    """Of a permutation: `source_target_pairs={{0,1},{1,0}}`."""
    match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if match is None:
        raise ValueError(f"no pairs of a permutation: {attributes[:200]}")
    return _braced(match[1])


def replica_groups(attributes: str) -> Groups:
    """The groups of devices of a collective, in any of the three ways to write them.

    `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)` (an iota, reshaped, transposed, reshaped: `IotaReplicaGroupList` in XLA) and
    `mesh['data'=2,'model'=4] {'model'}`, with `device_ids=([4,2]T(1,0))` for such an iota or a list of numbers where
    devices do not lie on the mesh in their order (`MeshAxesReplicaGroupList`).
    """
    if match := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return _braced(match[1])
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, source, order = (_numbers(part) for part in match.groups())
        return _iota(source, order).reshape(shape).tolist()
    if match := _MESH_GROUPS.search(attributes):
        sizes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])]
        picked = [name + part for name, part in re.findall(r"'([^']+)'(:\(\d+\)\d+)?", match[4])]
        devices, order = _numbers(match[2]), _numbers(match[3])
        return mesh_axes_groups(sizes, picked, _iota(devices, order).tolist() if order else devices)
    raise ValueError(f"replica groups written in a way this reader does not know: {attributes[:200]}")


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in (text or "").split(",") if n]


def _iota(shape: Sequence[int], order: Sequence[int]) -> np.ndarray:
    """The numbers from 0 in an array of this shape, transposed (`order` may be empty), flat."""
    return np.arange(math.prod(shape)).reshape(shape).transpose(order or None).ravel()


def _braced(text: str) -> list[list[int]]:
    return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", text)]
