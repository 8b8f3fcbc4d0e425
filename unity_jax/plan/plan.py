"""The plan: an immutable value that can be read, compared, explained, verified, saved and run."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from unity_jax.plan import explain, file, memory, page, table, trace_events, verify
from unity_jax.plan.value import PlanValue


class Plan(PlanValue):
    """How one function runs on one mesh. Made by `unity_jax.plan` or `auto_shard(f).plan(...)`; deterministic.

    What it says is in the fields of `PlanValue`; `print` shows the table of it. Plans are equal if their files are.
    """

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Plan) and self._text == other._text)

    def __hash__(self) -> int:
        return hash(self._text)

    @functools.cached_property
    def _text(self) -> str:
        return file.to_text(self)

    def __str__(self) -> str:
        return table.table(self)

    def compare(self, other: Plan) -> str:
        """What differs between two plans of one function: predictions, then every leaf whose layout differs."""
        return table.compare(self, other)

    def explain(self, pattern: str = "*") -> str:
        """Why matching leaves and ops are laid out as they are.

        **Arguments:** `pattern`: part of an argument path, of an op's scope or of its `file:line`; `*` and `?` match
        as in a shell.
        **Returns:** for each matching leaf the layouts that were rejected and what each would cost, and for each
        matching op its rule, its strategy and the collectives around it, with lines.
        **Raises:** `ValueError` if nothing matches, `PlanError` for a loaded plan that has not met its function.
        """
        return explain.explain(self, pattern)

    def verify(self, topology: str) -> verify.Verification:
        """Compile for a machine that is not there, and compare what was predicted with what came out: collectives,
        memory and, on TPU, the compiler's own estimate of compute. Of gathers, scatters and sorts it has none: there
        their schedules count, if libtpu is loaded inside `unity_jax.aot.bundles.written()`.

        **Arguments:** `topology`: `"v5e:2x4"` (needs the extra `tpu-aot`) or `"h100:8"` (`gpu-aot`), of as many devices
        as the plan's mesh has.
        **Raises:** `ValueError` for another topology, `ImportError` without the extra, `PlanError` for a loaded plan
        that has not met its function.
        """
        return verify.verify(self, topology)

    def memory(self) -> memory.MemoryProfile:
        """What is in the memory of a device over the step: by the kind of data, and by the lines that make it.

        Raises `PlanError` for a loaded plan that has not met its function.
        """
        return memory.memory(self)

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline as a trace for https://ui.perfetto.dev or `chrome://tracing`.

        Raises `PlanError` for a loaded plan that has not met its function.
        """
        machine = self.priced_on
        found = self.timeline()
        assert machine is not None
        Path(path).write_text(json.dumps(trace_events.trace(found, machine)) + "\n")

    def to_html(self, path: str | Path) -> None:
        """Write one page with the plan's tables, its timeline as a picture, and the planned program; of a loaded plan
        that has not met its function with the tables alone."""
        Path(path).write_text(page.page(self), encoding="utf-8")

    def save(self, path: str | Path) -> None:
        """Write the plan as versioned JSON, for `load`."""
        file.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan. It runs with `auto_shard(step, plan=plan)`.

        Raises `PlanError` for a file that is missing, damaged, or of another version.
        """
        return file.load(Path(path), cls)
