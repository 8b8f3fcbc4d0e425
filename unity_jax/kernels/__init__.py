"""Kernels that a plan may choose, and that users may call.

    attention(q, k, v, causal=True)    attention whose scores are never in memory (`flash`)
"""

from unity_jax.kernels.attention import attention

__all__ = ["attention"]
