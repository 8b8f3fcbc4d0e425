"""What XLA:TPU puts in the places of donated arguments.

A gathered result is not written in the place of its argument but copied there at the end, and what reads the argument
reads a copy that is made at the start. In between the place is free for others, one at a time:

    argument   arg arg . . . . . . . . result
    place      arg arg . grads grads . result
    heap       .   copy copy copy copy copy .

The largest choose first; the last place that holds a buffer is taken (`BufferAssigner` in
https://github.com/openxla/xla/blob/main/xla/service/buffer_assignment.cc).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def placed(lives: Mapping[int, tuple[int, int]], size: Sequence[int], free: Sequence[tuple[int, float]]) -> set[int]:
    """The buffers that lie where an argument was.

    **Arguments:** `lives`: of each buffer, the first and the last position in the program when it exists, in post order
    of what makes them; `size`: bytes of each buffer; `free`: of each place, also in post order, the position when its
    argument is read last, and its bytes.
    """
    found: set[int] = set()
    taken = [([(0, position)], nbytes) for position, nbytes in reversed(free)]
    for b in sorted(lives, key=lambda b: -size[b]):
        first, last = lives[b]
        for spans, nbytes in taken:
            if 0 < size[b] <= nbytes and all(z < first or last < a for a, z in spans):
                spans.append((first, last))
                found.add(b)
                break
    return found
