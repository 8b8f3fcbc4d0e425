"""What a compiler makes of a step on one device that is not there: the user's own, and that of a plan.

    with written():                                                # libtpu is loaded in here
        milliseconds(plain(step, shapes, "v5e:2x4"), "v5e:2x4")    # 2.916
        milliseconds(planned(plan, "v5e:2x4"), "v5e:2x4")          # 1.944

Of XLA:TPU the cycles that it estimates, and where it gives none the length of the schedules that libtpu writes
(`unity_jax.aot.bundles`): what such a kernel waits for memory is not in it. Of XLA:GPU the roofline of each kernel, for
an H100 (`experiments/validation/judge/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.validation.judge import judge
from unity_jax.aot.bundles import empty, schedules, with_schedules
from unity_jax.aot.cycles import CLOCKS, estimated_cycles
from unity_jax.aot.hlo import parse
from unity_jax.aot.topologies import compiled_for, topology
from unity_jax.lower.compile import lower
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.candidate import Candidate

ONE = MeshAxes(("x",), (1,))


def plain(step: Callable[..., Any], shapes: Sequence[Any], on: str, donated: Sequence[int] = ()) -> jax.stages.Lowered:
    """A step under `jax.jit` alone, for the first device of a topology."""
    here = NamedSharding(_first(on), PartitionSpec())
    given = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=here), shapes)
    return jax.jit(step, donate_argnums=donated).lower(*given)


def planned(plan: Candidate, on: str) -> jax.stages.Lowered:
    """The program of a plan for one device."""
    return lower(plan.program, plan.graph, _first(on))


def milliseconds(lowered: jax.stages.Lowered, on: str) -> float:
    """Of one step. Raises `AssertionError` where a TPU's instruction has neither an estimate nor a schedule."""
    kind = on.partition(":")[0]
    empty()
    module = parse(compiled_for(lowered, "tpu" if kind in CLOCKS else "gpu").as_text() or "")
    if kind not in CLOCKS:
        return 1e3 * judge(module, on)
    cycles = estimated_cycles(with_schedules(module, schedules(module)))
    assert not cycles.missing, f"{cycles.missing} instructions have neither an estimate nor a schedule"
    return 1e3 * cycles.total / CLOCKS[kind]


def _first(on: str) -> Mesh:
    return Mesh(np.array(topology(on)[:1]), ONE.names)
