"""Kernels at hundreds of drawn shapes, interpreted, beside what they should compute.

    python -m experiments.validation.kernel_numerics                     # 200 of each: half an hour
    python -m experiments.validation.kernel_numerics --cases 20

*attention*: the output and the gradients of queries, keys and values in float32 and bfloat16, of drawn lengths, heads,
groups, masks, biases and dropout, may be twice as far from float64 as plain operations, besides one rounding of the
largest value. *loops*: both passes of drawn recurrent layers are the scan's but for eight roundings. What is printed is
the largest part of what it may be that an error is. Needs the extra `test`.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from hypothesis import HealthCheck, Phase, given, settings
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from tests.kernels import attentions, cells

KERNELS = {"attention": attentions, "loops": cells}
DROP = 10
"""After so many cases what was compiled is dropped."""


def drawn(name: str, count: int, progress: Progress) -> tuple[str, ...]:
    """One row of the table."""
    module, start, task = KERNELS[name], time.monotonic(), progress.add_task(name, total=count)
    parts, failed, results, tried = list[tuple[float, str]](), list[str](), 0, 0

    def check(arguments: Mapping[str, Any]) -> None:
        nonlocal results, tried
        found: Mapping[str, tuple[float, float]] = module.errors(arguments)
        parts.extend((error / most, f"{result} of {dict(arguments)}") for result, (error, most) in found.items())
        failed.extend(f"{result} of {dict(arguments)}" for result, (error, most) in found.items() if not error <= most)
        results, tried = results + len(found), tried + 1
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
    run: Callable[[], None] = limits(given(module.CASES)(check))
    run()
    worst, where = max(parts)
    for line in failed:
        progress.console.print(line)
    return name, f"{tried}", f"{results}", f"{worst:.2f}", where, f"{len(failed)}", f"{time.monotonic() - start:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--kernels", default=",".join(KERNELS))
    options = parser.parse_args()
    table = Table(title="Kernels at drawn shapes, interpreted")
    for column in ("kernel", "cases", "results", "largest part", "at", "failed", "time"):
        table.add_column(column, overflow="fold")
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(width=150)
    with Progress(*columns, console=console) as progress:
        for name in options.kernels.split(","):
            table.add_row(*drawn(name, options.cases, progress))
    console.print(table)


if __name__ == "__main__":
    main()
