"""Plans on disk, by everything they depend on, so that a restart does not plan again."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from pathlib import Path

from unity_jax.errors import PlanError
from unity_jax.plan.plan import Plan


def default_folder() -> Path | None:
    """`$UNITY_JAX_CACHE` (empty: no cache), or `unity_jax` in the user's cache folder."""
    named = os.environ.get("UNITY_JAX_CACHE")
    if named is not None:
        return Path(named) if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unity_jax"


def file_of(folder: Path, key: str) -> Path:
    """Where the plan with this key is kept; by the source of this package too, which another version has another of."""
    return folder / "plans" / f"{hashlib.sha256((_planner_version() + key).encode()).hexdigest()[:24]}.json"


def load(path: Path, program_hash: str) -> Plan | None:
    """The plan in a file; None where there is none that can be read, or it is of a program of another hash."""
    if path.exists():
        with contextlib.suppress(PlanError):  # a damaged or old entry is replaced
            found = Plan.load(path)
            if found.program_hash == program_hash:
                return found
    return None


def store(plan: Plan, path: Path) -> None:
    """Write a plan. Other processes, also on other hosts, write the same plan at the same time: none of them ever sees
    half a file. Where nothing can be written, nothing is."""
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, not correctness
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(".part", path.stem, path.parent)
        os.close(handle)
        plan.save(part)
        Path(part).replace(path)


@functools.cache
def _planner_version() -> str:
    """A hash of this package's source: another planner makes other plans."""
    text = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.json")]):
        text.update(path.read_bytes())
    return text.hexdigest()
