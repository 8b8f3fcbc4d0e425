"""Plans as text: the table a person wants first, and the difference of two plans."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.table import Table

from unity_jax.network.collectives import Collective
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan.leaves import ranges, rows_of
from unity_jax.plan.value import PlanValue
from unity_jax.search.searched import Searched
from unity_jax.text import WIDTH, columns, render, seconds, short_source, size

WORTH_A_LINE = 2.0  # times its lower bound that a step may take for the bound to be told
SHOWN = 16  # rows of collectives, most expensive first
SHOWN_GROUPS = 4  # of the innermost mesh axis, where the placement is told


def table(plan: PlanValue) -> str:
    """Mesh and predictions, then layouts with equal leaves on one row, then collectives, then remarks."""
    p = plan.predicted
    lines = [
        f"Plan of {plan.function} for {plan.machine}: mesh ({plan.axes}), found by {plan.label}",
        f"  step         {seconds(p.step_seconds)} = {seconds(p.compute_seconds)} compute + "
        f"{seconds(p.exposed_communication_seconds)} exposed communication",
    ]
    if p.lower_bound_seconds > 0 and p.step_seconds <= WORTH_A_LINE * p.lower_bound_seconds:
        gap = p.step_seconds / p.lower_bound_seconds - 1
        faster = "faster" if gap < 5e-5 else f"more than {gap:.2%} faster"
        form = "as rewritten" if plan.rewrites else "as written"
        lines.append(
            f"  lower bound  {seconds(p.lower_bound_seconds)}: {form}, no plan for this mesh and machine is {faster}"
        )
    if plan.searched.meshes:
        lines.append(f"  searched     {extent(plan.searched)}")
    lines.append(f"  work         {p.flops:.3g} flops per device")
    lines.append(
        f"  peak memory  {size(p.peak_bytes)} of {size(plan.memory_limit)} per device{_margin(plan)}"
        + ("" if plan.fits else "  DOES NOT FIT; largest at the peak:")
    )
    if not plan.fits:
        lines += [f"    {size(n):>12}  {name}" for name, n in plan.largest[:5]]
    if plan.order:
        lines.append(f"  placement    {placement(plan.axes)}")
    if plan.unequal:
        lines.append(f"  pace         {plan.unequal}")
    if plan.implementations:
        lines.append("  implemented  " + "\n               ".join(map(str, plan.implementations)))
    if plan.rewrites:
        lines.append("  rewritten    " + "\n               ".join(map(str, plan.rewrites)))
    for effect in dict.fromkeys(how.effect for how in plan.saving):
        lines.append(f"  {effect:12} " + ",\n               ".join(str(h) for h in plan.saving if h.effect == effect))
    if entire := [line for line in plan.searched.entire if line]:
        lines.append(f"  microbatches none: the whole batch is needed at once at {short_source(entire[0])}")
    if plan.packed:
        lines.append(f"  packed       {held(plan)}")
    text = "\n".join(lines) + "\n\n" + render(_layouts(plan)) + "\n" + render(_collectives(p.collectives))
    if plan.replicated:
        lines = [f"{_wrapped(r)}\n" for r in plan.replicated]
        text += "\nComputed in full on every device:\n" + "".join(lines)
    return text


def _margin(plan: PlanValue) -> str:
    """Of a plan that the compiler corrected."""
    if not plan.margin:
        return ""
    return f", {size(abs(plan.margin))} {'kept for what the compiler adds' if plan.margin > 0 else 'less as compiled'}"


def extent(searched: Searched) -> str:
    """`1 of 3 meshes, exactly; 5 of 32 rewritten programs`."""
    tried, every = len(searched.meshes), len(searched.meshes) + len(searched.skipped)
    meshes = f"{tried} of {every} meshes" if searched.skipped else f"{tried} mesh{'es' * (tried > 1)}"
    count = len(searched.inexact)
    how = (f"{count} of them " if count < tried else "") + "not exactly" if count else "exactly"
    if not searched.allowed:
        rewrites = "none rewritten"
    elif not searched.variants:
        rewrites = "no rewrite was worth a plan"
    else:
        ended = ", where the budget ended" if searched.out_of_budget else ""
        rewrites = f"{searched.variants} of {searched.allowed} rewritten programs{ended}"
    best = f"; the best of {searched.compiled} as compiled" if searched.compiled > 1 else "; compiled"
    compiled = best if searched.compiled else ""
    return f"{meshes}, {how}; {rewrites}{compiled}"


def _wrapped(line: str) -> str:
    return textwrap.fill(
        line,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def sweep(plans: Sequence[PlanValue], grows: bool) -> str:
    """Plans of one function for several numbers of devices or memory limits, one a row.

    **Arguments:** `grows`: whether the work is so much for each device (weak scaling), and not the same for all plans.
    **Returns:** `efficiency` is the work done per second and device, over that of the first plan; `!` marks a plan that
    needs more memory than there is.
    """
    limited = len({plan.memory_limit for plan in plans}) > 1
    names = ("devices", *["limit"] * limited, "mesh", "found by", "step", "exposed", "memory", "efficiency")
    rows = columns(*names, *["saves memory"] * limited, right=range(3 + limited, 7 + limited))
    first = plans[0]
    for plan in plans:
        p, spread = plan.predicted, 1 if grows else plan.axes.num_devices / first.axes.num_devices
        saves = ", ".join(dict.fromkeys(how.name for how in plan.saving if how.effect == "saves memory"))
        rows.add_row(
            str(plan.axes.num_devices),
            *[size(plan.memory_limit)] * limited,
            str(plan.axes),
            plan.label,
            seconds(p.step_seconds),
            seconds(p.exposed_communication_seconds),
            size(p.peak_bytes) + "!" * (not plan.fits),
            f"{first.predicted.step_seconds / p.step_seconds / spread if p.step_seconds else 1.0:.0%}",
            *[saves] * limited,
        )
    machines = ", ".join(dict.fromkeys(plan.machine for plan in plans))
    return f"Plans of {first.function} for {machines}\n\n{render(rows)}"


def held(plan: PlanValue) -> str:
    """How much of the arguments is held packed from step to step."""
    count = sum(len(p.inputs) for p in plan.packed)
    nbytes = sum(plan.inputs[i].bytes for p in plan.packed for i in p.inputs)
    return f"{count} arguments ({size(nbytes)} per device) are held as {len(plan.packed)} arrays from step to step"


def compare(plan: PlanValue, other: PlanValue) -> str:
    """Predictions side by side, then the leaves whose layouts differ."""
    a, b = plan.predicted, other.predicted
    rows = columns("", "this plan", "other plan")
    rows.add_row("mesh", str(plan.axes), str(other.axes))
    if plan.order or other.order:
        rows.add_row("placement", placement(plan.axes), placement(other.axes))
    rows.add_row("machine", plan.machine, other.machine)
    rows.add_row("found by", plan.label, other.label)
    rows.add_row("step", seconds(a.step_seconds), seconds(b.step_seconds))
    rows.add_row("compute", seconds(a.compute_seconds), seconds(b.compute_seconds))
    rows.add_row(
        "exposed communication", seconds(a.exposed_communication_seconds), seconds(b.exposed_communication_seconds)
    )
    rows.add_row("peak memory", size(a.peak_bytes), size(b.peak_bytes))
    if plan.packed != other.packed:
        rows.add_row("packed", *(held(x) if x.packed else "nothing" for x in (plan, other)))
    ours, theirs = ({leaf.path: str(leaf) for leaf in x.inputs} for x in (plan, other))
    cells = {path: (ours.get(path, "missing"), theirs.get(path, "missing")) for path in [*ours, *theirs]}
    for row in rows_of(((path, c, 0) for path, c in cells.items() if c[0] != c[1]), 2):
        rows.add_row(row.name, *row.cells)
    return render(rows)


def placement(axes: MeshAxes) -> str:
    """Network positions in mesh order, the groups of the innermost axis apart: `0..3 | 5,4,7,6`."""
    order, inner = list(axes.order or range(axes.num_devices)), axes.sizes[-1]
    groups = [ranges(order[i : i + inner]) for i in range(0, len(order), inner)]
    rest = len(groups) - SHOWN_GROUPS
    return " | ".join(groups[:SHOWN_GROUPS]) + (f" | {rest} more" if rest > 0 else "")


# Layouts


def _layouts(plan: PlanValue) -> Table:
    rows = columns("argument", "leaves", "type and layout", "per device", right=(1, 3), title="Layouts")
    leaves = ((leaf.path, (str(leaf),), leaf.bytes) for leaf in plan.inputs)
    whole = [leaf.path for leaf in plan.inputs if leaf.layout.is_replicated and not leaf.on_host]
    for row in rows_of(leaves, 1, whole):
        rows.add_row(row.name, str(row.count), row.cells[0], size(row.bytes))
    return rows


# Collectives


def _collectives(found: Sequence[Collective]) -> Table:
    """Collectives of one kind for one line are one row, in order of total time."""
    groups: dict[tuple[str, str, tuple[str, ...], int, str], list[Collective]] = {}
    for c in found:
        groups.setdefault((c.kind, c.of, c.axes, c.trips, short_source(c.source)), []).append(c)
    totals = sorted(((_total(cs), key) for key, cs in groups.items()), key=lambda t: -t[0][2])
    rows = columns(
        "collective", "axes", "count", "bytes", "time", "serves", right=(2, 3, 4), title="Collectives in one step"
    )
    for (count, nbytes, time), (kind, of, axes, trips, source) in totals[:SHOWN]:
        times = f"{count} x {trips}" if trips > 1 else str(count)
        name = f"{kind} ({of})" if of else kind  # a permute of a decomposed collective
        rows.add_row(name.replace("_", "-"), ",".join(axes), times, size(nbytes), seconds(time), source)
    if len(totals) > SHOWN:
        count, nbytes, time = (sum(t[0][i] for t in totals[SHOWN:]) for i in range(3))
        rows.add_row(f"{len(totals) - SHOWN} more rows", "", str(count), size(nbytes), seconds(time), "")
    rows.add_section()
    count, nbytes, time = _total(found)
    rows.add_row("total", "", str(count), size(nbytes), seconds(time), "")
    return rows


def _total(found: Iterable[Collective]) -> tuple[int, int, float]:
    """Places in the program, bytes and seconds of one step."""
    cs = list(found)
    return (
        sum(c.count for c in cs),
        sum(c.count * c.trips * c.bytes for c in cs),
        sum(c.count * c.trips * c.seconds for c in cs),
    )
