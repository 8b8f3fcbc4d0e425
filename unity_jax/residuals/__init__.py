"""What is kept between the forward and the backward pass: the same function by a program that needs less memory.

    choices(graph, traffic, seconds, devices)  what to compute again in the backward pass, best first (`Choice`)
    recomputed(graph, values, written)         the graph that does so
    around(graph, seed, dim, parts)            the loss around a large array (`Region`)
    chunked(graph, region, seed, parts)        the graph that computes it by chunks of rows
    Recompute, Chunk                           both as a plan tells and repeats them
"""

from unity_jax.residuals.choice import Choice, choices
from unity_jax.residuals.chunks import chunked
from unity_jax.residuals.recompute import recomputed
from unity_jax.residuals.record import Chunk, Recompute
from unity_jax.residuals.region import Region, around

__all__ = ["Choice", "Chunk", "Recompute", "Region", "around", "choices", "chunked", "recomputed"]
