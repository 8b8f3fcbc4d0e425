"""Random programs under random plans against the unsharded run: failures, and the coverage of the rule table.

    python -m experiments.validation.random_programs --count 2000             # about an hour on two cores
    python -m experiments.validation.random_programs --first 137 --count 1    # one program again

Each program is run under a random plan on a random mesh, in float64; every other plan is steered to strategies not yet
drawn. Three of four are train steps where there is a derivative, and need less memory in ways that are drawn as well.
Prints a table: how often each kind of strategy of each primitive was run; and how often each way to need less memory.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from unity_jax.aot.flags import EIGHT_DEVICES, RUN_ONCE, appended

os.environ["XLA_FLAGS"] = appended("XLA_FLAGS", EIGHT_DEVICES | RUN_ONCE)

import argparse
import contextlib
import multiprocessing
import random
import sys
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

import jax
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from tests.numerics.coverage import Coverage, steer
from tests.numerics.harness import TOLERANCE, Case
from tests.numerics.programs import draw, trained
from tests.numerics.programs.drawer import Skip
from tests.numerics.savings import saved

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2), (3, 2), (7,))
MACHINES = ("cpu", "h100", "v100-summit")
BATCH = 20  # programs per task; compiled programs are dropped after each


@dataclass
class Outcome:
    """What a batch of programs showed."""

    coverage: Coverage = field(default_factory=Coverage)
    savings: Counter[str] = field(default_factory=Counter)
    ops: int = 0
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)

    def merge(self, other: Outcome) -> None:
        self.coverage.merge(other.coverage)
        self.savings += other.savings
        self.ops += other.ops
        self.worst = max(self.worst, other.worst)
        self.failures += other.failures


def check(seed: int, outcome: Outcome) -> None:
    """Run one program under one plan."""
    rng = random.Random(seed)
    program = draw(rng)
    if seed % 4:
        with contextlib.suppress(Skip):
            program = trained(program, rng)
    case = Case.of(program.fn, program.args, program.donate)
    if seed % 4:
        case = saved(case, rng)
    sizes, machine = rng.choice(MESHES), rng.choice(MACHINES)
    plan = case.sample(sizes, rng.randint(0, 2**30), machine)
    if seed % 2:
        plan = steer(case, plan, outcome.coverage, machine)
    errors = case.errors(case.run(plan), floor=1.0)
    outcome.coverage.record(case, plan)
    outcome.savings[" + ".join(how.name for how in case.program.savings) or "nothing"] += 1
    outcome.ops += sum(1 for _ in plan.graph.walk())
    outcome.worst = max([outcome.worst, *(e.error for e in errors if e.error <= TOLERANCE)])
    bad = [str(e) for e in errors if not e.error <= TOLERANCE]
    if bad:
        how = "; ".join(map(str, case.program.savings))
        outcome.failures.append(f"program {seed} on {sizes} ({machine}): {', '.join(bad)}\n    {program}\n    {how}")


def batch(seeds: range) -> tuple[range, Outcome]:
    jax.config.update("jax_enable_x64", True)
    outcome = Outcome()
    for seed in seeds:
        try:
            check(seed, outcome)
        except Exception:
            outcome.failures.append(f"program {seed}: {traceback.format_exc(limit=-3)}")
    jax.clear_caches()
    return seeds, outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    os.nice(10)
    last = options.first + options.count
    batches = [range(i, min(i + BATCH, last)) for i in range(options.first, last, BATCH)]
    total = Outcome()
    text, bar = Progress.get_default_columns()[:2]
    columns = (text, bar, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.processes, spawn, max_tasks_per_child=10)  # XLA keeps some memory
    with Progress(*columns) as progress, pool:
        task = progress.add_task("programs", total=options.count)
        for done in as_completed([pool.submit(batch, seeds) for seeds in batches]):
            seeds, outcome = done.result()
            total.merge(outcome)
            progress.update(task, advance=len(seeds), description=f"{len(total.failures)} failures")
            for failure in outcome.failures:
                progress.console.print(failure, markup=False, highlight=False)
            if not progress.console.is_terminal:
                print(f"{seeds}: {len(outcome.failures)} failures", file=sys.stderr, flush=True)
    print(f"\n{total.coverage}\n")
    print(f"{options.count} programs, {total.ops} planned ops, {len(total.failures)} failures")
    print(f"largest error of those that agree: {total.worst:.1e}")
    print("needs less memory by: " + ", ".join(f"{name}: {n}" for name, n in total.savings.most_common()))
    print("strategies never drawn: " + (", ".join(total.coverage.missing()) or "none"))
    print("primitives met only where all divides: " + (", ".join(total.coverage.always_divisible()) or "none"))
    sys.exit(bool(total.failures))


if __name__ == "__main__":
    main()
