"""Other ways to compute what a program computes, found in a traced step whatever library wrote it.

    implemented(program, machine, options)    those that are faster on a machine (`choose`)
    attentions(graph, constants)              softmaxes of products with values, and their gradients (`attention`)
    with_kernels(graph, groups)               the graph with these as kernels
    batchable(graph)                          the loops that compute something one step at a time and need not (`loops`)
    batched(graph, scans)                     the graph that computes it once for all steps, before and after these
"""

from unity_jax.implement.attention import attentions, with_kernels
from unity_jax.implement.loops import Gain, batchable, batched, gain

__all__ = ["Gain", "attentions", "batchable", "batched", "gain", "with_kernels"]
