"""Which collectives XLA combines into one, which then waits for all their operands.

    all-gather    a, b, c   of 8 MiB each, none of which needs another     one of 24 MiB
    all-gather    d         of 8 MiB, which fits no more                   the next
    all-gather    e         of 40 MiB                                      alone

Of one kind, in the order of the program, as long as they fit and none depends on another
(https://github.com/openxla/xla/blob/main/xla/service/collective_combiner_utils.h).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

THRESHOLDS = {"gpu": 30 * 2**20 + 7, "tpu": 2**27 - 1}
"""Bytes of results that a compiler combines: of XLA:GPU the default of `xla_gpu_all_reduce_combine_threshold_bytes` and
its like; XLA:TPU is seen to make all-reduces of up to 112 MiB, and to leave those of 128 MiB alone."""


@dataclass(eq=False)
class Combiner:
    """Groups of collectives, by number, each of up to `threshold` bytes. What depends on groups is told by a bit for
    each."""

    threshold: int
    _sizes: list[float] = field(default_factory=list)
    _needs: list[int] = field(default_factory=list)  # of a group: all groups that it depends on
    _open: dict[Hashable, list[int]] = field(default_factory=dict)

    def join(self, key: Hashable, nbytes: float, needs: int) -> int:
        """The group of the next collective; `needs`: the groups that it depends on."""
        needs = self._all(needs)
        found = self._open.setdefault(key, [])
        for g in list(found) if nbytes <= self.threshold else ():
            if needs >> g & 1:
                continue
            if self._sizes[g] + nbytes > self.threshold:
                found.remove(g)
                continue
            self._sizes[g] += nbytes
            self._extend(g, needs)
            return g
        self._sizes.append(nbytes)
        self._needs.append(needs)
        if nbytes <= self.threshold:
            found.append(len(self._sizes) - 1)
        return len(self._sizes) - 1

    def _all(self, needs: int) -> int:
        """These groups and those that they depend on."""
        found, left = needs, needs
        while left:
            g = left.bit_length() - 1
            left ^= 1 << g
            found |= self._needs[g]
        return found

    def _extend(self, group: int, needs: int) -> None:
        if needs & ~self._needs[group]:
            self._needs[group] |= needs
            for g, other in enumerate(self._needs):
                if other >> group & 1:
                    self._needs[g] = other | needs
