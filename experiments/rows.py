"""Tables that are made row by row and go on where they stopped: a CSV file of them.

    rows = Rows.of("sweep.csv", settings=("model", "devices"))
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
    found: list[Row]

    @staticmethod
    def of(path: str | Path, settings: Sequence[str]) -> Rows:
        """What the file has; nothing, if it is not there."""
        path, found = Path(path), []
        if path.exists():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                found = list(reader)
            missing = [s for s in settings if s not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"{path} has no column {missing[0]!r}: it was written by another script; move it away")
        return Rows(path, tuple(settings), found)

    def get(self, settings: Mapping[str, Any]) -> Row | None:
        """The row about these settings, if it has been made."""
        wanted = [_text(settings[s]) for s in self.settings]
        return next((row for row in self.found if [row[s] for s in self.settings] == wanted), None)

    def make(self, settings: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Row:
        """The row about these settings, with what `measure` returns; made once."""
        row = self.get(settings)
        if row is None:
            row = {name: _text(value) for name, value in {**settings, **measure()}.items()}
            self.found.append(row)
            self._write()
        return row

    def _write(self) -> None:
        """All rows, at once or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        columns = dict.fromkeys(name for row in self.found for name in row)
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.found)
        os.replace(part, self.path)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
