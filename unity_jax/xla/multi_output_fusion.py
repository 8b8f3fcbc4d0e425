"""XLA computes gathers from a value with what else reads it, so that they do not hold it
(https://github.com/openxla/xla/blob/main/xla/service/multi_output_fusion.cc).

    logits -> gather (of the labels);  logits -> exp   ->   exp waits for the gather
"""

from __future__ import annotations

from unity_jax.pcg.graph import Tensor
from unity_jax.xla.module import Module


def multi_output_fusion(module: Module) -> None:
    gathered: dict[Tensor, Tensor] = {}  # what is gathered from a value
    for i in module.instructions:
        if i.kernel is None:
            continue
        i.after += [gathered[t] for t in i.kernel.reads if t in gathered and gathered[t] in module.maker]
        if i.opcode == "gather" and not any(
            op.move is not None for op in module.graph.readers.get(i.kernel.root.outputs[0], ())
        ):
            gathered.update((t, i.kernel.writes[0]) for t in i.kernel.reads[:1] if t in module.of)
