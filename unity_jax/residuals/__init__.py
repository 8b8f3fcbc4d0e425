"""What is kept between the forward and the backward pass: the same function by a program that needs less memory.

    choices(graph, traffic, seconds, devices)  what to compute again in the backward pass, best first (`Choice`)
    recomputed(graph, values, written)         the graph that does so
    chunked(graph, seed, dim, parts)           the graph that computes the loss around a large array by chunks of rows
    microbatched(graph, arguments, parts)      the graph that computes gradients by microbatches, and adds them up
    Recompute, Keep, Chunk, Microbatch         each as a plan tells and repeats it
"""

from unity_jax.residuals.choice import Choice, choices
from unity_jax.residuals.chunks import chunked
from unity_jax.residuals.microbatch import microbatched
from unity_jax.residuals.recompute import recomputed
from unity_jax.residuals.record import Chunk, Keep, Microbatch, Recompute

__all__ = ["Choice", "Chunk", "Keep", "Microbatch", "Recompute", "choices", "chunked", "microbatched", "recomputed"]
