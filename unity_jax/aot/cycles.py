"""How long the compiler itself thinks that a program computes: the cycles that XLA:TPU writes beside instructions.

    estimated_cycles(parse(compiled.as_text()))
    # Cycles(total=6920000, counted=91, missing=15, endless=0)

They are estimates of a cost model that has seen the real chip, one instruction after the other. Collectives, and copies
between the memories of a chip, carry none; nor do gathers, scatters and sorts, which `aot.bundles` measures.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from unity_jax.aot.hlo import Instruction, Module

CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
"""Cycles per second. v4: https://arxiv.org/abs/2304.01433, table 4; v5e and v5p:
https://jax-ml.github.io/scaling-book/tpus/, appendix A. The others follow from the peak rate (`machine/presets.py`) and
2^19 flops per cycle, the power of two above the 456,000 and 435,000 that XLA:TPU counts for a bfloat16 matmul of 4096;
the same reckoning (2^17 on a core of v4 and on v5e, 2^18 on v5p) gives the published clocks."""


@dataclass(frozen=True)
class Cycles:
    """Clock cycles of one step on one device.

    **Fields:** `total`; how many instructions are `counted`, and how many that compute on arrays are `missing` an
    estimate (each place in the program once); `endless`: loops whose trips are unknown, counted as one trip.
    """

    total: int = 0
    counted: int = 0
    missing: int = 0
    endless: int = 0

    def __add__(self, other: Cycles) -> Cycles:
        return Cycles(
            self.total + other.total,
            self.counted + other.counted,
            self.missing + other.missing,
            self.endless + other.endless,
        )


_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast partition-id replica-id after-all opt-barrier".split()
)
_FREE_CALLS = frozenset("ConcatBitcast AllocateBuffer AssumeGatherIndicesInBound GatherScatterIndicesBitpacked".split())
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all")


def estimated_cycles(module: Module) -> Cycles:
    """The sum over the schedule: loops as often as they run, of branches the costliest."""

    @functools.cache
    def of(name: str) -> Cycles:
        return sum(map(of_instruction, module.computations[name].values()), Cycles())

    def of_instruction(op: Instruction) -> Cycles:
        if op.cycles is not None:
            return Cycles(op.cycles, 1)
        inside = [of(name) for name in op.called if name in module.computations]
        if op.opcode == "while":
            trips, once = module.trips(op), sum(inside, Cycles())
            return Cycles((trips or 1) * once.total, once.counted, once.missing, once.endless + (trips is None))
        if op.opcode == "conditional":
            return max(inside, key=lambda cycles: cycles.total, default=Cycles())
        if op.opcode == "call":
            return sum(inside, Cycles())
        return Cycles(missing=int(computes(op, module)))

    return of(module.entry)


def computes(op: Instruction, module: Module) -> bool:
    """Whether an instruction without an estimate does arithmetic on an array (a scalar's costs nothing)."""
    if all(math.prod(array.shape) <= 1 for array in op.arrays) or op.opcode in _FREE or _moves(op, module):
        return False
    if op.opcode == "fusion":
        return any(computes(inner, module) for name in op.called for inner in module.computations[name].values())
    return not (op.opcode == "custom-call" and any(f'"{target}"' in op.attributes for target in _FREE_CALLS))


def _moves(op: Instruction, module: Module) -> bool:
    """Whether it is a collective, part of one, or a copy between memories."""
    if op.opcode == "fusion":
        return any(_moves(inner, module) for name in op.called for inner in module.computations[name].values())
    if op.opcode == "custom-call":
        return '"AsyncCollective' in op.attributes
    return op.opcode.endswith(("-start", "-done", "-update")) or op.opcode.startswith(_COLLECTIVES)
