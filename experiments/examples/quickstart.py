"""Plan a BERT encoder for eight devices, train it beside the unsharded original, and check what really runs.

    python -m experiments.examples.quickstart
    python -m experiments.examples.quickstart --machine v100-summit:8    # priced for another machine, still run here
    python -m experiments.examples.quickstart --layers 8 --steps 50

The devices are virtual: one host poses as eight. A minute and a half on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from unity_jax.aot.flags import EIGHT_DEVICES, appended

os.environ["XLA_FLAGS"] = appended("XLA_FLAGS", EIGHT_DEVICES)

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import models
import unity_jax as unity
from unity_jax.aot import collectives as read
from unity_jax.aot.sites import compiled_collectives
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.text import size

console = Console(width=100, highlight=False, markup=False)
SIZES = {"hidden": 256, "feed_forward": 1024, "heads": 8, "vocabulary": 2042, "batch_size": 32}
SIZES |= {"length": 64, "max_length": 64, "predictions": 10, "learning_rate": 1e-3}

Totals = dict[tuple[str, tuple[str, ...]], tuple[int, int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="price the plan for this machine, such as v5e:2x4 (default: these devices)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", default="float32", help="of the computation, such as bfloat16 (default: float32)")
    options = parser.parse_args()

    bert = models.get("bert", "tiny", layers=options.layers, dtype=options.dtype, **SIZES)
    c = bert.config
    say(
        "1. The train step",
        f"BERT, {c.layers} layers of width {c.hidden}, {bert.num_parameters:,} parameters, a vocabulary of "
        f"{c.vocabulary:,}, {c.batch_size} x {c.length} tokens; dropout {c.dropout}, gradients clipped by their global "
        "norm, AdamW. Written for one device with Flax and optax.",
    )

    settings = unity.Options(cache=None)  # plan anew each time, to show how long it takes
    step = unity.auto_shard(bert.train_step, donate_argnums=0, machine=options.machine, options=settings)
    plan = timed("planned", step.plan, bert.abstract_state(), bert.abstract_batch())
    say("2. The plan", priced(plan, options.machine))
    console.print(str(plan), soft_wrap=True)

    say(
        "3. The planned graph",
        "Every op with the layouts of its operands and results, every collective an op of its own. The first matrix "
        "products and the collectives around them:",
    )
    console.print("\n".join(excerpt(plan)), soft_wrap=True)

    lowered = step.lower(bert.abstract_state(), bert.abstract_batch())
    compiled = timed("compiled", lowered.compile)
    say("4. Collectives: planned, lowered, compiled")
    check_collectives(plan, lowered.as_text(), compiled.as_text())

    devices = len(jax.devices())
    say("5. Training", f"{options.steps} steps on {devices} virtual devices, and the same under plain jax.jit.")
    check_losses(bert, step, options.steps)


def priced(plan: unity.Plan, asked: str | None) -> str:
    """For which machine, and what to make of its times."""
    if asked is None:
        return (
            f"Priced for {plan.machine}, these virtual devices, with assumed constants: slow arithmetic and slow "
            "links, in the ratio of a real cluster to a real model, so that there is something to decide. Accelerators "
            "would keep so small a model whole on every device (--machine h100:8) or split little more than its batch "
            "(--machine v100-summit:8)."
        )
    return f"Priced for {plan.machine} with its published peak rates. It runs here all the same."


def excerpt(plan: unity.Plan, shown: int = 16) -> list[str]:
    """Lines of the planned graph: matrix products and changes of layout, from just before the first product."""
    kinds = ("dot_general", "combine", "reduce[", "reduce_scatter", "exchange", "partition")
    text = re.sub(r"\[0\]\.params[^ :]*?((?:\['\w+'\]){2}(?=[ :,\n]))", r"..\1", str(plan.pcg))
    lines = [line for line in text.splitlines() if line.partition(" = ")[2].startswith(kinds)]
    first = next((i for i, line in enumerate(lines) if " = dot_general" in line), 0)
    return lines[max(0, first - 3) :][:shown]


def check_collectives(plan: unity.Plan, stablehlo: str, hlo: str) -> None:
    """The plan's collectives against those of the program as we lowered it and as XLA compiled it."""
    axes = MeshAxes.of(plan.mesh)
    planned = plan.predicted.collectives
    found = read.stablehlo_collectives(stablehlo, axes), compiled_collectives(hlo, axes)
    rows = Table("kind", "axes", "planned", "StableHLO", "compiled by XLA:CPU", box=None, pad_edge=False)
    totals = [by_kind(side) for side in (planned, *found)]
    for kind, over in sorted(set().union(*totals)):
        cells = [f"{n} ({size(nbytes)})" for n, nbytes in (t.get((kind, over), (0, 0)) for t in totals)]
        rows.add_row(kind.replace("_", "-"), ",".join(over), *cells)
    console.print(rows)
    console.print()
    exact = read.count_difference(planned, found[0])
    if exact:
        console.print("The lowered program differs from the plan:", *exact, sep="\n  ", soft_wrap=True)
    else:
        n = sum(c.count for c in planned)
        console.print(f"Lowered: all {n} collectives equal the plan's in kind, axes, bytes and count.", soft_wrap=True)
    for line in what_xla_did(totals[1], totals[2]) + widened(stablehlo, hlo):
        console.print(line, soft_wrap=True)


def by_kind(found: Iterable[Any]) -> Totals:
    """Count and total bytes per kind and axes."""
    totals: Totals = {}
    for c in found:
        n, nbytes = totals.get((c.kind, c.axes), (0, 0))
        totals[c.kind, c.axes] = n + c.count, nbytes + c.count * c.bytes
    return totals


def what_xla_did(lowered: Totals, compiled: Totals) -> list[str]:
    """The differences between the program we lowered and the one XLA made of it, in words."""
    lines = []
    for key in sorted(lowered.keys() | compiled.keys()):
        (n, nbytes), (m, mbytes) = lowered.get(key, (0, 0)), compiled.get(key, (0, 0))
        name = f"{key[0].replace('_', '-')} over {','.join(key[1])}"
        if not n:
            lines.append(f"Compiled: XLA made {m} {name} ({size(mbytes)}) that the plan does not have.")
        elif not m:
            lines.append(f"Compiled: XLA replaced or removed all {n} {name} ({size(nbytes)}).")
        elif mbytes != nbytes:
            lines.append(f"Compiled: {name} moves {size(mbytes)} where the plan says {size(nbytes)}.")
        elif m != n:
            lines.append(f"Compiled: XLA combined {n} {name} into {m}, the same bytes in all.")
    return lines or ["Compiled: XLA:CPU kept every one of them, with its bytes."]


def widened(stablehlo: str, hlo: str) -> list[str]:
    """Whether XLA moves in 32 bits what the program moves in 16, as XLA:CPU does around its float32 arithmetic."""
    reductions = r'"stablehlo\.(?:all_reduce|reduce_scatter)"\(.*?\}\) : \(tensor<[^>]*?(\w*f\d+)>'
    others = r'"stablehlo\.(?:all_gather|all_to_all)"\([^\n]* : \(tensor<[^>]*?(\w*f\d+)>'
    dtypes = re.findall(reductions, stablehlo, re.DOTALL) + re.findall(others, stablehlo)
    before = sum(d.endswith("f16") for d in dtypes)
    ops = "all-reduce|reduce-scatter|all-gather|all-to-all"
    after = len(re.findall(rf"= \(?b?f16\[[^=\n]*? (?:{ops})(?:-start)?\(", hlo))
    if before == 0 or after > 0:
        return []
    return [
        f"Compiled: XLA:CPU widened all {before} collectives of 16-bit numbers to float32, twice the bytes of each."
    ]


def check_losses(bert: models.Model, step: unity.AutoSharded, steps: int) -> None:
    """Train both ways from the same seed, and print the losses side by side."""
    key = jax.random.key(0)
    plain = jax.jit(bert.train_step, donate_argnums=0)
    states = [step.init(bert.make_state, key), jax.jit(bert.make_state)(key)]
    losses: list[tuple[float, float]] = []
    took = [0.0, 0.0]
    with Progress(
        TextColumn("step"), MofNCompleteColumn(), BarColumn(40), TimeElapsedColumn(), TextColumn("{task.description}"),
        console=console,
    ) as progress:  # fmt: skip
        bar = progress.add_task("compiling", total=steps)
        for i in range(steps):
            batch = bert.make_batch(i)
            pair = []
            for j, run in enumerate((step, plain)):
                start = time.perf_counter()
                states[j], metrics = run(states[j], batch)
                pair.append(float(metrics["loss"]))
                took[j] += (time.perf_counter() - start) * (i > 0)
            losses.append((pair[0], pair[1]))
            progress.update(bar, advance=1, description=f"loss {pair[0]:.4f}")
    rows = Table("step", "loss, sharded", "loss, unsharded", "difference", box=None, pad_edge=False)
    for i, (ours, theirs) in enumerate(losses):
        rows.add_row(str(i), f"{ours:.6f}", f"{theirs:.6f}", f"{ours - theirs:+.1e}")
    console.print(rows)
    worst = max(abs(a - b) / abs(b) for a, b in losses)
    each = [t / max(1, steps - 1) for t in took]
    console.print(
        f"\nLargest relative difference {worst:.1e}: same masks and keys, {bert.config.dtype} sums in another order.\n"
        f"{each[0]:.2f} s a step sharded, {each[1]:.2f} s unsharded: the virtual devices share one host, so "
        "nothing is gained in time here.",
        soft_wrap=True,
    )


def timed(what: str, fn: Callable[..., Any], *args: Any) -> Any:
    start = time.perf_counter()
    with console.status(f"{what} ..."):
        result = fn(*args)
    console.print(f"({what} in {time.perf_counter() - start:.1f} s)", style="dim")
    return result


def say(title: str, text: str = "") -> None:
    console.print(f"\n{title}", style="bold")
    if text:
        console.print(text)
    console.print()


if __name__ == "__main__":
    main()
