"""What is kept between the forward and the backward pass: the same function by a program that needs less memory.

    recomputed(graph, values, written)  values of the forward pass computed again in the backward pass
"""

from unity_jax.residuals.recompute import recomputed

__all__ = ["recomputed"]
