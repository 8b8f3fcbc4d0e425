"""The module of a planned graph: an instruction for each kernel, the same for all compilers.

A loop or a branch is an instruction with modules for its bodies. An argument that is read is one as well, which stands
for its being there.
"""

from __future__ import annotations

from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import op_collectives
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.xla.kernel import Kernel
from unity_jax.xla.layout_assignment import Storage
from unity_jax.xla.module import Instruction, LatencyEstimator, Module
from unity_jax.xla.op_classes import IN_PLACE_NEVER
from unity_jax.xla.traffic import Traffic


def emit(
    graph: Graph,
    traffic: Traffic,
    storage: Storage,
    machine: Machine,
    estimator: LatencyEstimator,
    looped: bool = False,
) -> Module:
    """The module of a planned graph, bodies included.

    **Arguments:** `traffic` and `storage`: of the graph; `looped`: see `Module`.
    """
    module = Module(graph, traffic, storage, machine, estimator, looped=looped)
    for kernel in traffic.kernels[graph]:
        module.add(instruction(module, kernel))
    return module


def instruction(module: Module, kernel: Kernel) -> Instruction:
    """The instruction of a kernel, behind those of what it reads."""
    root, storage, made = kernel.root, module.storage, module.maker
    after: list[Tensor | Instruction] = [t for t in (*kernel.reads, *kernel.waits) if t in made]
    after += [argument(module, t) for t in kernel.reads if t in module.inputs]
    move = root.move.kind if root.move is not None and len(kernel.ops) == 1 else None
    own = root.name in IN_PLACE_NEVER or bool(root.bodies) or (root.move is not None and move != "reduce")
    found = Instruction(
        move or root.name,
        after,
        [module.of[t] for t in kernel.reads if t in module.of],
        [module.buffer(t) for t in kernel.writes],
        kernel,
        workspace=sum(storage(t) for t in root.outputs if t not in kernel.writes) if root.bodies else 0.0,
        writes_over=not own,
        collectives=tuple(op_collectives(root, storage.mesh, module.machine)) if move is not None else (),
        bodies=tuple(
            emit(b, module.traffic, storage, module.machine, module.estimator, looped=True) for b in root.bodies
        ),
    )
    made.update(dict.fromkeys(kernel.writes, found))
    return found


def argument(module: Module, t: Tensor) -> Instruction:
    """The instruction that stands for an argument."""
    if t not in module.arguments:
        module.arguments[t] = module.add(Instruction("argument", [], [], []))
    return module.arguments[t]
