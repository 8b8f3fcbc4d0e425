"""The Parallel Computation Graph: tensors and their layouts, ops, and the moves between layouts.

    Graph, Op, Tensor   a program, as traced or as planned
    Layout              where a tensor lies along each axis of a mesh (`MeshAxes`)
    Move, Shift         what a parallel op does: one change of layout, one pass along a ring
    Scan, While         the roles of what goes into a loop and comes out
"""

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.loops import Scan, While
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.pcg.parallel import Move, Shift

__all__ = ["Graph", "Layout", "MeshAxes", "Move", "Op", "Scan", "Shift", "Tensor", "While"]
