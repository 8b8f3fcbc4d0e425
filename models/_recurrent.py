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

    def __call__(self, x: Array, hidden: Array, cell: Array) -> tuple[Array, Array, Array]:
        """x f[T, B, I], hidden and cell f[B, H] -> outputs f[T, B, H] and the last hidden and cell."""
        kernel = self.recurrent.kernel[...].astype(x.dtype)

        def step(carry: tuple[Array, Array], now: Array) -> tuple[tuple[Array, Array], Array]:
            hidden, cell = self._step(carry, now, kernel)
            return (hidden, cell), hidden.astype(x.dtype)

        (hidden, cell), outputs = jax.lax.scan(step, (hidden, cell), self.input(x))
        return outputs, hidden, cell

    def sequences(self, x: Array, real: Array | None = None, *, reverse: bool = False) -> Array:
        """x f[T, B, I] -> f[T, B, H] from a zero state, forward or backward in time.

        Where `real`, bool[T, B, 1], is false there is padding: the state is zero there, so that a backward pass enters
        the sentence as a forward one does.
        """
        kernel = self.recurrent.kernel[...].astype(x.dtype)

        def step(carry: tuple[Array, Array], now: tuple[Array, Array | None]) -> tuple[tuple[Array, Array], Array]:
            projected, real = now
            hidden, cell = self._step(carry, projected, kernel)
            if real is not None:
                hidden, cell = jnp.where(real, hidden, 0), jnp.where(real, cell, 0)
            return (hidden, cell), hidden.astype(x.dtype)

        zero = jnp.zeros((x.shape[1], kernel.shape[0]), self.precision.param)
        _, outputs = jax.lax.scan(step, (zero, zero), (self.input(x), real), reverse=reverse)
        return outputs

    def _step(self, carry: tuple[Array, Array], projected: Array, kernel: Array) -> tuple[Array, Array]:
        hidden, cell = carry
        gates = (projected + hidden.astype(kernel.dtype) @ kernel).astype(self.precision.param)
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(cell), cell
