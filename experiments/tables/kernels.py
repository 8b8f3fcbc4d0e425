"""Attention on TPUs that are not there, forward and backward: our kernels beside JAX's and XLA's own operations.

    python -m experiments.tables.kernels                               # minutes; needs the extra tpu-aot
    python -m experiments.tables.kernels --on v5e:2x4 --lengths 2048

Milliseconds of one device for 8 heads in bfloat16, one example, compiled by the real XLA:TPU: of kernels the length of
the schedules that libtpu writes of them, of other operations the compiler's own estimate (`unity_jax.aot.bundles`).
What a kernel waits for memory is not in it. With a causal mask our kernels loop over the blocks that are seen, half of
them and half the diagonal; JAX's kernel decides that as it runs, which no schedule tells, so it has no figure there,
nor with dropout, which it does not have. *Arithmetic* is what seven products of all scores that are seen take at the
peak rate, which differentiation needs at least. *MiB* are temporaries.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from experiments.rows import Row, Rows
from experiments.scheduled import arguments, tabulate
from unity_jax.aot import tune
from unity_jax.aot.bundles import empty, schedules, with_schedules
from unity_jax.aot.compiled import CompiledMemory
from unity_jax.aot.cycles import CLOCKS, estimated_cycles
from unity_jax.aot.hlo import parse
from unity_jax.aot.topologies import topology
from unity_jax.kernels import attention
from unity_jax.kernels.spec import Spec
from unity_jax.machine.machine import Machine

RESULTS = Path(__file__).parents[1] / "results" / "kernels.csv"
SETTINGS = ("topology", "length", "features", "groups", "form")
CODE = (
    "unity_jax/kernels",
    *(f"unity_jax/aot/{name}.py" for name in ("bundles", "cycles", "hlo", "tune")),
    *(f"experiments/tables/kernels.py:{name}" for name in ("measure", "by_jax", "by_xla", "ours")),
)
TOPOLOGIES = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")
HEADS, FORMS, DROPOUT = 8, ("all keys", "causal", "causal, dropout"), 0.1
LIBRARY_BLOCK = 512
PASSES = 7
"""Products that the forward and the backward pass need."""


def ours(q: Any, k: Any, v: Any, key: Any, causal: bool, rate: float) -> Any:
    return attention(q, k, v, causal=causal, dropout_rate=rate, dropout_key=key)


def by_xla(q: Any, k: Any, v: Any, key: Any, causal: bool, rate: float) -> Any:
    """As users write it."""
    k, v = (jnp.repeat(t, q.shape[2] // k.shape[2], axis=2) for t in (k, v))
    s = jnp.einsum("bqhf,bkhf->bhqk", q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    if causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[2:], bool)), s, jnp.finfo(s.dtype).min)
    p = jax.nn.softmax(s, axis=-1).astype(q.dtype)
    if rate:
        p = jnp.where(jax.random.bernoulli(key, 1 - rate, p.shape), p / (1 - rate), 0)
    return jnp.einsum("bhqk,bkhf->bqhf", p, v)


def by_jax(q: Any, k: Any, v: Any, key: Any, causal: bool, rate: float) -> Any:
    """`jax.experimental.pallas.ops.tpu.flash_attention`."""
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    k, v = (jnp.repeat(t, q.shape[2] // k.shape[2], axis=2) for t in (k, v))
    names = [f"block_{of}" for of in ("q", "k_major", "k", "q_major_dkv", "k_major_dkv", "k_dkv", "q_dkv")]
    names += [f"block_{of}" for of in ("k_major_dq", "k_dq", "q_dq")]
    sizes = BlockSizes(block_b=1, **dict.fromkeys(names, LIBRARY_BLOCK))
    turned = (jnp.swapaxes(t, 1, 2) for t in (q, k, v))
    scale = q.shape[-1] ** -0.5
    return jnp.swapaxes(flash_attention(*turned, causal=causal, sm_scale=scale, block_sizes=sizes), 1, 2)


MAKERS: dict[str, Callable[..., Any]] = {"ours": ours, "JAX's kernel": by_jax, "XLA": by_xla}


def measure(on: str, length: int, features: int, groups: int, form: str) -> dict[str, Any]:
    """One row: of each way, milliseconds and MiB."""
    causal, rate = "causal" in form, DROPOUT if "dropout" in form else 0.0
    clock, device = CLOCKS[on.partition(":")[0]], Machine.preset(on).device
    spec = Spec(features**-0.5, causal, 1 - rate)
    seen = (length + 1) / (2 * length) if causal else 1.0
    flops = 2 * PASSES * HEADS * length**2 * features * seen
    found: dict[str, Any] = {"arithmetic ms": 1e3 * flops / device.flops_per_second("bfloat16")}
    for name, make in MAKERS.items():
        if name == "JAX's kernel" and (causal or rate):
            continue
        compiled = _compiled(on, length, features, groups, lambda *x, make=make: make(*x, causal, rate))
        module = parse(compiled.as_text())
        scheduled = schedules(module) | (dict(tune.cycles(module, spec, length).values()) if name == "ours" else {})
        cycles = estimated_cycles(with_schedules(module, scheduled))
        assert not cycles.missing, f"{cycles.missing} instructions have neither an estimate nor a schedule"
        found |= {f"{name} ms": 1e3 * cycles.total / clock, f"{name} MiB": CompiledMemory.of(compiled).temp / 2**20}
    return found


def _compiled(on: str, length: int, features: int, groups: int, fn: Callable[..., Any]) -> jax.stages.Compiled:
    """The function and its gradients, on every device of a topology for itself."""
    mesh, everywhere = Mesh(np.array(topology(on)), ("x",)), PartitionSpec()

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, everywhere))

    def both(q: Any, k: Any, v: Any, words: Any, cotangent: Any) -> Any:
        y, pull = jax.vjp(lambda *x: fn(*x, jax.random.wrap_key_data(words)), q, k, v)
        return y, pull(cotangent)

    q, k = shape(1, length, HEADS, features), shape(1, length, groups, features)
    words = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=NamedSharding(mesh, everywhere))
    each = jax.shard_map(both, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    empty()
    return jax.jit(each).lower(q, k, k, words, q).compile()


def table(rows: Sequence[Row]) -> Table:
    shown = Table("topology", "positions", "features", "keys of", "", "arithmetic", *MAKERS, "MiB", "of XLA")
    for row in rows:
        times = (f"{float(row[f'{name} ms']):.2f} ms" if row.get(f"{name} ms") else "" for name in MAKERS)
        shown.add_row(
            row["topology"],
            f"{int(row['length']):,}",
            row["features"],
            f"{row['groups']} of {HEADS} heads",
            row["form"],
            f"{float(row['arithmetic ms']):.2f} ms",
            *times,
            *(f"{float(row[f'{name} MiB']):,.0f}" for name in ("ours", "XLA")),
        )
    return shown


def verdict(rows: Sequence[Row]) -> str:
    """How much faster our kernels are."""
    said = []
    for name in list(MAKERS)[1:]:
        found = sorted(float(r[f"{name} ms"]) / float(r["ours ms"]) for r in rows if r.get(f"{name} ms"))
        if found:
            said.append(f"{found[0]:.2f} to {found[-1]:.2f} times as fast as {name}")
    return f"attention forward and backward, by schedules: {', '.join(said)}"


def main() -> None:
    parser = arguments(__doc__, TOPOLOGIES, RESULTS)
    parser.add_argument("--lengths", default="2048,4096,8192")
    options = parser.parse_args()
    shapes = [(128, HEADS), (64, HEADS), (128, 2)]
    wanted = [
        dict(zip(SETTINGS, (on, length, *shape, form), strict=True))
        for on, length in itertools.product(options.on.split(","), map(int, options.lengths.split(",")))
        for shape, form in itertools.product(shapes, FORMS)
        if shape == shapes[0] or (form == FORMS[1] and length == 4096)
    ]
    tabulate(Rows(options.out, SETTINGS, CODE), wanted, options.stale, measure, table, verdict)


if __name__ == "__main__":
    main()
