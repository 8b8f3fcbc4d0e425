"""Which collectives XLA combines into one, which then waits for all their operands.

    all-gather    a, b, c   of 8 MiB each, none of which needs another     one of 24 MiB
    all-gather    d         of 8 MiB, which fits no more                   the next
    all-gather    e         of 40 MiB                                      alone

Of one kind, until one does not fit or depends on another. It takes them in the order in which the results of the
program need them: what only the last result needs comes last
(https://github.com/openxla/xla/blob/main/xla/service/collective_combiner_utils.h).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol

from unity_jax.network.collectives import Collective
from unity_jax.pcg.graph import Op
from unity_jax.xla.targets import Target


class Waiting(Protocol):
    """A step of a program, which waits for others."""

    @property
    def after(self) -> tuple[int, ...]: ...


class Sent(NamedTuple):
    """A collective and its steps, which are one if it runs beside no other: `kind`: those of one may be combined;
    `nbytes`: of its result."""

    kind: Hashable
    nbytes: float
    start: int
    done: int
    of: Collective


def kind(op: Op, target: Target, summed: bool = False) -> Hashable | None:
    """What collectives have in common that may be combined; None for the move of this op if its kind never is.

    **Arguments:** `summed`: it is an all-reduce, whatever the move.
    """
    move = op.params["move"]
    how = "reduce" if summed else move.kind
    if how not in target.combined:
        return None
    of = how != "combine" and (str(op.outputs[0].dtype), *(r for a, r in move.before.partial if a in move.axes))
    return how, move.axes, None if how == "reduce" else move.dim, of


def together(
    sent: Sequence[Sent], steps: Sequence[Waiting], ends: Sequence[int], threshold: float
) -> Iterator[list[Sent]]:
    """The groups of collectives that become one; of one alone where nothing joins it.

    **Arguments:** `ends`: the steps that make the results of the program, in their order; `threshold`: the most bytes
    of a group.
    """
    number = {s.done: i for i, s in enumerate(sent)}
    before = [0] * len(steps)  # the collectives that a step depends on, a bit for each
    order: list[int] = []
    for i in post_order(steps, ends):
        for j in steps[i].after:
            before[i] |= before[j] | (1 << number[j] if j in number else 0)
        if i in number:
            order.append(number[i])
    needs = [before[s.start] for s in sent]
    alike: dict[Hashable, list[int]] = {}
    for i in order:
        if sent[i].nbytes <= threshold:
            alike.setdefault(sent[i].kind, []).append(i)
    taken: set[int] = set()
    for first in order:
        if first in taken:
            continue
        group, size, members, needed = [first], sent[first].nbytes, 1 << first, needs[first]
        for i in alike[sent[first].kind] if size <= threshold else ():
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


def post_order(steps: Sequence[Waiting], ends: Sequence[int]) -> Iterator[int]:
    """Every step after those that it waits for, the first of them and all that it needs first."""
    seen: set[int] = set()
    for end in (*ends, *range(len(steps))):
        stack = [(end, iter(steps[end].after))] if end not in seen else []
        seen.add(end)
        while stack:
            i, waits = stack[-1]
            for j in waits:
                if j not in seen:
                    seen.add(j)
                    stack.append((j, iter(steps[j].after)))
                    break
            else:
                stack.pop()
                yield i
