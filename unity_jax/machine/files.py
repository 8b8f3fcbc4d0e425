"""Machines as versioned JSON, checked field by field.

    {"format": "unity_jax machine", "version": 1, "name": "my cluster",
     "devices": [{"count": 8, "kind": "h100", "peak_flops": {"bfloat16": 9.89e14, "vector": 6.7e13}, ...}],
     "network": {"levels": [{"name": "node", "size": 2, "bandwidth": 5e10, "latency": 4e-6, "links": "switch"}, ...]}}

`devices` lists them in the order of the network, equal ones together. A network without levels has two matrices
instead, `"latency"` and `"bandwidth"`. Units are those of `Device` and `Level`: bytes, seconds, operations per second.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from unity_jax.machine.contention import ASYNCHRONOUS, Contention
from unity_jax.machine.device import COMPILERS, Device
from unity_jax.machine.network import Level, Matrix, Network, num_devices

FORMAT = "unity_jax machine"
VERSION = 1


def write(path: str | Path, name: str, devices: Sequence[Device], network: Network) -> None:
    """Write a machine; `devices` has one entry per position of the network."""
    runs = [(device, len(list(run))) for device, run in itertools.groupby(devices)]
    data = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "devices": [
            {"count": n, **dataclasses.asdict(device), "peak_flops": dict(device.peak_flops)} for device, n in runs
        ],
        "network": dataclasses.asdict(network)
        if isinstance(network, Matrix)
        else {"levels": [dataclasses.asdict(level) for level in network]},
    }
    Path(path).write_text(json.dumps(data, indent=1) + "\n")


def read(path: str | Path) -> tuple[str, tuple[Device, ...], Network]:
    """Name, devices and network of a machine file. Raises `ValueError` that names the file, the field and what it
    should be."""
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no machine file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not a machine file: {error}; write one with Machine.save") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} is not a machine file: it needs format {FORMAT!r}, as Machine.save writes")
    if data.get("version") != VERSION:
        raise ValueError(
            f"{str(path)!r} has machine version {data.get('version')!r}, this unity_jax reads version {VERSION}"
        )
    try:
        return _machine(data)
    except _Malformed as error:
        raise ValueError(f"machine file {str(path)!r}: {error}") from None


class _Malformed(Exception):
    """What is wrong with a field, and what it should be."""


def _machine(data: Mapping[str, Any]) -> tuple[str, tuple[Device, ...], Network]:
    _known(data, ("format", "version", "name", "devices", "network"), "")
    name = _text(_field(data, "name", ""), "name")
    rows = _list(_field(data, "devices", ""), "devices")
    runs = [_devices(row, f"devices[{i}]") for i, row in enumerate(rows)]
    where = _mapping(_field(data, "network", ""), "network")
    network = _levels(where) if "levels" in where else _matrix(where)
    count, size = sum(n for _, n in runs), num_devices(network)
    if count != size:
        raise _Malformed(f"field devices counts {count}, network joins {size}: make them agree")
    return name, tuple(device for device, n in runs for _ in range(n)), network


def _devices(row: Any, at: str) -> tuple[Device, int]:
    """One kind of device, and how many of it follow each other."""
    row = _mapping(row, at)
    fields = {f.name: f for f in dataclasses.fields(Device)}
    _known(row, ("count", *fields), at)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in row and field.default is not dataclasses.MISSING:
            continue
        values[name] = _FIELDS.get(name, _number)(_field(row, name, at), f"{at}.{name}")
    return Device(**values), _count(_field(row, "count", at), f"{at}.count")


def _levels(network: Mapping[str, Any]) -> tuple[Level, ...]:
    _known(network, ("levels",), "network")
    rows = _list(network["levels"], "network.levels")
    return tuple(_level(row, f"network.levels[{i}]") for i, row in enumerate(rows))


def _level(row: Any, at: str) -> Level:
    row = _mapping(row, at)
    _known(row, [f.name for f in dataclasses.fields(Level)], at)
    links, known = row.get("links", Level.links), get_args(get_type_hints(Level)["links"])
    if links not in known:
        raise _Malformed(f"field {at}.links is {links!r}: give one of {', '.join(known)}")
    return Level(
        _text(_field(row, "name", at), f"{at}.name"),
        _count(_field(row, "size", at), f"{at}.size"),
        _number(_field(row, "bandwidth", at), f"{at}.bandwidth"),
        _number(_field(row, "latency", at), f"{at}.latency", least=0.0),
        links,
    )


def _matrix(network: Mapping[str, Any]) -> Matrix:
    _known(network, ("latency", "bandwidth"), "network")
    rows = {key: _list(_field(network, key, "network"), f"network.{key}") for key in ("latency", "bandwidth")}
    size = len(rows["bandwidth"])

    def read(key: str, check: Callable[[Any, str], float]) -> tuple[tuple[float, ...], ...]:
        found = []
        for i, row in enumerate(rows[key]):
            at = f"network.{key}[{i}]"
            if len(rows[key]) != size or len(_list(row, at)) != size:
                raise _Malformed(f"field {at} has {len(row)} entries: latency and bandwidth are {size} x {size} tables")
            found.append(tuple(0.0 if i == j else check(x, f"{at}[{j}]") for j, x in enumerate(row)))
        return tuple(found)

    return Matrix(read("latency", lambda x, at: _number(x, at, least=0.0)), read("bandwidth", _number))


def _field(data: Mapping[str, Any], name: str, at: str) -> Any:
    if name not in data:
        raise _Malformed(f"field {at + '.' if at else ''}{name} is missing")
    return data[name]


def _known(data: Mapping[str, Any], names: Sequence[str], at: str) -> None:
    for name in data:
        if name not in names:
            raise _Malformed(f"field {at + '.' if at else ''}{name} is unknown: the fields are {', '.join(names)}")


def _mapping(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Malformed(f"field {at} is {value!r}: give an object {{...}}")
    return value


def _list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _Malformed(f"field {at} is {value!r}: give a list with at least one entry")
    return value


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str) or not value:
        raise _Malformed(f"field {at} is {value!r}: give a name in quotes")
    return value


def _count(value: Any, at: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _Malformed(f"field {at} is {value!r}: give a whole number >= 1")
    return value


def _number(value: Any, at: str, least: float | None = None) -> float:
    """A positive number, or one that is at least `least`."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300
    if not good or (value <= 0 if least is None else value < least):
        raise _Malformed(f"field {at} is {value!r}: give a number {'> 0' if least is None else f'>= {least:g}'}")
    return float(value)


def _rates(value: Any, at: str) -> tuple[tuple[str, float], ...]:
    rates = _mapping(value, at)
    if "vector" not in rates:
        raise _Malformed(f"field {at} needs 'vector', the flops per second of everything but matmuls")
    return tuple((str(k), _number(v, f"{at}.{k}")) for k, v in rates.items())


def _compiler(value: Any, at: str) -> str:
    if value not in COMPILERS:
        raise _Malformed(f"field {at} is {value!r}: give one of {', '.join(COMPILERS)}")
    return str(value)


def _tile(value: Any, at: str) -> tuple[int, ...]:
    return tuple(int(_number(n, f"{at}[{i}]", least=0.0)) for i, n in enumerate(_list(value, at)))


def _contention(value: Any, at: str) -> Contention:
    names = [f.name for f in dataclasses.fields(Contention)]
    row = _mapping(value, at)
    _known(row, names, at)
    parts = {name: _number(_field(row, name, at), f"{at}.{name}", least=0.0) for name in names}
    for name, part in parts.items():
        if part > 1:
            raise _Malformed(f"field {at}.{name} is {part:g}: give a part between 0 and 1")
    return Contention(**parts)


def _kinds(value: Any, at: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not set(value) <= set(ASYNCHRONOUS):
        raise _Malformed(f"field {at} is {value!r}: give a list of {', '.join(ASYNCHRONOUS)}")
    return tuple(value)


def _at_least_zero(value: Any, at: str) -> float:
    return _number(value, at, least=0.0)


_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "kind": _text,
    "compiler": _compiler,
    "peak_flops": _rates,
    "matmul_tile": _tile,
    "layout_tile": _tile,
    "matmul_units": _count,
    "kernel_overhead": _at_least_zero,
    "results_per_second": _at_least_zero,
    "unfused_per_second": _at_least_zero,
    "gathered_rows_per_second": _at_least_zero,
    "scattered_rows_per_second": _at_least_zero,
    "fast_results_per_second": _at_least_zero,
    "fast_bytes": _at_least_zero,
    "fast_bandwidth": _at_least_zero,
    "chip_bytes": _at_least_zero,
    "contention": _contention,
    "asynchronous": _kinds,
}
"""How each field of a device is read; the others are positive numbers."""
