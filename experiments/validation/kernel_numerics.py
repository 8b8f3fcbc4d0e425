"""Kernels at hundreds of drawn shapes, beside what they should compute.

    python -m experiments.validation.kernel_numerics                     # 200 of each, interpreted: half an hour
    python -m experiments.validation.kernel_numerics --cases 20
    python -m experiments.validation.kernel_numerics --compiled          # on a machine with a GPU or a TPU

*attention*: the output and the gradients of queries, keys and values in float32 and bfloat16, of drawn lengths, heads,
groups, masks, biases and dropout, may be twice as far from float64 as plain operations, besides one rounding of the
largest value. *loops*: both passes of drawn recurrent layers are the scan's but for eight roundings. `--compiled`:
attention as the device of this machine runs it, and *cudnn*: what cuDNN takes on GPUs. What is printed is the largest
part of what it may be that an error is. Needs the extra `test`.
"""

from __future__ import annotations

import os
import sys

if "--compiled" not in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from hypothesis import HealthCheck, Phase, given, settings
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from tests.kernels import attentions, cells

compiled = functools.partial(attentions.errors, passes=attentions.COMPILED)
INTERPRETED = {"attention": (attentions.CASES, attentions.errors), "loops": (cells.CASES, cells.errors)}
COMPILED = {"attention": (attentions.CASES, compiled), "cudnn": (attentions.BY_CUDNN, compiled)}
"""By name, what is drawn, and the errors of what is drawn with what they may be."""
DROP = 10
"""After so many cases what was compiled is dropped."""


def drawn(
    name: str, cases: Any, errors: Callable[..., Mapping[str, tuple[float, float]]], count: int, progress: Progress
) -> tuple[str, ...]:
    """One row of the table."""
    start, task = time.monotonic(), progress.add_task(name, total=count)
    parts, tried = list[tuple[float, str]](), 0

    def check(arguments: Mapping[str, Any]) -> None:
        nonlocal tried
        found = errors(arguments)
        parts.extend((error / most, f"{result} of {dict(arguments)}") for result, (error, most) in found.items())
        tried += 1
        progress.advance(task)
        if tried % DROP == 0:
            jax.clear_caches()

    limits = settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run: Callable[[], None] = limits(given(cases)(check))
    run()
    worst, where = max(parts)
    failed = [result for part, result in parts if not part <= 1]
    for line in failed:
        progress.console.print(line)
    took = f"{time.monotonic() - start:.0f} s"
    return name, f"{tried}", f"{len(parts)}", f"{worst:.2f}", where, f"{len(failed)}", took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    kernels = COMPILED if options.compiled else INTERPRETED
    table = Table(title=f"Kernels at drawn shapes, {'compiled' if options.compiled else 'interpreted'}")
    for column in ("kernel", "cases", "results", "largest part", "at", "failed", "time"):
        table.add_column(column, overflow="fold")
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(width=150)
    with Progress(*columns, console=console) as progress:
        for name, (cases, errors) in kernels.items():
            table.add_row(*drawn(name, cases, errors, options.cases, progress))
    console.print(table)


if __name__ == "__main__":
    main()
