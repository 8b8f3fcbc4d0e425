"""XLA:TPU sums all of what each device needs a part of, where the parts along the lanes of tiles are no whole ones
(https://github.com/openxla/xla/blob/main/xla/service/reduce_scatter_decomposer.cc).

    reduce_scatter reads b0, makes b1 of 64 bytes   ->   reduce reads b0, makes b1 of 512, in place

The kernels that read it take the part out.
"""

from __future__ import annotations

from unity_jax.xla.module import Module


def reduce_scatter_decomposer(module: Module) -> None:
    for i in module.instructions:
        if i.opcode == "reduce_scatter" and i.collectives and i.kernel is not None:
            (whole,), (result,), move = i.kernel.root.inputs, i.kernel.root.outputs, i.kernel.root.move
            if move is not None and not module.storage.scatters(result, move):
                buffer = module.of[result]
                buffer.tensor, buffer.size, buffer.result = whole, module.storage(whole), False
                i.opcode, i.sums, i.writes_over = "reduce", True, True
                i.makes = [buffer]
