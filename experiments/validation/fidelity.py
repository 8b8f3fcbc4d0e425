"""What was planned against what was lowered and compiled: the collectives of every model under five plans.

    python -m experiments.validation.fidelity                  # the lowered StableHLO: must be equal
    python -m experiments.validation.fidelity --compile cpu    # XLA:CPU's program too
    python -m experiments.validation.fidelity --compile tpu    # XLA:TPU's, for v5e:2x4; needs the extra tpu-aot, no TPU
    python -m experiments.validation.fidelity --memory         # FSDP with repeated gathers: peak memory on v5e, no TPU

Compilers combine collectives, merge equal ones, move casts across them and decompose small ones, so compiled programs
are compared by kind and mesh axes: none may appear that the plan lacks and that decomposes no planned one. XLA:CPU also
widens reductions of bfloat16 to float32 (their bytes double), which is noted.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from unity_jax.aot.flags import EIGHT_DEVICES, appended

os.environ["XLA_FLAGS"] = appended("XLA_FLAGS", EIGHT_DEVICES)

import argparse
import dataclasses
import importlib.util
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import models
from tests.numerics.harness import Planned
from tests.numerics.plans import NAMES, named_plans, planned, without_barriers
from tests.numerics.steps import slow
from unity_jax.aot.collectives import (
    Collective,
    bytes_difference,
    count_difference,
    stablehlo_collectives,
)
from unity_jax.aot.sites import compiled_collectives
from unity_jax.aot.topologies import topology
from unity_jax.lower.compile import lower
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import collectives
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace

AXES = MeshAxes(("x", "y"), (2, 4))
TPU = "v5e:2x4"


def planned_collectives(plan: Planned, machine: Machine) -> list[Collective]:
    return [Collective(c.kind, c.axes, c.bytes, c.count) for c in collectives(plan.graph, plan.axes, machine)]


def devices_mesh(compile_for: str | None, axes: MeshAxes) -> Mesh:
    devices = topology(TPU) if compile_for == "tpu" else jax.devices()
    return Mesh(np.array(devices).reshape(axes.sizes), axes.names)


def compare(console: Console, names: list[str], plans: tuple[str, ...], compile_for: str | None) -> int:
    """Print a row per model and plan; returns the number of differences that break the contract."""
    table = Table(title=f"Collectives on {AXES}")
    for column in ("model", "plan", "planned", "bytes", "lowered"):
        table.add_column(column)
    if compile_for:
        table.add_column(f"pairs that only XLA:{compile_for.upper()} has")
    mesh, machine, broken, notes = devices_mesh(compile_for, AXES), slow(), 0, []
    for name in names:
        model = models.get(name, "tiny", dtype=jnp.bfloat16)
        program = trace(model.train_step, (model.abstract_state(), model.abstract_batch()), {}, donate_argnums=0)
        for label, plan in named_plans(program, machine, AXES, plans):
            console.print(f"[dim]{name}, {label}", end="\r")
            expected = planned_collectives(plan, machine)
            lowered = lower(program, plan.graph, mesh)
            difference = count_difference(expected, stablehlo_collectives(lowered.compiler_ir("stablehlo"), AXES))
            total = sum(c.bytes * c.count for c in expected)
            row = [name, label, f"{sum(c.count for c in expected)}", f"{total:,}", "; ".join(difference) or "equal"]
            broken += bool(difference)
            if compile_for:
                compiled = compiled_collectives(lowered.compile().as_text(), AXES)
                new = unplanned(expected, compiled)
                row.append("; ".join(f"{kind} over {'+'.join(axes)}" for kind, axes in new) or "none")
                broken += bool(new)
                notes += [f"{name}, {label}: {line}" for line in bytes_difference(expected, compiled)]
            table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    return broken


DECOMPOSED = {"all_reduce": ("reduce_scatter",), "permute": ("all_gather", "all_to_all", "reduce_scatter")}
"""What XLA:TPU makes of collectives over small or unaligned shapes, as in the tiny models: a reduce-scatter becomes an
all-reduce and a slice, others a few permutes. None of these appears at the sizes of `--memory`."""


def unplanned(expected: list[Collective], compiled: list[Collective]) -> list[tuple[str, tuple[str, ...]]]:
    """The (kind, axes) pairs that only the compiled program has and that decompose no planned one."""
    planned_pairs = {(c.kind, c.axes) for c in expected}
    return sorted(
        pair
        for pair in {(c.kind, c.axes) for c in compiled} - planned_pairs
        if not any((kind, pair[1]) in planned_pairs for kind in DECOMPOSED.get(pair[0], ()))
    )


def chain(layers: int, width: int, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """A train step of an MLP whose float32 weights are used in bfloat16."""

    def step(params: list[Any], x: Any, y: Any) -> Any:
        def loss(params: list[Any]) -> Any:
            h = x
            for w in params:
                h = jnp.tanh(h @ w.astype(jnp.bfloat16))
            return ((h - y).astype(jnp.float32) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    weight, data = jax.ShapeDtypeStruct((width, width), jnp.float32), jax.ShapeDtypeStruct((batch, width), jnp.bfloat16)
    return step, ([weight] * layers, data, data)


def fsdp_memory(console: Console, width: int = 8192, batch: int = 2048) -> int:
    """FSDP of an MLP on one axis of eight: temporaries with gathers kept, repeated, and repeated without barriers."""
    axes, machine = MeshAxes(("x",), (8,)), Machine.preset(TPU)
    mesh = devices_mesh("tpu", axes)
    whole = width * width * 2
    table = Table(title=f"FSDP on {TPU}: weights of {whole / 2**20:.0f} MiB each when gathered in bfloat16")
    for column in ("layers", "gathers", "arguments", "temporaries", "all-gathers planned", "compiled"):
        table.add_column(column)
    temporaries = {}
    for layers in (4, 8):
        fn, args = chain(layers, width, batch)
        program = trace(fn, args, {}, donate_argnums=0)
        (base,) = (plan for _, plan in named_plans(program, machine, axes, ("fsdp",)))
        for label in ("kept", "repeated", "repeated, no barriers"):
            plan = planned(program, dataclasses.replace(base.decisions, keep=label == "kept"), machine, axes)
            if label.endswith("no barriers"):
                plan = dataclasses.replace(plan, graph=without_barriers(plan.graph))
            compiled = lower(program, plan.graph, mesh).compile()
            memory = compiled.memory_analysis()
            temporaries[layers, label] = memory.temp_size_in_bytes
            count = [
                sum(c.count for c in side if c.kind == "all_gather")
                for side in (planned_collectives(plan, machine), compiled_collectives(compiled.as_text(), axes))
            ]
            sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes)
            table.add_row(f"{layers}", label, *(f"{n / 2**20:,.0f} MiB" for n in sizes), *map(str, count))
    console.print(table)
    grown = temporaries[8, "repeated"] - temporaries[4, "repeated"]
    console.print(f"four more layers take {grown / 2**20:+,.0f} MiB; gathered they have {4 * whole / 2**20:,.0f} MiB")
    return int(grown >= 4 * whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models.names()))
    parser.add_argument("--plans", default=",".join(NAMES), help="of " + ", ".join(NAMES))
    parser.add_argument("--compile", choices=("cpu", "tpu"))
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    console = Console(width=150)
    if (options.compile == "tpu" or options.memory) and importlib.util.find_spec("libtpu") is None:
        console.print("skipped: the TPU compiler is not installed (pip install 'unity_jax\\[tpu-aot]')")
        return
    if options.memory:
        sys.exit(fsdp_memory(console))
    sys.exit(compare(console, options.models.split(","), tuple(options.plans.split(",")), options.compile))


if __name__ == "__main__":
    main()
