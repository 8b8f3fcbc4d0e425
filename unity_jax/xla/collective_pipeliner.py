"""Which collectives of a loop XLA:GPU runs an iteration later, beside the arithmetic of the next one.

    iteration 0            g0 = dot
    iterations 1 to n - 1  stack[i - 1] = reduce_scatter(g), g = dot
    after the loop         stack[n - 1] = reduce_scatter(g)

It does so with reductions whose results only go into what the loop stacks, as gradients of scanned layers do. The first
iteration is then no part of the loop any more, and what is to be reduced lives from one iteration to the next
(https://github.com/openxla/xla/blob/main/xla/service/collective_pipeliner.h).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from unity_jax.pcg.graph import Op, Tensor, trips
from unity_jax.pcg.loops import Scan
from unity_jax.xla.aliases import base_tensors
from unity_jax.xla.emission import instruction
from unity_jax.xla.fusion import Kernel
from unity_jax.xla.loop_stacks import fill
from unity_jax.xla.module import Buffer, Instruction, Module
from unity_jax.xla.op_classes import FORMATTING

_REDUCTIONS = frozenset(["reduce", "reduce_scatter"])


def collective_pipeliner(module: Module) -> None:
    """Run reductions of scanned layers an iteration later; the first iteration is then outside of the loop."""
    before, module.instructions = module.instructions, []
    for i in before:
        _visit(module, i)


def _visit(module: Module, i: Instruction) -> None:
    """Add an instruction, or what becomes of it."""
    if i.opcode == "scan" and i.kernel is not None:
        (body,) = i.kernel.root.bodies
        if late := pipelined(i.kernel.root, module.traffic.kernels[body]):
            _peel(module, i, late)
            return
    module.add(i)


def _peel(module: Module, loop: Instruction, late: Sequence[Kernel]) -> None:
    """The first iteration of a scan, the loop of the others, and the reductions of the last."""
    assert loop.kernel is not None
    root, (body,) = loop.kernel.root, loop.kernel.root.bodies
    roles, base, outer = Scan.of(root.params), base_tensors(body), module.base
    for inner, t in zip(body.inputs, root.inputs, strict=True):
        if (t := outer.get(t, t)) in module.maker:
            module.maker[inner] = t
        if t in module.of:
            module.of[inner] = module.of[t]
    ends = (base.get(t, t) for t in body.outputs[roles.stacked])
    stacks = dict(zip(ends, root.outputs[roles.stacked], strict=True))
    filled = {b: a for a in loop.after if isinstance(a, Instruction) for b in a.makes if b in loop.reads}
    slots = {t: b for t, stack in stacks.items() if (b := module.of.get(stack)) in filled}
    writing = {t: (b, filled[b]) for t, b in slots.items()}
    made = {t for k in late for t in k.writes}
    start = len(module.instructions)
    for k in module.traffic.kernels[body]:
        if k not in late:
            _inline(module, k, writing)
    pending = [t for k in late for t in k.reads if t not in made]
    carry = [base.get(t, t) for t in body.outputs[roles.last]]
    others = [outer.get(t, t) for t in (*root.inputs[roles.constants], *root.inputs[roles.sliced])]
    read = list(dict.fromkeys((*others, *carry, *pending, *slots)))
    for i in module.instructions[
        start:
    ]:  # what is pending will be there after the loop again, but these wait for the first iteration
        i.after = [module.made(a) if a in pending else a for a in i.after]
    loop.after = [module.made(t) if t in pending else t for t in read if t in module.maker]
    loop.after += filled.values()
    held = [module.of[t] for t in read if t in module.of]
    loop.reads = list(dict.fromkeys((*held, *slots.values())))
    loop.kernel = replace(loop.kernel, reads=read, writes=[*loop.kernel.writes, *pending])
    module.add(loop)
    module.maker.update(dict.fromkeys(loop.kernel.writes, loop))
    for k in late:
        _inline(module, k, writing)
    module.maker.update((stacks[t], module.made(t)) for t in made.intersection(stacks))


def _inline(module: Module, kernel: Kernel, slots: Mapping[Tensor, tuple[Buffer, Instruction]]) -> Instruction:
    """Add a kernel of the body, which writes into the stacks."""
    found = instruction(module, kernel)
    fill(module, found)
    into = [b for b in found.makes if b.tensor in slots]
    if module.is_collective(found):
        _visit(module, found)
        for b in into:
            slot, filled = slots[b.tensor]
            module.maker[b.tensor] = module.add(Instruction("update", [found, filled], [b, slot], []))
        return found
    for b in into:
        slot, filled = slots[b.tensor]
        found.makes.remove(b)
        del module.of[b.tensor]
        found.reads.append(slot)
        found.after.append(filled)
    _visit(module, found)
    return found


def pipelined(scan: Op, kernels: Sequence[Kernel]) -> list[Kernel]:
    """The reductions that run an iteration later, and what brings their results into form for the stack.

    **Arguments:** `kernels`: of the body of the scan.
    """
    if trips(scan) < 2:
        return []
    (body,), roles = scan.bodies, Scan.of(scan.params)
    base = base_tensors(body)
    loose = {base.get(t, t) for t in body.outputs[roles.stacked]} - {base.get(t, t) for t in body.outputs[roles.last]}
    ends: list[Kernel] = []  # what only the stack reads, last first
    for kernel in reversed(kernels):
        if all(t in loose for t in kernel.writes) and (_reduces(kernel) or _forms(kernel)):
            ends.append(kernel)
            loose.update(t for t in kernel.reads if t not in body.inputs and _only_read_by(t, ends, kernels))
        else:
            loose.difference_update(kernel.reads)
    found: list[Kernel] = []
    made: set[Tensor] = set()
    for kernel in reversed(ends):
        if _reduces(kernel) or made.intersection(kernel.reads):
            found.append(kernel)
            made.update(kernel.writes)
    return found


def _reduces(kernel: Kernel) -> bool:
    move = kernel.root.move
    return len(kernel.ops) == 1 and move is not None and move.kind in _REDUCTIONS


def _forms(kernel: Kernel) -> bool:
    return all(op.name in FORMATTING for op in kernel.ops)


def _only_read_by(t: Tensor, ends: Sequence[Kernel], kernels: Sequence[Kernel]) -> bool:
    return all(k in ends for k in kernels if t in k.reads)
