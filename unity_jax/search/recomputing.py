"""What the backward pass of a plan could compute again, and what it does by `jax.checkpoint` and need not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

from unity_jax import progress
from unity_jax.machine.device import Device
from unity_jax.pcg.graph import Graph, Tensor
from unity_jax.pcg.mesh import WHOLE
from unity_jax.residuals.change import at
from unity_jax.residuals.choice import Choice, choices
from unity_jax.residuals.keep import Rematerialized
from unity_jax.residuals.record import Keep, Recompute
from unity_jax.rewrite.estimate import Seconds, by_kernels
from unity_jax.search.candidate import Candidate, best
from unity_jax.search.following import Follow, followed, local
from unity_jax.search.rule_cache import RuleCache
from unity_jax.xla.traffic import Traffic

FEW = 8
"""How many ways are all tried."""


def keeping(start: Candidate, limit: float, follow: Follow) -> Candidate:
    """A plan, or where memory is left a faster one, whose backward pass does not compute again by the user's
    `jax.checkpoint` what there is memory for."""
    if not start.fits(limit):
        return start
    graph, device, devices = start.program.graph, start.machine.device, start.machine.num_devices
    again = Rematerialized(graph, Traffic.of(graph, device.compiler), _estimate(device), devices)
    if not again.values:
        return start
    progress.stage("what jax.checkpoint would recompute, and there is memory for")
    bytes_of = local(start)

    def kept(values: Set[Tensor]) -> Candidate:
        choice = again.keeping(values)
        return start if choice is None else followed(start, [Keep.of(graph, choice, _share(choice, bytes_of))], follow)

    free = kept(frozenset())
    ways = [frozenset(at(free.program.graph, how.values)) for how in recomputable(free)]
    found = best([start, free, *by_sections(len(ways), lambda i: kept(ways[i]), limit)], limit)
    return found.noting(searched=start.searched)


def recomputable(start: Candidate) -> list[Recompute]:
    """What the program of a plan can compute again, ever more of it."""
    graph, device, bytes_of = start.program.graph, start.machine.device, local(start)
    every = choices(graph, Traffic.of(graph, device.compiler), _estimate(device), start.machine.num_devices)
    return [Recompute.of(graph, choice, device.compiler, _share(choice, bytes_of)) for choice in every]


def by_sections(ways: int, make: Callable[[int], Candidate], limit: float) -> Iterator[Candidate]:
    """Plans that keep less and less, in search of the fastest that fits: all of few, and of many as if each were faster
    than the one before up to some, and slower from there on."""
    if ways <= FEW:
        yield from map(make, range(ways))
        return
    made = dict[int, Candidate]()
    low, high = 0, ways - 1
    while low <= high:
        left = low + 2 * (high - low) // 5
        right = min(left + 1 + (high - low) // 5, high)
        for i in dict.fromkeys((left, right)):
            if i not in made:
                made[i] = make(i)
                yield made[i]
        better = best([made[left], made[right]], limit)
        low, high = (low, right - 1) if better is made[left] else (left + 1, high)


def _estimate(device: Device) -> Callable[[Graph], Seconds]:
    rules = RuleCache()
    return by_kernels(device, lambda op: rules.shard(op, WHOLE, ()))


def _share(choice: Choice, local: Mapping[Tensor, int]) -> float:
    """The bytes of a choice on one device."""
    whole = sum(n * t.nbytes for t, n in choice.freed.items())
    return choice.bytes * sum(n * local.get(t, t.nbytes) for t, n in choice.freed.items()) / whole
