"""Loops by the roles of what goes into them and comes out: constant, carried, or a part for each iteration.

    scan        operands   constants, carried, sliced     the inputs of the body are in the same order
                results    last, stacked                  the outputs of the body are in the same order
    while       operands   of the condition, constants, carried
                results    carried

A scan over a range of layers has as many iterations, and may be given arrays of all layers to slice: of those longer
than its length it takes the parts from its parameter `start` on.

A role is a slice, of tensors or of anything that is given in the same order: layouts, arrays, nodes. Nothing else
decodes the parameters of JAX's loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unity_jax import _compat
from unity_jax.pcg.graph import Op
from unity_jax.pcg.parallel import SPILLED

START = "start"
"""The parameter of a scan over a range that JAX's have not."""


@dataclass(frozen=True)
class Scan:
    """The roles of a scan.

    **Fields:** of operands and of inputs of the body `constants`, `carried` and `sliced` (an array outside, of which an
    iteration has a part); of results and of outputs of the body `last` (what is carried, at the end) and `stacked`.
    """

    constants: slice
    carried: slice
    sliced: slice
    last: slice
    stacked: slice

    @staticmethod
    def of(params: Mapping[str, Any]) -> Scan:
        """Of the parameters of an op or an equation."""
        n, carried = _compat.scan_arity(params)
        return Scan(
            slice(0, n), slice(n, n + carried), slice(n + carried, None), slice(0, carried), slice(carried, None)
        )

    def with_constants(self, params: Mapping[str, Any], count: int) -> dict[str, Any]:
        """The parameters of a scan that has so many constants, and all else as this one."""
        return {**params, "num_consts": count, "num_carry": self.last.stop}


@dataclass(frozen=True)
class While:
    """The roles of a while loop.

    **Fields:** of operands `condition` (constants of the condition), `constants` (of the body) and `carried`; of inputs
    of the condition `tested`, of inputs of the body `before`: what is carried.
    """

    condition: slice
    constants: slice
    carried: slice
    tested: slice
    before: slice

    @staticmethod
    def of(params: Mapping[str, Any]) -> While:
        """Of the parameters of an op or an equation."""
        n, m = params["cond_nconsts"], params["body_nconsts"]
        return While(slice(0, n), slice(n, n + m), slice(n + m, None), slice(n, None), slice(m, None))

    def with_constants(self, params: Mapping[str, Any], condition: int, body: int) -> dict[str, Any]:
        """The parameters of a loop that has so many constants, and all else as this one."""
        return {**params, "cond_nconsts": condition, "body_nconsts": body}


def prefetched(op: Op) -> list[Op]:
    """The copies from the host in the planned body of a scan that are made an iteration ahead, by the plan (`SPILLED`)
    or by the compiler: of parts of what another scan has put there. The first parts come before the loop."""
    if op.name != "scan":
        return []
    (body,) = op.bodies
    parts = {*body.inputs[Scan.of(op.params).sliced]}
    return [copy for copy in body.ops if SPILLED in copy.params and copy.inputs[0] in parts]
