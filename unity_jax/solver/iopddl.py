"""Reads published planning problems: the instances of the ASPLOS 2025 contest on intra-operator parallelism.

    problem = load("asplos-2025-iopddl-B.json.gz")
    len(problem.unary), problem.limit  # 816 nodes, 14392528.0 bytes

An instance lists, per node, the strategies' costs and usages and the half-open interval during which the usage counts;
per edge, a row-major table of costs over pairs of strategies; and the usage that no time step may exceed. The format is
that of https://github.com/google/iopddl (Apache-2.0), of Moffitt and Fegade, ASPLOS 2025, doi:10.1145/3676642.3736399.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..search.problem import Edge, Problem, Usage

FORBIDDEN = 1e18
"""Costs from here on mean that a choice is not allowed: they are read as inf."""


def load(path: str | Path) -> Problem:
    """The problem in a file, `.json` or `.json.gz`.

    **Raises:** `ValueError`, which names the file and the place in it, if this is not an instance.
    """
    path = Path(path)
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read()
    try:
        return parsed(json.loads(content))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parsed(instance: Any) -> Problem:
    """The problem of an instance as JSON has it; costs are in the instance's unit, usages in bytes."""
    problem = _at(instance, "problem", "the instance")
    nodes, edges = _at(problem, "nodes", "problem"), _at(problem, "edges", "problem")
    intervals, costs, usages = (_listed(nodes, name, "nodes") for name in ("intervals", "costs", "usages"))
    for name, found in ("costs", costs), ("usages", usages):
        if len(found) != len(intervals):
            raise ValueError(f"nodes has {len(intervals)} intervals and {len(found)} {name}")
    unary, usage = [], []
    for n, (interval, cost, used) in enumerate(zip(intervals, costs, usages, strict=True)):
        numbers, bytes_ = _numbers(cost, f"costs of node {n}"), _numbers(used, f"usages of node {n}")
        if len(numbers) == 0 or len(numbers) != len(bytes_):
            raise ValueError(f"node {n} has {len(numbers)} costs and {len(bytes_)} usages")
        unary.append(_allowed(numbers))
        start, end = _pair(interval, f"interval of node {n}")
        if start < end:
            usage.append(Usage(n, bytes_, start, end))
    pairs, tables = (_listed(edges, name, "edges") for name in ("nodes", "costs"))
    if len(pairs) != len(tables):
        raise ValueError(f"edges has {len(pairs)} pairs of nodes and {len(tables)} costs")
    found = [_edge(e, pair, table, unary) for e, (pair, table) in enumerate(zip(pairs, tables, strict=True))]
    limit = problem.get("usage_limit")
    if limit is not None and not isinstance(limit, int | float):
        raise ValueError(f"usage_limit is {limit!r}, not a number")
    return Problem(unary, found, usage=usage, limit=None if limit is None else float(limit))


def _edge(e: int, pair: Any, table: Any, unary: Sequence[np.ndarray]) -> Edge:
    i, j = _pair(pair, f"edge {e}")
    if not (0 <= i < len(unary) and 0 <= j < len(unary) and i != j):
        raise ValueError(f"edge {e} joins nodes {i} and {j}, of {len(unary)} nodes")
    numbers = _numbers(table, f"costs of edge {e}")
    shape = len(unary[i]), len(unary[j])
    if numbers.size != shape[0] * shape[1]:
        raise ValueError(f"edge {e} has {numbers.size} costs, nodes {i} and {j} have {shape[0]} x {shape[1]} pairs")
    return Edge(i, j, _allowed(numbers).reshape(shape))


def _allowed(costs: np.ndarray) -> np.ndarray:
    return np.where(costs >= FORBIDDEN, np.inf, costs)


def _at(record: Any, name: str, where: str) -> Any:
    if not isinstance(record, Mapping) or name not in record:
        raise ValueError(f"{where} has no {name!r}")
    return record[name]


def _listed(record: Any, name: str, where: str) -> list[Any]:
    found = _at(record, name, where)
    if not isinstance(found, list):
        raise ValueError(f"{name} of {where} is not a list")
    return found


def _numbers(values: Any, where: str) -> np.ndarray:
    try:
        found = np.array(values, np.float64)
    except (TypeError, ValueError):
        found = np.zeros((0, 0))
    if found.ndim != 1 or not isinstance(values, list):
        raise ValueError(f"{where} are not a list of numbers")
    return found


def _pair(values: Any, where: str) -> tuple[int, int]:
    if not isinstance(values, list) or len(values) != 2 or not all(type(v) is int for v in values):
        raise ValueError(f"{where} is {values!r}, not two whole numbers")
    return values[0], values[1]
