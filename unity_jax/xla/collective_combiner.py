"""Which collectives XLA combines into one, which then waits for all their operands.

    all-gather    a, b, c   of 8 MiB each, none of which needs another     one of 24 MiB
    all-gather    d         of 8 MiB, which fits no more                   the next
    all-gather    e         of 40 MiB                                      alone

Of one kind, until one does not fit or depends on another. It takes them in the order in which the results of the
program need them: what only the last result needs comes last
(https://github.com/openxla/xla/blob/main/xla/service/collective_combiner_utils.h).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from unity_jax.network.collectives import Collective
from unity_jax.pcg.graph import Op
from unity_jax.xla.module import Instruction, Module
from unity_jax.xla.targets import Target


def collective_combiner(module: Module) -> None:
    """Put one collective in the place of each group that XLA makes one of."""
    module.resolve()
    number = {i: n for n, i in enumerate(module.instructions)}
    after = [tuple(number[module.made(a)] for a in i.after) for i in module.instructions]
    ends = [number[i] for i in module.ends()]
    place: dict[Instruction, Instruction] = {}
    sent = _sent(module)
    for group in together(sent, Waits(sent, after, ends), module.target.combined_bytes):
        several = [module.instructions[s.at] for s in group]
        last = module.instructions[max(s.at for s in group)]
        _merge(last, several)
        place.update((i, last) for i in several if i is not last)
    module.replace(place)
    module.resolve()


def _sent(module: Module) -> list[Sent]:
    """The collectives of a module, in the order of the program. An all-reduce makes as much as it reads."""
    found = []
    for at, i in enumerate(module.instructions):
        if i.collectives and i.kernel is not None:
            root = i.kernel.root
            found.append(Sent(kind(root, module.target) or at, module.storage(root.inputs[0]), at, i.collectives[0]))
    return found


def _merge(into: Instruction, several: Sequence[Instruction]) -> None:
    """Put one instruction in the place of several alike."""
    chained = itertools.chain.from_iterable
    after, reads, makes = ([*dict.fromkeys(chained(getattr(i, of) for i in several))] for of in _OPERANDS)
    into.after, into.reads, into.makes = after, reads, makes
    into.collectives = tuple(chained(i.collectives for i in several))
    into.seconds = sum(i.seconds for i in several)


_OPERANDS = ("after", "reads", "makes")


class Sent(NamedTuple):
    """A collective: `kind`: those of one may be combined; `nbytes`: of its result; `at`: its step; `times`: for how
    many it stands, one of each layer."""

    kind: Hashable
    nbytes: float
    at: int
    of: Collective
    times: int = 1

    @property
    def alike(self) -> Hashable:
        """What those have in common that may be combined, of one layer."""
        return self.kind, self.times


def kind(op: Op, target: Target) -> Hashable | None:
    """What collectives have in common that may be combined; None for the move of this op if its kind never is."""
    move = op.move
    assert move is not None
    if move.kind not in target.combined:
        return None
    of = move.kind != "combine" and (str(op.outputs[0].dtype), *(r for a, r in move.before.partial if a in move.axes))
    return move.kind, move.axes, None if move.kind == "reduce" else move.dim, of


class Waits:
    """What each step of a program waits for.

    **Fields:** `steps` in the order in which the results need them; `number`: which collective a step is; `sent`: the
    collectives that each step waits for, a bit for each.
    """

    def __init__(self, sent: Sequence[Sent], after: Sequence[Sequence[int]], ends: Sequence[int]) -> None:
        """**Arguments:** `after`: the steps that each one waits for itself; `ends`: those that make the results of the
        program, in their order."""
        self._after = after
        self.steps = list(post_order(after, ends))
        self.number = {s.at: i for i, s in enumerate(sent)}
        self.sent = self.marked({at: 1 << i for at, i in self.number.items()})

    def marked(self, marks: Mapping[int, int]) -> list[int]:
        """The marks of all that each step waits for, bit by bit."""
        found = [0] * len(self._after)
        for i in self.steps:
            for j in self._after[i]:
                found[i] |= found[j] | marks.get(j, 0)
        return found


def together(sent: Sequence[Sent], waits: Waits, threshold: float) -> Iterator[list[Sent]]:
    """The groups of collectives that become one; of one alone where nothing joins it.

    **Arguments:** `waits`: of the program that they are sent in; `threshold`: the most bytes of a group.
    """
    order = [waits.number[i] for i in waits.steps if i in waits.number]
    needs = [waits.sent[s.at] for s in sent]
    alike: dict[Hashable, list[int]] = {}
    for i in order:
        if sent[i].nbytes <= threshold:
            alike.setdefault(sent[i].alike, []).append(i)
    taken: set[int] = set()
    for first in order:
        if first in taken:
            continue
        group, size, members, needed = [first], sent[first].nbytes, 1 << first, needs[first]
        for i in alike[sent[first].alike] if size <= threshold else ():
            if i == first or i in taken:
                continue
            if size + sent[i].nbytes > threshold or needs[i] & members or needed >> i & 1:
                break
            group.append(i)
            size, members, needed = size + sent[i].nbytes, members | 1 << i, needed | needs[i]
        taken.update(group)
        if len(group) > 1:  # what waits for one of them waits for all that they wait for
            for i in order:
                if needs[i] & members:
                    needs[i] |= members | needed
        yield [sent[i] for i in group]


def across_layers(
    sent: Sequence[Sent], waits: Waits, enters: Mapping[int, Collection[int]], leaves: Mapping[int, Collection[int]]
) -> frozenset[int]:
    """The steps of the collectives of a layer that stands for several of which that of one layer does not wait for that
    of another one: those of gradients, unlike those of means over a batch.

    **Arguments:** `enters` and `leaves`: of steps of such a layer the numbers of what they read that enters it, and of
    what they make that leaves it for the next one.
    """
    if all(s.times == 1 for s in sent):
        return frozenset()
    numbers = {n: k for k, n in enumerate(sorted(set().union(*leaves.values())))}
    reads, makes = _marked(numbers, enters), _marked(numbers, leaves)
    entered = [before | reads.get(i, 0) for i, before in enumerate(waits.marked(reads))]
    onward = [0] * len(numbers)  # of what enters a layer, what leaves it, or a later one, that waits for it
    for i, bits in makes.items():
        for k in _bits(entered[i]):
            onward[k] |= bits
    for k in range(len(numbers)):
        for i in range(len(numbers)):
            onward[i] |= onward[k] if onward[i] >> k & 1 else 0
    found = set[int]()
    for s in (s for s in sent if s.times > 1):
        own = 1 << waits.number[s.at]
        left = [k for i, bits in makes.items() if i == s.at or waits.sent[i] & own for k in _bits(bits)]
        later = functools.reduce(int.__or__, (onward[k] | 1 << k for k in left), 0)
        if not later & entered[s.at]:
            found.add(s.at)
    return frozenset(found)


def _marked(place: Mapping[int, int], numbers: Mapping[int, Collection[int]]) -> dict[int, int]:
    """Of each step the numbers that it has, a bit for each."""
    return {i: sum(1 << place[n] for n in found if n in place) for i, found in numbers.items()}


def _bits(of: int) -> Iterator[int]:
    return (k for k in range(of.bit_length()) if of >> k & 1)


def in_one(group: Sequence[Sent], threshold: float, layers: int) -> float:
    """Of how many equal layers the collectives are one: as fit, no part of one being divided."""
    nbytes, largest = sum(s.nbytes for s in group), max(s.nbytes for s in group)
    return min(max(1.0, threshold // largest * largest / nbytes), layers)


def post_order(after: Sequence[Sequence[int]], ends: Sequence[int]) -> Iterator[int]:
    """Every step after those that it waits for, the first of them and all that it needs first."""
    seen: set[int] = set()
    for end in (*ends, *range(len(after))):
        stack = [(end, iter(after[end]))] if end not in seen else []
        seen.add(end)
        while stack:
            i, waits = stack[-1]
            for j in waits:
                if j not in seen:
                    seen.add(j)
                    stack.append((j, iter(after[j])))
                    break
            else:
                stack.pop()
                yield i
