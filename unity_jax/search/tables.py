"""Hash-consed tables: equal numbers are one table, and an operation on the same tables is done once.

A train step repeats itself: 24 layers bring the same cost tables in the same places. The store gives every distinct
array a small integer name, so "the same contraction" is a dictionary look-up and depth is nearly free.

    store = Store(1.0)
    a, b = store.add(np.ones((2, 2))), store.add(np.ones((2, 2)))
    a == b  # True

Costs are rounded once to multiples of a power of two, small enough that every later sum is exact in a float64.
Sums in any order are then equal, ties are true ties, and a message that repeats up to a constant is recognized.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np

SHORT = 8192  # bytes of arrays that are known by all of them, longer ones by a hash
EXACT_BITS = 48  # sums of magnitudes below 2**48 units, with room to spare in a float64's 53 bits


class Store:
    """Interned arrays, memoized operations, and the counts that tests read."""

    def __init__(self, largest_cost: float) -> None:
        exponent = np.floor(EXACT_BITS - np.log2(largest_cost)) if largest_cost > 0 else 0.0
        self.scale = float(2.0 ** np.clip(exponent, -900, 900))
        self.most = 2.0 * largest_cost
        self.arrays: list[np.ndarray] = []
        self.contractions = 0
        self.largest = 0
        self._names: dict[Hashable, int] = {}
        self._objects: dict[int, tuple[np.ndarray, int]] = {}  # the array is kept, so that its id stays its own
        self._memo: dict[Hashable, Any] = {}

    def holds(self, cost: float) -> bool:
        """Whether sums of this size are exact as well."""
        return cost <= self.most

    def __getitem__(self, name: int) -> np.ndarray:
        return self.arrays[name]

    def add(self, array: np.ndarray) -> int:
        """The name of an array by its contents."""
        array = np.ascontiguousarray(array)
        content = array.tobytes() if array.nbytes <= SHORT else hashlib.sha256(array).digest()
        key = (array.dtype.char, array.shape, content)
        name = self._names.setdefault(key, len(self.arrays))
        if name == len(self.arrays):
            array.setflags(write=False)
            self.arrays.append(array)
        return name

    def costs(self, array: np.ndarray) -> int:
        """The name of an array of seconds, rounded to units."""
        return self._object(array, lambda a: np.round(np.asarray(a, np.float64) * self.scale) + 0.0)

    def labels(self, array: np.ndarray) -> int:
        """The name of an array of layout numbers."""
        return self._object(array, lambda a: np.array(a, np.int64))

    def plain(self, array: np.ndarray) -> int:
        """The name of an array of other numbers, such as bytes."""
        return self._object(array, lambda a: np.array(a, np.float64))

    def _object(self, array: np.ndarray, convert: Callable[[np.ndarray], np.ndarray]) -> int:
        found = self._objects.get(id(array))
        if found is None:
            found = self._objects[id(array)] = (array, self.add(convert(array)))
        return found[1]

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """`make()`, the first time that `key` is asked for."""
        try:
            return self._memo[key]
        except KeyError:
            value = self._memo[key] = make()
            return value

    def sum(self, names: Iterable[int]) -> int:
        """The sum of tables of one shape."""
        parts = tuple(sorted(names))
        return parts[0] if len(parts) == 1 else self.once(("sum", parts), lambda: self.add(_total(self, parts)))

    def transposed(self, name: int) -> int:
        """A matrix, rows and columns exchanged."""
        return self.once(("transpose", name), lambda: self.add(self[name].T))

    def taken(self, name: int, *kept: int | None) -> int:
        """A table restricted, along each axis, to the kept indices (None keeps all)."""
        if all(k is None for k in kept):
            return name
        return self.once(("take", name, kept), lambda: self.add(_take(self, name, kept)))


def _total(store: Store, names: tuple[int, ...]) -> np.ndarray:
    total = store[names[0]].copy()
    for name in names[1:]:
        total += store[name]
    return total


def _take(store: Store, name: int, kept: tuple[int | None, ...]) -> np.ndarray:
    table = store[name]
    for axis, k in enumerate(kept):
        if k is not None:
            table = np.take(table, store[k], axis=axis)
    return table
