"""XLA:TPU cuts a few images into strips, which are images of their own, and finds a kernel's gradient of strips that
lie beside each other, once for each place in the kernel (`ConvolutionVisitor::PropagateOnBackpropFilterConv` in
https://github.com/openxla/xla/blob/main/xla/service/space_to_batch_converter.cc).

    gradient of 3 x 3 reads b1   ->   halo reads b1, makes b2 of three times its size;  gradient reads b2

What lies beside each other is there as soon as the images are: in the forward pass.
"""

from __future__ import annotations

from unity_jax.pcg.graph import Tensor
from unity_jax.xla.convolutions import strips_bytes
from unity_jax.xla.copies import read_for
from unity_jax.xla.kernel import Kernel
from unity_jax.xla.module import Buffer, Instruction, Module


def space_to_batch_converter(module: Module) -> None:
    before, module.instructions = module.instructions, []
    halos: dict[Tensor, Instruction] = {}
    for i in before:
        shard = i.kernel.root.shard if i.kernel is not None and i.opcode == "conv_general_dilated" else None
        size = strips_bytes(shard, module.storage.device) if shard is not None else 0.0
        if i.kernel is not None and size:
            _beside(module, i, i.kernel, size, halos)
        module.add(i)


def _beside(
    module: Module, gradient: Instruction, kernel: Kernel, size: float, halos: dict[Tensor, Instruction]
) -> None:
    """Let a gradient read its images beside each other, which take so many bytes, not what they are computed of."""
    images, other = kernel.root.inputs
    needed, kept = read_for(kernel, images), read_for(kernel, other)
    if images not in halos:
        after: list[Tensor | Instruction] = [t for t in gradient.after if t in needed]
        after += [module.arguments[t] for t in needed if t in module.arguments]
        found = [b for b in gradient.reads if b.tensor in needed]
        halos[images] = module.add(
            Instruction("halo", after, found, [Buffer(images, size)], cost=module.estimator.fill(size))
        )
    gradient.after.append(halos[images])
    gradient.reads = [b for b in gradient.reads if b.tensor in kept or b.tensor not in needed] + halos[images].makes
