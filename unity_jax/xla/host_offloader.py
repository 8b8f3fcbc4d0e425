"""What layers of a loop stack on the host goes there part by part, and parts of it come back an iteration ahead
(https://github.com/openxla/xla/blob/main/xla/hlo/transforms/host_offloader.cc).

    scan makes b1:0;  scan reads b1 (from_host makes b2)   ->   scan makes b1:64;  scan reads b1, needs 2 x 64

A part for an iteration and one for the next are there as long as the second loop runs. XLA:TPU goes on with both loops
while it copies: what is last stacked is on the device until the other loop has its first part.
"""

from __future__ import annotations

from unity_jax.pcg.graph import Op
from unity_jax.pcg.loops import prefetched
from unity_jax.xla.module import Instruction, Module


def host_offloader(module: Module) -> None:
    for loop in module.instructions:
        if loop.opcode == "scan" and loop.kernel is not None:
            _comes(loop, loop.kernel.root)
            if module.target.pipelines_copies:
                _goes(module, loop.kernel.root)


def _comes(loop: Instruction, scan: Op) -> None:
    for copy in prefetched(scan):
        part = loop.bodies[0].of[copy.outputs[0]]
        loop.workspace += 2 * part.size
        part.size = 0.0


def _goes(module: Module, scan: Op) -> None:
    (body,) = scan.bodies
    parts = {op.outputs[0]: op.inputs[0] for op in body.ops if op.name == "to_host"}
    for stack, part in zip(scan.outputs, body.outputs, strict=True):
        if stack in module.of and part in parts:
            module.of[stack].size = module.storage(parts[part])
