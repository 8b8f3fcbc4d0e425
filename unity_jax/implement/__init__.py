"""Other ways to compute what a program computes, found in a traced step whatever library wrote it.

    attentions(graph, constants)    softmaxes of products with values, and their gradients (`attention`)
    with_kernels(graph, groups)     the graph with these as kernels
    batchable(graph)                the loops that compute something one step at a time and need not (`loops`)
    batched(graph, scans)           the graph that computes it once for all steps, before and after these loops
    widened(scan)                   how much larger what a loop slices and stacks is then
    persistable(graph, room)        the loops that can be one kernel each (`persistent`)
    persisted(graph, bodies)        the graph with these as kernels
    baggable(graph)                 the sums of looked-up rows, and gradients of tables by such sums (`bags`)
    bagged(graph, made)             the graph with these as one op each

Which of them a program has is searched for (`search.implementing`).
"""

from unity_jax.implement.attention import attentions, with_kernels
from unity_jax.implement.bags import baggable, bagged
from unity_jax.implement.loops import batchable, batched, widened
from unity_jax.implement.persistent import persistable, persisted

__all__ = [
    "attentions",
    "baggable",
    "bagged",
    "batchable",
    "batched",
    "persistable",
    "persisted",
    "widened",
    "with_kernels",
]
