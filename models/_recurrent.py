"""The LSTM layer (Hochreiter and Schmidhuber 1997) as a scan over time."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models._common import Array, Precision


class Lstm(nnx.Module):
    """One LSTM layer; the input projection of all steps is one matmul, outside the scan."""

    def __init__(self, inputs: int, hidden: int, init: Any, precision: Precision, rngs: nnx.Rngs) -> None:
        make = {"kernel_init": init, "rngs": rngs, **precision.kwargs}
        self.input = nnx.Linear(inputs, 4 * hidden, bias_init=init, **make)
        self.recurrent = nnx.Linear(hidden, 4 * hidden, use_bias=False, **make)
        self.precision = precision

    def __call__(
        self,
        x: Array,
        start: tuple[Array, Array] | None = None,
        real: Array | None = None,
        *,
        reverse: bool = False,
    ) -> tuple[Array, tuple[Array, Array]]:
        """x f[T, B, I] -> outputs f[T, B, H] and the last hidden and cell states f[B, H], forward or backward in time.

        **Arguments:** `start`: the hidden and cell states before the first step, zero by default. `real` bool[T, B, 1]:
        false for padding, where the state is zero, so that a backward pass enters a sentence as a forward one does.
        """
        kernel = self.recurrent.kernel[...].astype(x.dtype)

        def step(carry: tuple[Array, Array], now: tuple[Array, Array | None]) -> tuple[tuple[Array, Array], Array]:
            (hidden, cell), (projected, real) = carry, now
            gates = (projected + hidden.astype(kernel.dtype) @ kernel).astype(self.precision.param)
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
            if real is not None:
                hidden, cell = jnp.where(real, hidden, 0), jnp.where(real, cell, 0)
            return (hidden, cell), hidden.astype(x.dtype)

        if start is None:
            zero = jnp.zeros((x.shape[1], kernel.shape[0]), self.precision.param)
            start = zero, zero
        end, outputs = jax.lax.scan(step, start, (self.input(x), real), reverse=reverse)
        return outputs, end
