"""What a rewrite changes in the digits: a product of three matrices, associated in two ways, in each precision.

    python -m experiments.validation.reassociated

Rows by 1,024 features, down to 64 and up again, as an adapter is merged into its weight. Prints how far the two are
from each other and from the exact product, relative to its largest element; and the same for one product whose sum is
cut in eight, as data parallelism cuts the sum of a gradient.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

ROWS, WIDE, NARROW, PARTS = 2048, 1024, 64, 8


def distance(a: np.ndarray, b: np.ndarray) -> str:
    """The largest difference, relative to the largest element of `b`."""
    return f"{np.abs(a.astype(np.float64) - b).max() / np.abs(b).max():.1e}"


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    shapes = (ROWS, WIDE), (WIDE, NARROW), (NARROW, WIDE)
    exact = [rng.normal(size=shape) / shape[0] ** 0.5 for shape in shapes]
    table = Table(title="Relative to the largest element")
    products = ("x (a b) from (x a) b", "(x a) b from exact", "x (a b) from exact")
    for column in ("dtype", *products, "sum in parts from whole"):
        table.add_column(column)
    for dtype in (jnp.float64, jnp.float32, jnp.bfloat16):
        x, a, b = (jnp.asarray(v, dtype) for v in exact)
        whole = np.linalg.multi_dot([np.asarray(v, np.float64) for v in (x, a, b)])
        left, right = np.asarray((x @ a) @ b), np.asarray(x @ (a @ b))
        gradient = np.asarray(x.T @ x)
        parts = sum(p.T @ p for p in jnp.split(x, PARTS))
        table.add_row(
            jnp.dtype(dtype).name,
            distance(right, left.astype(np.float64)),
            distance(left, whole),
            distance(right, whole),
            distance(np.asarray(parts), gradient.astype(np.float64)),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
