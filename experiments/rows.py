"""Tables that are made row by row and go on where they stopped: a CSV file of them.

    rows = Rows(Path("sweep.csv"), settings=("model", "devices"))
    for n in track(sizes):
        rows.make({"model": "gpt", "devices": n}, lambda: measure(n))   # not again if the file has such a row

Whoever wants a row made again, with another version of the planner for instance, deletes it.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, str]


@dataclass(frozen=True)
class Rows:
    """The rows of a file. **Fields:** `settings`: the columns that say what a row is about; the others are results."""

    path: Path
    settings: tuple[str, ...]

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
        row = self.get(settings)
        if row is None:
            row = {name: _text(value) for name, value in {**settings, **measure()}.items()}
            self._write([*self.found, row])
        return row

    def _write(self, rows: Sequence[Row]) -> None:
        """All rows, at once or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}")
        with part.open("w", newline="") as file:
            columns = dict.fromkeys(name for row in rows for name in row)
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self.path)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
