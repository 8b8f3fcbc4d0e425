"""Bytes that tensors take in memory, in the layouts that kernels want them in.

XLA:TPU stores arrays in tiles and pads two dimensions to them; which two depends on the kernels:

- anything but the batch of a batched product, the features and the batch of a convolution. Only products write an array
  so for a batched product; what others write lies as pads it least;
- of a grouped convolution the features of one group and the batch, so that a group of eight features and a batch of 32
  take four times their size;
- the rows of a table that is gathered from or scattered to, and of what a kernel reads and makes. The array as it
  enters or leaves the program is not stored so, hence the kernels that read or write it work on a copy.

XLA:GPU pads nothing.
"""

from __future__ import annotations

import math

from unity_jax.machine.device import Device
from unity_jax.machine.tiling import stored_bytes
from unity_jax.ops.indexing import addresses_rows
from unity_jax.pcg.graph import Graph, Op, Tensor, nested
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import Move
from unity_jax.xla.aliases import base_tensors
from unity_jax.xla.bf16_propagation import bf16_propagation
from unity_jax.xla.layout_constraints import addressed
from unity_jax.xla.op_classes import KERNELS, PRODUCTS
from unity_jax.xla.targets import target_of
from unity_jax.xla.traffic import Traffic


class Storage:
    """Bytes of one device's part of each tensor of a planned graph and its bodies."""

    def __init__(self, graph: Graph, traffic: Traffic, mesh: MeshAxes, device: Device) -> None:
        self.mesh, self.device = mesh, device
        self.ends = {*graph.inputs, *graph.outputs}
        self.tiled: dict[tuple[int, ...], tuple[int, ...]] = {}  # by shape, the dimensions that may be in a tile
        self.batched: set[tuple[int, ...]] = set()  # shapes that batched products read or make
        self.tables: set[tuple[int, ...]] = set()  # shapes
        self.grouped: dict[Tensor, float] = {}
        self.narrow: set[Tensor] = set()
        self._bytes: dict[Tensor, float] = {}
        kernels = [k for of in traffic.kernels.values() for k in of]
        self.apart = {t for k in kernels if k.root.name not in PRODUCTS for t in k.writes}  # from products
        if target_of(device).narrows:
            self.narrow.update(*(bf16_propagation(g, traffic.kernels[g]) for _, g, _ in nested(graph)))
        if device.layout_tile[1]:
            base = base_tensors(graph)
            for op in graph.walk():
                self._visit(op, base)

    def __call__(self, t: Tensor) -> float:
        if t not in self._bytes:
            self._bytes[t] = self._stored(t)
        return self._bytes[t]

    def _stored(self, t: Tensor) -> float:
        if t.on_host:
            return 0.0
        if t in self.grouped:
            return self.grouped[t]
        if t.shape in self.tables and t not in self.ends:
            return self.rows(t)
        dims, itemsize = self.tiled.get(t.shape, ()), 2 if t in self.narrow else t.itemsize
        in_tiles = len(dims) > 1 and not (t in self.apart and t.shape in self.batched)
        return stored_bytes(self.device, self.local(t), itemsize, dims if in_tiles else None)

    def outside(self, t: Tensor) -> float:
        """Bytes of an argument or a result, which is stored as pads it least, whatever the kernels want."""
        return stored_bytes(self.device, self.local(t), t.itemsize)

    def local(self, t: Tensor) -> tuple[int, ...]:
        assert t.layout is not None
        return t.layout.local_shape(t.shape, self.mesh)

    def in_tiles(self, t: Tensor, gathered: Move) -> bool:
        """Whether what each device adds to a gathered tensor fills whole tiles."""
        assert gathered.dim is not None
        tile, from_end = self.device.layout_tile, t.rank - gathered.dim
        part = gathered.before.local_shape(t.shape, self.mesh)[gathered.dim]
        turned = t.shape in self.tiled  # other dimensions than the last may lie in tiles
        return turned or from_end > len(tile) or not tile[-from_end] or part % tile[-from_end] == 0

    def rows(self, t: Tensor) -> float:
        """Bytes with the last dimension along the lanes."""
        *rest, width = self.local(t)
        lanes = self.device.layout_tile[1]
        return float(t.itemsize * math.prod(rest) * -(-width // lanes) * lanes)

    def _visit(self, op: Op, base: dict[Tensor, Tensor]) -> None:
        if addresses_rows(op):
            table = op.inputs[0]
            by_row = table.rank == 2 or table in addressed(op)  # however many dimensions number the rows
            if by_row and self.rows(table) > stored_bytes(self.device, self.local(table), table.itemsize):
                self.tables.add(table.shape)
        elif op.name in KERNELS:
            self.tables.update(t.shape for t in addressed(op) if self.rows(t) > self.outside(t))
        elif op.name == "dot_general":
            _, (lhs, rhs) = op.params["dimension_numbers"]
            batched = (lhs, rhs, range(len(lhs))) if lhs else ()
            self.batched.update(t.shape for t in (*op.inputs, *op.outputs) if lhs)
            for t, batch in zip((*op.inputs, *op.outputs), batched, strict=False):
                self.tiled.setdefault(t.shape, tuple(d for d in range(t.rank) if d not in batch))
        elif op.name == "conv_general_dilated":
            self._visit_convolution(op, base)

    def _visit_convolution(self, op: Op, base: dict[Tensor, Tensor]) -> None:
        specs = op.params["dimension_numbers"]
        (data, _), (result,) = op.inputs, op.outputs
        by_batch, by_feature = op.params["batch_group_count"], op.params["feature_group_count"]
        for t, spec in zip((*op.inputs, *op.outputs), specs, strict=True):
            self.tiled.setdefault(t.shape, tuple(spec[:2]))
        groups = max(by_batch, by_feature)
        if groups == 1:
            return
        for t, spec, split in ((data, specs.lhs_spec, (by_batch, by_feature)), (result, specs.out_spec, (1, groups))):
            shape = self.local(t)
            x, y = (max(shape[d] // n, 1) for d, n in zip(spec[:2], split, strict=True))
            held = math.prod(shape) * t.itemsize * stored_bytes(self.device, (x, y), 1) / (x * y)
            owner = base.get(t, t)
            if owner not in self.ends:
                self.grouped[owner] = max(held, self.grouped.get(owner, 0.0))
