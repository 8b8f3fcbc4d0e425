"""Predicted against compiled: a plan compiled by the real XLA:TPU or XLA:GPU compiler for a machine that is not there.

>>> print(plan.verify("v5e:2x4"))
train_step compiled for v5e:2x4: mesh (x=2, y=4)
  lowered  50 collectives, exactly as planned
  memory   588.4 MiB per device, 0.97x the predicted 606 MiB, within the limit of 14.9 GiB
           = 488 MiB arguments + 484 MiB results - 484 MiB in place + 100.4 MiB temporaries
  compute  4.61 ms by the compiler's own estimate, 1.03x the predicted 4.5 ms
           = 6.92e+06 cycles at 1.5 GHz of 91 instructions; 15 more have no estimate
  rewrites padded (14), shares realigned by permutes (14), combined (2), reduce-scatter as all-reduce and slice (1)
...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from unity_jax.lower.compile import lower
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan import Plan
from unity_jax.planning import mesh_over
from unity_jax.report.account import account
from unity_jax.report.aot import compiled_for, topology
from unity_jax.report.bundles import empty, schedules, with_schedules
from unity_jax.report.collectives import Collective, bytes_difference, count_difference, stablehlo_collectives
from unity_jax.report.cycles import CLOCKS, estimated_cycles
from unity_jax.report.duplicates import duplicates
from unity_jax.report.hlo import parse
from unity_jax.report.sites import module_collectives
from unity_jax.report.verification import Compiled, CompiledMemory, Verification


def verify(plan: Plan, name: str) -> Verification:
    """Compile a plan for a topology (`report.aot.topology`) and compare.

    **Raises:** `PlanError` for a loaded plan that has not met its function, `ValueError` for an unknown topology or one
    with another number of devices, `ImportError` without the compiler's extra.
    """
    plan.bound()
    devices = topology(name)
    if len(devices) != plan.axes.num_devices:
        raise ValueError(
            f"topology {name!r} has {len(devices)} devices, the plan's mesh ({plan.axes}) has "
            f"{plan.axes.num_devices}: plan for machine={name!r}, or name a topology of that many"
        )
    return verify_on(plan, name, devices)


def verify_on(plan: Plan, name: str, devices: Sequence[Any]) -> Verification:
    """Compile a plan for these devices, which are there or not, and compare; `name` says which they are."""
    axes = MeshAxes.of(plan.mesh)
    assert plan.stored is not None
    lowered = lower(plan.stored, plan.pcg, mesh_over(plan, devices))
    stablehlo = lowered.compiler_ir("stablehlo")
    planned = _untimed(plan)
    found = tuple(stablehlo_collectives(stablehlo, axes))
    compiled, failure = None, ""
    empty()
    try:
        program = compiled_for(lowered, devices[0].platform)
        compiled = _compiled(program, plan, axes, duplicates(stablehlo, axes), CLOCKS.get(name.partition(":")[0]))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        failure = str(error).splitlines()[0]
    return Verification(
        function=plan.function,
        topology=name,
        mesh=plan.axes,
        memory_limit=plan.memory_limit,
        predicted=plan.predicted,
        planned=planned,
        lowered=found,
        differences=tuple(count_difference(planned, found)),
        compiled=compiled,
        failure=failure,
    )


def _untimed(plan: Plan) -> tuple[Collective, ...]:
    return tuple(Collective(c.kind, c.axes, c.bytes, c.count) for c in plan.predicted.collectives)


def _compiled(
    program: jax.stages.Compiled, plan: Plan, axes: MeshAxes, repeated: list[Collective], clock: float | None
) -> Compiled:
    module, planned = parse(program.as_text()), _untimed(plan)
    found = tuple(module_collectives(module, axes))
    runs = [(c, p.trips) for c, p in zip(planned, plan.predicted.collectives, strict=True)]
    cycles = estimated_cycles(with_schedules(module, schedules(module))) if clock else None
    return Compiled(
        collectives=found,
        differences=tuple(bytes_difference(planned, found)),
        account=account(runs, module, axes, repeated),
        memory=CompiledMemory.of(program),
        cycles=cycles,
        seconds=cycles.total / clock if cycles and clock else None,
    )
