"""A timeline as trace events: one row per stream, for https://ui.perfetto.dev or `chrome://tracing`.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from typing import Any

from unity_jax.cost.tasks import COLLECTIVES, Task
from unity_jax.cost.timeline import Timeline
from unity_jax.machine.contention import STREAMS
from unity_jax.machine.machine import Machine

_PROCESS = 1


def trace(timeline: Timeline, machine: Machine) -> dict[str, Any]:
    """The JSON value of a trace: complete events in microseconds, with bytes, mesh axes and the user's line."""
    rows: dict[str, int] = {name.replace("_", " "): i for i, name in enumerate(STREAMS) if i != COLLECTIVES}
    events: list[dict[str, Any]] = []
    for task, start, end in zip(timeline.tasks, timeline.starts, timeline.ends, strict=True):
        if end > start:
            row = rows.setdefault(_row(task, machine), len(STREAMS) + len(rows))
            events.append(
                {
                    "name": task.name,
                    "ph": "X",
                    "pid": _PROCESS,
                    "tid": row,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": _details(task),
                }
            )
    used = {event["tid"] for event in events}
    names = [_name("process_name", 0, f"one device of {machine.name}")]
    names += [_name("thread_name", row, name) for name, row in rows.items() if row in used]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _row(task: Task, machine: Machine) -> str:
    """`compute`, or `collectives on levels 0, 1`, the outermost level of the network first."""
    if task.stream != COLLECTIVES:
        return STREAMS[task.stream].replace("_", " ")
    crossed = [str(i) for i in range(machine.num_levels) if task.levels >> i & 1]
    return f"collectives on network level{'s' * (len(crossed) > 1)} {', '.join(crossed)}"


def _details(task: Task) -> dict[str, Any]:
    details: dict[str, Any] = {"source": task.source}
    if not task.body:
        details["microseconds alone"] = task.seconds * 1e6
    if task.collective is not None:
        details |= {"bytes": task.collective.bytes, "axes": ",".join(task.collective.axes)}
        details["serves"] = task.op.label if task.op is not None else "output"
    return details


def _name(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": row, "args": {"name": name}}
