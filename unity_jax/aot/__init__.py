"""Compilers without their machines: what XLA makes of a program for devices that are not there, read and compared.

    topology("v5e:2x4")                     devices to compile for
    compiled_for(lowered, "tpu")            the compiled program
    Compiled.of(program, planned, ...)      its collectives beside the planned ones, its memory, its cycles
    stablehlo_collectives(text, mesh)       every `Collective` of a program as it is handed to the compiler
    compiled_collectives(text, mesh)        and as it comes out
"""

from unity_jax.aot.collectives import Collective, stablehlo_collectives
from unity_jax.aot.compiled import Compiled
from unity_jax.aot.sites import compiled_collectives
from unity_jax.aot.topologies import compiled_for, topology

__all__ = [
    "Collective",
    "Compiled",
    "compiled_collectives",
    "compiled_for",
    "stablehlo_collectives",
    "topology",
]
