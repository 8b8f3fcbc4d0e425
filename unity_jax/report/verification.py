"""What `Plan.verify` returns: a plan beside its program, as lowered and as compiled, and the table of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax

from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan import Predicted
from unity_jax.report.account import Account
from unity_jax.report.collectives import Collective
from unity_jax.report.cycles import Cycles
from unity_jax.report.text import columns, render, seconds, size

SHOWN = 8  # unexplained differences


@dataclass(frozen=True)
class CompiledMemory:
    """The compiler's own account, bytes per device: arguments, results, temporaries, results that reuse arguments
    (counted in both), and what it keeps on the host."""

    argument: int
    output: int
    temp: int
    alias: int
    host: int

    @staticmethod
    def of(program: jax.stages.Compiled) -> CompiledMemory:
        memory = program.memory_analysis()
        sizes = (getattr(memory, f"{of}_size_in_bytes") for of in ("argument", "output", "temp", "alias", "host_temp"))
        return CompiledMemory(*sizes)

    @property
    def peak(self) -> int:
        return self.argument + self.output + self.temp - self.alias


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of the program.

    **Fields:** `collectives`; `differences`: one line for each kind and axes whose total bytes are not the planned
    ones; `account`: the rewrites that make up the difference, and what none of them explains; `memory`; `cycles` of
    compute and `seconds` they take, by XLA:TPU's own estimate (None on other platforms).
    """

    collectives: tuple[Collective, ...]
    differences: tuple[str, ...]
    account: Account
    memory: CompiledMemory
    cycles: Cycles | None
    seconds: float | None


@dataclass(frozen=True)
class Verification:
    """A plan against its program, as lowered and as compiled for a topology; prints as a table.

    **Fields:** `function`, `topology`, `mesh`, `memory_limit` and `predicted` as in the plan; `planned` and `lowered`:
    the collectives of the plan and of the StableHLO, and `differences` between the two (none, or unity_jax has a bug);
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


# Text


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
