"""How long planning takes, beside tracing, and what it should take at most.

    python -m experiments.tables.planning_cost                         # every case: minutes
    python -m experiments.tables.planning_cost --cases toys,bert-12    # some, by the beginnings of their names
    python -m experiments.tables.planning_cost --within .6             # and in .6 of the memory that each needs

Every case runs in a process of its own, without the plan cache, with rewriting. Nothing is compiled or run: no
accelerator is needed. Seconds are of CPU, of one process, tracing not included in planning; *at most* is what planning
is meant to take, in seconds or as a multiple of tracing, and `!` says that it takes more. *again* is the same function
with fewer rows; *within* is the same in a part of the memory, and how many times as long that is: three times at most
are meant. How planning grows with depth (48 layers against 12) is printed below the table.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from rich.console import Console
from rich.table import Table

import models
import unity_jax as unity
from experiments.validation.programs import VALIDATION
from experiments.validation.programs.bert_linen import BertForMaskedLM, TrainState, train_step
from unity_jax.text import seconds, size

Made = tuple[Callable[..., Any], tuple[Any, ...], int | None]
"""A function, its arguments, and which of them is donated."""


class Case(NamedTuple):
    """Something to plan: `make(part)` makes it with that part of its rows; `most`: seconds, `ratio`: times tracing.
    Without a `batch`, there are no rows to have fewer of."""

    make: Callable[[float], Made]
    machine: str
    most: float | None = None
    ratio: float | None = None
    batch: bool = True


def _zoo(name: str, of: str, **overrides: Any) -> Callable[[float], Made]:
    def make(part: float) -> Made:
        rows = models.get(name, of, **overrides).config.batch_size
        model = models.get(name, of, **overrides, batch_size=int(rows * part))
        return model.train_step, (model.abstract_state(), model.abstract_batch()), 0

    return make


def _toy(name: str) -> Callable[[float], Made]:
    def make(part: float) -> Made:
        program = VALIDATION[name](tiny=True)
        state, batch = program.arguments
        if part < 1:
            rows = max(t.shape[0] for t in jax.tree.leaves(batch) if t.shape)
            fewer = functools.partial(_fewer, rows, int(rows * part))
            batch = jax.tree.map(fewer, batch)
        return program.step, (state, batch), program.donate_argnums

    return make


def _fewer(rows: int, left: int, t: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((left, *t.shape[1:]), t.dtype) if t.shape[:1] == (rows,) else t


def _bert(layers: int) -> Callable[[float], Made]:
    """BERT-Large, unrolled, 64 sequences of 512."""

    def make(part: float) -> Made:
        model = BertForMaskedLM(hidden=1024, layers=layers, heads=16, mlp_dim=4096)
        rows = int(64 * part)
        ids = jax.ShapeDtypeStruct((rows, 512), jnp.int32)
        batch = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "labels"), ids)

        def state(key: Any) -> Any:
            inputs = (jnp.zeros((rows, 512), jnp.int32),) * 3
            params = model.init(key, *inputs, train=False)["params"]
            tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
            return TrainState.create(apply_fn=model.apply, params=params, tx=tx, dropout_key=key)

        return train_step, (jax.eval_shape(state, jax.random.key(0)), batch), 0

    return make


def _function(step: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[float], Made]:
    def make(part: float) -> Made:
        return step, tuple(jax.ShapeDtypeStruct((int(s[0] * part), *s[1:]), jnp.float32) for s in shapes), None

    return make


def scanned(x: jax.Array) -> jax.Array:
    return jax.grad(lambda y: jnp.sum(jax.lax.associative_scan(lambda a, b: a * b + b, y) ** 2))(x)


def products(x: jax.Array) -> jax.Array:
    return jax.grad(lambda y: jnp.sum(jnp.cumprod(y, axis=0)))(x)


def exponential(x: jax.Array) -> jax.Array:
    return jax.grad(lambda y: jnp.sum(jax.scipy.linalg.expm(y)))(x)


def _muon(part: float) -> Made:
    optimizer = optax.contrib.muon(1e-3)

    def step(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        gradients = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    wide = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    params = {"a": wide, "b": wide}
    rows = jax.ShapeDtypeStruct((int(512 * part), 256), jnp.float32)
    return step, (params, jax.eval_shape(optimizer.init, params), rows), None


TOYS = {"bert": "bert_linen", "gpt": "gpt_pytree", "llama": "llama", "vit": "vit"}

CASES: dict[str, Case] = {
    **{f"toys-{name}": Case(_toy(program), "cpu:8", most=2) for name, program in TOYS.items()},
    "toys-mlp": Case(_zoo("mlp", "tiny"), "cpu:8", most=1),
    "toys-cnn": Case(_toy("convnet_nnx"), "cpu:8", most=1),
    "functions-associative_scan": Case(_function(scanned, (1024, 8)), "cpu:8", most=2),
    "functions-cumprod": Case(_function(products, (1024, 8)), "cpu:8", most=2),
    "functions-expm": Case(_function(exponential, (64, 64)), "cpu:8", most=2, batch=False),
    "functions-muon": Case(_muon, "cpu:8", most=2),
    **{f"bert-{n} {on}": Case(_bert(n), on, ratio=5) for n in (12, 24, 48) for on in ("h100:8", "v5e:8x8")},
    "gpt3-175b": Case(_zoo("gpt", "gpt3-175b"), "h100:64x8", most=6),
    "lora-7b": Case(_zoo("lora", "full"), "h100:8", most=10),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="beginnings of names; all by default")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a case is given up")
    parser.add_argument("--again", action="store_true", help="with half as many rows, too, where a case has a batch")
    parser.add_argument("--within", type=float, metavar="PART", help="of the memory that a plan needs, too")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # how this script calls itself
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(CASES[options.case], options.again, options.within)))
        return
    wanted = tuple(options.cases.split(",")) if options.cases else ("",)
    console, took = Console(width=150), dict[str, float]()
    columns = "case", "machine", "ops", "trace", "plan", "at most", "times tracing", "again", "within"
    rows = Table(*columns, "memory", "mesh", "step")
    for name in (n for n in CASES if n.startswith(wanted)):
        case = CASES[name]
        with console.status(f"planning {name} for {case.machine} ..."):
            found = run(name, options)
        if isinstance(found, str):
            rows.add_row(name, case.machine, "", "", found)
            console.print(f"{name}: {found}")
            continue
        console.print(f"{name}: planned in {found['plan']:.2f} s, traced in {found['trace']:.2f} s")
        took[name] = found["plan"]
        most = case.most if case.most is not None else (case.ratio or 0) * found["trace"]
        rows.add_row(
            name,
            case.machine,
            f"{found['ops']:,}",
            f"{found['trace']:.2f} s",
            f"{found['plan']:.2f} s",
            f"{most:.1f} s" + ("" if found["plan"] <= most else " !"),
            f"{found['plan'] / found['trace']:.1f}",
            f"{found['again']:.2f} s" if "again" in found else "",
            f"{found['within']:.2f} s, {found['within'] / found['plan']:.1f}x" if "within" in found else "",
            size(found["memory"]),
            found["mesh"],
            seconds(found["step"]) + ("" if found["fits"] else ", does not fit"),
        )
    console.print(rows)
    for on in ("h100:8", "v5e:8x8"):
        known = [n for n in (12, 24, 48) if f"bert-{n} {on}" in took]
        for a, b in itertools.combinations(known, 2):
            times = took[f"bert-{b} {on}"] / took[f"bert-{a} {on}"]
            console.print(f"BERT-Large on {on}, {a} -> {b} layers: planning takes {times:.2f} times as long")


def run(name: str, options: argparse.Namespace) -> dict[str, Any] | str:
    """Measure one case in a fresh process; or what went wrong there."""
    command = [sys.executable, "-m", "experiments.tables.planning_cost", "--case", name]
    command += ["--again"] * options.again + ([] if options.within is None else ["--within", str(options.within)])
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        return f"over {options.timeout:.0f} s"
    return f"failed ({done.returncode})" if done.returncode else json.loads(done.stdout.splitlines()[-1])


def measure(case: Case, again: bool, part: float | None) -> dict[str, Any]:
    """Seconds of tracing and of the rest of planning, and the peak memory of the process.

    **Arguments:** `again`: with fewer rows, too; `part` of the memory that the plan needs: within that, too.
    """
    fun, arguments, donated = case.make(1.0)
    make = functools.partial(
        unity.auto_shard,
        fun,
        machine=case.machine,
        donate_argnums=donated,
        options=unity.Options(cache=None, rewrite=True),
    )
    sharded = make()
    start = time.process_time()
    plan = sharded.plan(*arguments)
    total = time.process_time() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: dict[str, Any] = {}
    if again and case.batch:
        fewer = case.make(0.5)[1]
        start = time.process_time()
        sharded.plan(*fewer)
        found["again"] = time.process_time() - start
    jax.clear_caches()
    start = time.process_time()
    jax.jit(fun, donate_argnums=donated).trace(*arguments)  # again and warm: planning is not made to look cheap
    traced = time.process_time() - start
    if part is not None:
        limited = make(memory_limit=part * plan.predicted.peak_bytes)
        start = time.process_time()
        limited.plan(*arguments)
        found["within"] = time.process_time() - start - traced
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return found | {
        "trace": traced,
        "plan": total - traced,
        "memory": memory * unit,
        "ops": sum(1 for _ in plan.bound().graph.walk()),
        "mesh": str(plan.axes),
        "step": plan.predicted.step_seconds,
        "fits": plan.fits,
    }


if __name__ == "__main__":
    main()
