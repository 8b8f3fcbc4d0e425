"""From a planned graph to the program that runs: one interpreter inside `shard_map`, jitted.

    lower(program, graph, mesh)     a `jax.stages.Lowered`
    spmd(graph, mesh)               the graph as a function of global arrays
"""

from unity_jax.lower.compile import lower, spmd

__all__ = ["lower", "spmd"]
