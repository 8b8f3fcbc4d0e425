"""What is in the memory of a device over one step, by the kind of data and by the user's lines.

    print(plan.memory())
    Memory of train_step on each device: 9.31 GiB of 74.5 GiB at its peak, at models/bert.py:145 (Encoder.__call__)

      at the peak                           bytes   part
     ─────────────────────────────────────────────────────
      kept for the backward pass         5.21 GiB  56.0 %
      optimizer and other state          2.51 GiB  27.0 %
      ...

Kinds of data as in TBD (https://arxiv.org/abs/1803.06905, section 3.4.3), who found that what is kept for the backward
pass takes most of the memory of training. When each value is there is what the plan's memory is predicted from: the
program as the compiler of the machine shapes and schedules it (`xla`).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from unity_jax.cost.memory import held, scheduled
from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.pcg.loops import Scan
from unity_jax.pcg.parallel import SPILLED
from unity_jax.plan.value import PlanValue
from unity_jax.program import Program
from unity_jax.residuals.pair import loops
from unity_jax.residuals.record import Offload, Spill
from unity_jax.text import columns, render, short_source, size
from unity_jax.xla.buffer_assignment import live_ranges
from unity_jax.xla.module import Buffer, Module
from unity_jax.xla.traffic import Traffic

WEIGHTS = "weights"
STATE = "optimizer and other state"
ARGUMENTS = "other arguments"
RESULTS = "results"
KEPT = "kept for the backward pass"
AGAIN = "computed again for it"
GRADIENTS = "gradients"
GATHERED = "results of collectives"
WORKSPACE = "workspace"
GAPS = "between buffers"
KINDS = (WEIGHTS, STATE, ARGUMENTS, RESULTS, KEPT, AGAIN, GRADIENTS, GATHERED, WORKSPACE, GAPS)
"""What is in memory, in the order in which a picture stacks it. The first four are there all the time; gradients are
what the update reads of the backward pass, and what loops that run both passes add up, workspace is what is left;
compilers leave gaps between buffers."""

LINES = 12
"""Lines of the user that are told, those with most bytes first."""

Bytes = Mapping[str, int]


@dataclass(frozen=True)
class MemoryProfile:
    """What is in memory on each device.

    **Fields:** `function`; `limit` and `peak_bytes`, per device; `kinds`: bytes at the peak, by kind (`KINDS`);
    `lines`: of these, by the user's line that made them (of arguments, by name), with the kind, most first;
    `over_step`: from when on, in seconds (each instruction takes the part of the step that it takes of all), how many
    bytes of each kind are there; `peak_at`: the line that runs at the peak; `on_host`: bytes of state and of
    activations that the host holds for the device, which are none of these.
    """

    function: str
    limit: float
    peak_bytes: int
    kinds: Bytes
    lines: tuple[tuple[str, str, int], ...]
    over_step: tuple[tuple[float, Bytes], ...]
    peak_at: str
    on_host: int = 0

    def __str__(self) -> str:
        at = f", at {short_source(self.peak_at)}" if self.peak_at else ""
        peak = f"{size(self.peak_bytes)} of {size(self.limit)} at its peak{at}"
        peak += f"; {size(self.on_host)} on the host" if self.on_host else ""
        kinds = columns("at the peak", "bytes", "part", right=(1, 2))
        for kind, n in sorted(self.kinds.items(), key=lambda item: -item[1]):
            kinds.add_row(kind, size(n), f"{n / self.peak_bytes:.1%}")
        lines = columns("by line or argument", "what", "bytes", right=(2,))
        for where, kind, n in self.lines[:LINES]:
            lines.add_row(where or "(no line)", kind, size(n))
        rest = sum(n for *_, n in self.lines[LINES:])
        if rest:
            lines.add_row(f"{len(self.lines) - LINES} more", "", size(rest))
        return f"Memory of {self.function} on each device: {peak}\n\n{render(kinds)}\n{render(lines)}"


def memory(plan: PlanValue) -> MemoryProfile:
    """What is in memory while a plan runs. Raises `PlanError` for a loaded plan that has not met its function."""
    plan.bound()
    program, graph, machine, said = plan.stored, plan.pcg, plan.priced_on, plan.predicted
    assert program is not None and machine is not None
    module = scheduled(graph, Traffic.of(graph, machine.device.compiler), plan.axes, machine)
    forward = frozenset(id(op.eqn) for op in graph.walk() if op.eqn is not None and not op.backward)
    moments = list(_moments(module, forward))
    busiest = max(moments, key=lambda m: m.kinds.total(), default=_Moment())
    lines, always = Counter(busiest.lines), Counter[str]()
    arguments = _arguments(program, graph)
    for t, n in held(graph, module.storage, program.donated).items():
        source = graph.producer[t].source if t in graph.producer else t.name or ""
        always[arguments.get(t, RESULTS)] += round(n)
        lines[short_source(source), arguments.get(t, RESULTS)] += round(n)
    at_peak = always + busiest.kinds
    at_peak[GAPS] += max(0, said.peak_bytes - at_peak.total())
    scale = said.step_seconds / max(sum(m.seconds for m in moments), 1e-12)
    starts = itertools.accumulate((scale * m.seconds for m in moments), initial=0.0)
    return MemoryProfile(
        function=plan.function,
        limit=plan.memory_limit,
        peak_bytes=said.peak_bytes,
        kinds=_in_order(at_peak),
        lines=tuple((*where, n) for where, n in sorted(lines.items(), key=lambda item: (-item[1], item[0])) if n),
        over_step=tuple((at, _in_order(always + m.kinds)) for at, m in zip(starts, [*moments, _Moment()], strict=True)),
        peak_at=busiest.source,
        on_host=sum(how.bytes for how in plan.saving if isinstance(how, Offload | Spill)),
    )


def _in_order(found: Mapping[str, int]) -> Bytes:
    return {kind: found[kind] for kind in KINDS if found.get(kind)}


def _arguments(program: Program, graph: Graph) -> dict[Tensor, str]:
    """The kinds of arguments. Weights are what the forward pass reads of what a step replaces."""
    state = {graph.inputs[i] for i in program.ties.values()}
    early = {t for op in graph.ops if not op.backward for t in op.inputs}
    return {t: ARGUMENTS if t not in state else WEIGHTS if t in early else STATE for t in graph.inputs}


@dataclass(frozen=True)
class _Moment:
    """What is live while an instruction runs, arguments and results aside.

    **Fields:** `seconds` that it runs, and for which line; bytes by `kinds`; `lines`: by line and kind, if there are
    more bytes than there were before.
    """

    seconds: float = 0.0
    source: str = ""
    kinds: Counter[str] = field(default_factory=Counter)
    lines: Counter[tuple[str, str]] = field(default_factory=Counter)


def _moments(module: Module, forward: Set[int]) -> Iterator[_Moment]:
    """What is live while each instruction runs; while a loop or a branch does, with what is live at the peak of its
    bodies.

    **Arguments:** `forward`: the equations of the forward pass, by identity.
    """
    ranges, buffers = live_ranges(module)
    known = _kinds(module, forward)
    live, kinds, most = dict[Buffer, None](), Counter[str](), -1

    def change(come: Iterable[int], gone: Iterable[int]) -> None:
        for sign, which in ((-1, gone), (1, come)):
            for b in (buffers[n] for n in which):
                kinds[known[b][1]] += sign * b.temporary
                live.update({b: None}) if sign > 0 else live.pop(b, None)

    for instruction, (come, gone, instead) in zip(module.schedule, ranges.changes(), strict=True):
        change(come, ())
        kernel = instruction.kernel
        source = kernel.root.source if kernel is not None else ""
        bodies = (m for body in instruction.bodies for m in _moments(body, forward))
        inner = max(bodies, key=lambda m: m.kinds.total(), default=_Moment(source=source))
        now = kinds + inner.kinds
        now[WORKSPACE] += round(instruction.workspace)
        lines = Counter[tuple[str, str]]()
        if now.total() > most:
            most, lines = now.total(), Counter(inner.lines)
            lines[short_source(source), WORKSPACE] += round(instruction.workspace)
            for b in live:
                lines[known[b]] += b.temporary
        seconds = instruction.seconds or 1e-6 * instruction.cost
        yield _Moment(seconds, inner.source or source, now, lines)
        change(instead, gone)


def _kinds(module: Module, forward: Set[int]) -> dict[Buffer, tuple[str, str]]:
    """The line that makes each buffer, and of what kind it is."""
    readers, makers = defaultdict[Buffer, list[Op]](list), dict[Buffer, Op | None]()
    producer = {t: op for op in module.graph.walk() for t in op.outputs}
    for i in module.schedule:
        for b in (*i.reads, *i.makes):
            makers.setdefault(b, producer.get(b.tensor))
        if i.kernel is not None:
            makers.update(dict.fromkeys(i.makes, i.kernel.root))
            for b in i.reads:
                readers[b].append(i.kernel.root)
    added, found = _added_up(module.graph), dict[Buffer, tuple[str, str]]()
    for b, op in makers.items():
        loop = added.get(b.tensor)
        if loop is not None:
            found[b] = short_source(loop.source), GRADIENTS
        else:
            kind = WORKSPACE if op is None else _kind(op, readers[b], forward, module.looped)
            found[b] = short_source(op.source) if op is not None else "", kind
    return found


def _added_up(graph: Graph) -> dict[Tensor, Op]:
    """What loops add up that run forward and backward in each iteration (of microbatches, of chunks of a loss), before
    them and after, and which loop does."""
    found = dict[Tensor, Op]()
    for op in loops(graph):
        roles = Scan.of(op.params)
        found.update(dict.fromkeys((*op.inputs[roles.carried], *op.outputs[roles.last]), op))
    return found


def _kind(op: Op, readers: Sequence[Op], forward: Set[int], looped: bool) -> str:
    """The kind of what a kernel makes, in a loop or not, by its last op and those of the kernels that read it. The ops
    that update weights are those of the second half of a step that are no transposed ones, and are in no loop."""
    if op.name == "from_host":
        return KEPT if SPILLED in op.params else STATE
    if not op.backward:
        kept = op.move is None and any(reader.backward for reader in readers)
        return KEPT if kept else WORKSPACE if op.move is None else GATHERED
    if id(op.eqn) in forward or "rematted_computation" in op.scope:
        return AGAIN
    updates = (reader.eqn is not None and "transpose(" not in reader.scope for reader in readers)
    if not looped and ("transpose(" in op.scope or op.move is not None) and any(updates):
        return GRADIENTS
    return WORKSPACE if op.move is None else GATHERED
