"""Plans of variants of a program that do what its plan does, and what that has of it on each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from unity_jax.cost.program import local_bytes
from unity_jax.pcg.graph import Tensor
from unity_jax.program import Program
from unity_jax.residuals.change import made
from unity_jax.residuals.ranges import Layers
from unity_jax.residuals.record import Keep, Recompute, Saving, Spill
from unity_jax.search.candidate import Candidate, best

FEW = 8
"""How many ways are all tried."""


class Follow(Protocol):
    """Makes the plan of a variant of a program that does what a plan of that does."""

    def __call__(self, plan: Candidate, program: Program, like: Mapping[Tensor, Tensor]) -> Candidate:
        """**Arguments:** `like`: what the program before has in place of tensors of the variant."""


def followed(start: Candidate, savings: Sequence[Saving], follow: Follow) -> Candidate:
    """The plan of a program that needs less memory. Raises `LookupError` where a saving cannot be made."""
    return follow(start, *changed(start.program, savings))


def fewest(
    ways: int, make: Callable[[int], Candidate], limit: float, first: int, fastest: float
) -> Iterator[tuple[int, Candidate]]:
    """Plans that need less and less memory, in search of the first that fits, unless what does not takes as many
    seconds as what there is (`fastest`); each with which it is. **Arguments:** `first`: which is tried first, the last
    at most."""
    few, enough, at = -1, ways, min(first, ways - 1)
    while few < at < enough:
        made = make(at)
        yield at, made
        if not made.fits(limit) and fastest <= made.seconds:
            return
        few, enough = (few, at) if made.fits(limit) else (at, enough)
        at = (few + enough) // 2


def by_sections(ways: int, make: Callable[[int], Candidate], limit: float) -> Iterator[tuple[int, Candidate]]:
    """Plans that keep less and less, in search of the fastest that fits: all of few, and of many as if each were faster
    than the one before up to some, and slower from there on; each with which it is."""
    if ways <= FEW:
        yield from ((i, make(i)) for i in range(ways))
        return
    made = dict[int, Candidate]()
    low, high = 0, ways - 1
    while low <= high:
        left = low + 2 * (high - low) // 5
        right = min(left + 1 + (high - low) // 5, high)
        for i in dict.fromkeys((left, right)):
            if i not in made:
                made[i] = make(i)
                yield i, made[i]
        better = best([made[left], made[right]], limit)
        low, high = (low, right - 1) if better is made[left] else (left + 1, high)


def changed(program: Program, savings: Sequence[Saving]) -> tuple[Program, Mapping[Tensor, Tensor]]:
    """A program that needs less memory, each saving made of what those before it leave, and what it has now in place of
    the tensors of that. Raises `LookupError`."""
    layers = some_layers(savings)
    return saved(*(apart(program, layers) if layers else (program, {})), savings)


def saved(
    program: Program, like: Mapping[Tensor, Tensor], savings: Sequence[Saving]
) -> tuple[Program, Mapping[Tensor, Tensor]]:
    """A program that needs less memory, and what another one has in place of its tensors. Raises `LookupError`.

    **Arguments:** `like`: what that one has in place of those of the program as it is.
    """
    like = dict(like)
    for how in savings:
        change = how.applied(program.graph)
        of = {t: origin for t, origin in change.origin.items() if isinstance(origin, Tensor)}
        like.update((t, like.get(origin, origin)) for t, origin in of.items())
        program = program.saving(change, how)
    return program, like


def some_layers(savings: Sequence[Saving]) -> Layers | None:
    """The layers that do otherwise than the rest, if there are any."""
    return next((how.layers for how in savings if isinstance(how, Recompute | Keep | Spill) and how.layers), None)


def apart(program: Program, layers: Layers) -> tuple[Program, Mapping[Tensor, Tensor]]:
    """A program, if it is folded with its first layers apart from the others, and what it has now in place of the
    tensors of that."""
    whole = program.keeping or program
    if whole.parts is None:
        return program, {}
    found, like = whole.parts.apart(layers)
    return saving(found, like, program) if program.keeping else (found, like)


def saving(whole: Program, like: Mapping[Tensor, Tensor], small: Program) -> tuple[Program, Mapping[Tensor, Tensor]]:
    """A whole program changed as the folded one was to need less memory, and what that has in place of its tensors.

    **Arguments:** `like`: what the folded program has before that.
    """
    assert small.keeping is not None
    graph = small.keeping.graph
    for how, near in zip(small.savings, small.changes, strict=True):
        there = how.moved(graph, whole.graph, like)
        far = there.applied(whole.graph)
        like = {**like, **dict(far.alike(near, like))}
        graph, whole = near.graph, whole.saving(far, there)
    return whole, {t: like.get(t, t) for t in (*whole.graph.inputs, *made(whole.graph))}


def local(found: Candidate) -> dict[Tensor, int]:
    """Bytes of the tensors of a program on one device, as a plan holds them."""
    return {t: local_bytes(p, found.mesh) for t, p in planned(found).items()}


def planned(found: Candidate) -> dict[Tensor, Tensor]:
    """The tensors that a program makes, and the same as a plan holds them."""
    pairs = ((op.traced.outputs, op.outputs) for op in found.graph.walk() if op.traced is not None)
    return {t: planned for before, after in pairs for t, planned in zip(before, after, strict=True)}
