"""Predicted against compiled: a plan compiled by the real XLA:TPU or XLA:GPU compiler for a machine that is not there.

    print(plan.verify("v5e:2x4"))
    train_step compiled for v5e:2x4: mesh (x=2, y=4)
      lowered  50 collectives, exactly as planned
      memory   588.4 MiB per device, 0.97x the predicted 606 MiB, within the limit of 15.8 GiB
           = 488 MiB arguments + 484 MiB results - 484 MiB in place + 100.4 MiB temporaries
      compute  4.61 ms by the compiler's own estimate, 1.03x the predicted 4.5 ms
           = 6.92e+06 cycles at 1.5 GHz of 91 instructions; 15 more have no estimate
      rewrites padded (14), shares realigned by permutes (14), combined (2), reduce-scatter as all-reduce and slice (1)
    ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from unity_jax.aot.account import Account
from unity_jax.aot.bundles import empty
from unity_jax.aot.collectives import Collective, count_difference, stablehlo_collectives
from unity_jax.aot.compiled import Compiled
from unity_jax.aot.cycles import CLOCKS, Cycles
from unity_jax.aot.duplicates import duplicates
from unity_jax.aot.host import copies_difference
from unity_jax.aot.topologies import compiled_for, topology
from unity_jax.lower.compile import lower
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan.devices import mesh_over
from unity_jax.plan.value import PlanValue, Predicted
from unity_jax.text import columns, render, seconds, size

SHOWN = 8  # unexplained differences


@dataclass(frozen=True)
class Verification:
    """A plan against its program, as lowered and as compiled for a topology; prints as a table.

    **Fields:** `function`, `topology`, `mesh`, `memory_limit` and `predicted` as in the plan; `planned` and `lowered`:
    the collectives of the plan and of the StableHLO, and `differences` between the two, copies from the host and to it
    included (none, or unity_jax has a bug);
    `compiled`: what came out of the compiler, None if it ran out of memory; `failure`: its words then.
    """

    function: str
    topology: str
    mesh: MeshAxes
    memory_limit: float
    predicted: Predicted
    planned: tuple[Collective, ...]
    lowered: tuple[Collective, ...]
    differences: tuple[str, ...]
    compiled: Compiled | None
    failure: str

    @property
    def fits(self) -> bool:
        """Whether it compiles, to a program within the memory limit."""
        return self.compiled is not None and self.compiled.memory.peak <= self.memory_limit

    @property
    def ok(self) -> bool:
        """Whether it fits and has exactly the planned collectives when the compiler gets it."""
        return self.fits and not self.differences

    def __str__(self) -> str:
        return _text(self)


def verify(plan: PlanValue, name: str) -> Verification:
    """Compile a plan for a topology (`aot.topologies.topology`) and compare.

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


def verify_on(plan: PlanValue, name: str, devices: Sequence[Any]) -> Verification:
    """Compile a plan for these devices, which are there or not, as many as its mesh has, and compare; `name` says which
    they are. Raises what the compiler raises, but where it runs out of memory: that is a verdict."""
    axes = MeshAxes.of(plan.mesh)
    assert plan.stored is not None
    lowered = lower(plan.stored, plan.pcg, mesh_over(plan, devices))
    stablehlo: Any = lowered.compiler_ir("stablehlo")
    planned = _untimed(plan)
    found = tuple(stablehlo_collectives(stablehlo, axes))
    copies = copies_difference(plan.pcg, stablehlo, axes) if devices[0].platform != "cpu" else ()
    compiled, failure = None, ""
    empty()
    try:
        program = compiled_for(lowered, devices[0].platform)
        runs = [(c, p.trips) for c, p in zip(planned, plan.predicted.collectives, strict=True)]
        clock = CLOCKS.get(name.partition(":")[0])
        compiled = Compiled.of(program, runs, axes, duplicates(stablehlo, axes), clock)
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
        differences=(*count_difference(planned, found), *copies),
        compiled=compiled,
        failure=failure,
    )


def _untimed(plan: PlanValue) -> tuple[Collective, ...]:
    return tuple(Collective(c.kind, c.axes, c.bytes, c.count) for c in plan.predicted.collectives)


# Its text


def _text(v: Verification) -> str:
    lines = [f"{v.function} compiled for {v.topology}: mesh ({v.mesh})", f"  lowered  {_lowered(v)}"]
    lines += [f"    {line}" for line in v.differences]
    lines.append(f"  memory   {_memory(v)}")
    if v.compiled and v.compiled.cycles is not None and v.compiled.seconds is not None:
        lines.append(f"  compute  {_compute(v.compiled.cycles, v.compiled.seconds, v.predicted.compute_seconds)}")
    if v.compiled:
        lines += _account(v.compiled.account)
    return "\n".join(lines) + "\n\n" + _collectives(v)


def _account(found: Account) -> Iterator[str]:
    names = ", ".join(f"{name} ({n})" for name, n in found.rewrites.most_common())
    yield f"  rewrites {names or 'none'}"
    if found.unexplained:
        yield f"    and {len(found.unexplained)} differences that no known rewrite explains:"
        yield from (f"    {line}" for line in found.unexplained[:SHOWN])


def _lowered(v: Verification) -> str:
    count = sum(c.count for c in v.lowered)
    if not v.differences:
        return f"{count} collectives, exactly as planned"
    return f"{count} collectives, NOT as planned (please report this):"


def _memory(v: Verification) -> str:
    predicted, limit = v.predicted.peak_bytes, f"the limit of {size(v.memory_limit)}"
    if v.compiled is None:
        return f"OUT OF MEMORY in the compiler; predicted {size(predicted)}, {limit}: {v.failure}"
    m = v.compiled.memory
    return (
        f"{size(m.peak)} per device, {_ratio(m.peak, predicted)} the predicted {size(predicted)}, "
        f"{'within' if v.fits else 'DOES NOT FIT'} {limit}\n           "
        f"= {size(m.argument)} arguments + {size(m.output)} results - {size(m.alias)} in place + {size(m.temp)} "
        f"temporaries" + (f"; {size(m.host)} on the host" if m.host else "")
    )


def _compute(cycles: Cycles, took: float, predicted: float) -> str:
    text = (
        f"{seconds(took)} by the compiler's own estimate, {_ratio(took, predicted)} the predicted {seconds(predicted)}"
        f"\n           = {cycles.total:.3g} cycles at {cycles.total / took / 1e9:.3g} GHz of {cycles.counted} "
        f"instructions; {cycles.missing} more have no estimate"
        if took
        else "the compiler gives no estimate"
    )
    return text + (f"; {cycles.endless} loops of unknown length count once" if cycles.endless else "")


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}x" if predicted else "against"


def _collectives(v: Verification) -> str:
    """A row for each kind and axes, in bytes."""
    titled = "Collectives in the program, loop bodies once"
    rows = columns("collective", "axes", "planned", "bytes", "compiled", "bytes", "", right=(2, 3, 4, 5), title=titled)
    ours, theirs = _totals(v.planned), _totals(v.compiled.collectives if v.compiled else ())
    for key in sorted(ours.keys() | theirs.keys()):
        kind, axes = key
        cells = [*_cells(ours.get(key)), *_cells(theirs.get(key))] if v.compiled else [*_cells(ours.get(key)), "", ""]
        same = ours.get(key, (0, 0))[1] == theirs.get(key, (0, 0))[1]
        rows.add_row(kind.replace("_", "-"), ",".join(axes), *cells, "" if same or not v.compiled else "differs")
    return render(rows)


def _cells(total: tuple[int, int] | None) -> tuple[str, str]:
    return (str(total[0]), size(total[1])) if total else ("0", "")


def _totals(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """Count and bytes by kind and axes."""
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for c in found:
        count, total = totals.get((c.kind, c.axes), (0, 0))
        totals[c.kind, c.axes] = (count + c.count, total + c.count * c.bytes)
    return totals
