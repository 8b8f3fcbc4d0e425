"""Tables that are made row by row and go on where they stopped: a CSV file of them.

    rows = Rows(Path("sweep.csv"), settings=("model", "devices"))
    rows.make({"model": "gpt", "devices": 8}, lambda: measure(8))       # not again if the file has such a row
    rows.make_all(rows.missing(wanted), measure, "{devices} devices")                              # with progress

Each row says which version of the code made it (`experiments/made_by.py`). One that another version made is stale: the
pages say so, and a script with `--stale` makes it again.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.made_by import COMPILED, made_by
from unity_jax.planning import alone

Row = Mapping[str, str]

MADE_BY = "made by"
"""The column with the version of the code."""


@dataclass(frozen=True)
class Rows:
    """The rows of a file.

    **Fields:** `settings`: the columns that say what a row is about; the others are results; `code`: folders and files
    whose code the results follow from, or what tells the version that a row follows from.
    """

    path: Path
    settings: tuple[str, ...]
    code: tuple[str, ...] | Callable[[Mapping[str, Any]], str] = COMPILED

    def version(self, settings: Mapping[str, Any]) -> str:
        """The version of the code, as it is now, that a row about these settings follows from."""
        return self.code(settings) if callable(self.code) else made_by(self.code, settings.get("model"))

    def is_stale(self, row: Row) -> bool:
        """Whether another version of the code made a row."""
        return row.get(MADE_BY) != self.version(row)

    @property
    def found(self) -> list[Row]:
        """What the file has now; nothing, if it is not there."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            found = list(reader)
        missing = [s for s in self.settings if s not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{self.path} has no column {missing[0]!r}: it is another script's; name another file")
        return found

    def get(self, settings: Mapping[str, Any]) -> Row | None:
        """The row about these settings, if it has been made."""
        wanted = [_text(settings[s]) for s in self.settings]
        return next((row for row in self.found if [row[s] for s in self.settings] == wanted), None)

    def make(self, settings: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Row:
        """The row about these settings, with what `measure` returns; made once."""
        return self.get(settings) or self.remake(settings, measure)

    def remake(self, settings: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Row:
        """The row about these settings, made again if it is there."""
        self.version(settings)  # that of the code as it is before a long measurement, whatever happens to it meanwhile
        return self.put(settings, measure())

    def put(self, settings: Mapping[str, Any], values: Mapping[str, Any]) -> Row:
        """Keep these values as the row about these settings, in the place of what it was."""
        row = {name: _text(value) for name, value in {**settings, **values, MADE_BY: self.version(settings)}.items()}
        rows = {tuple(r[s] for s in self.settings): r for r in [*self.found, row]}
        self._write([*rows.values()])
        return row

    def drop(self, settings: Mapping[str, Any]) -> None:
        """Without the row about these settings, if there is one."""
        if (row := self.get(settings)) is not None:
            self._write([r for r in self.found if r != row])

    def make_all(
        self,
        wanted: Sequence[Mapping[str, Any]],
        measure: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        description: str,
    ) -> None:
        """All these rows, those that are there too, with a line of progress.

        **Arguments:** `description`: what the line says of the row at hand, with its settings in braces.
        """
        shown = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*shown, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=len(wanted))
            for what in wanted:
                progress.update(task, description=description.format_map(what))
                with alone():
                    self.remake(what, lambda w=what: measure(w))
                progress.advance(task)

    def missing(self, wanted: Sequence[Mapping[str, Any]], stale: bool = False) -> list[Mapping[str, Any]]:
        """What has not been made yet, and what is stale if wanted."""
        rows = {id(w): self.get(w) for w in wanted}
        return [w for w in wanted if (row := rows[id(w)]) is None or (stale and self.is_stale(row))]

    def made(self, wanted: Sequence[Mapping[str, Any]]) -> list[Row]:
        """The rows that there are."""
        return [row for w in wanted if (row := self.get(w)) is not None]

    def _write(self, rows: Sequence[Row]) -> None:
        """All rows, at once or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}")
        with part.open("w", newline="") as file:
            columns = dict.fromkeys((*(name for row in rows for name in row if name != MADE_BY), MADE_BY))
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self.path)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
