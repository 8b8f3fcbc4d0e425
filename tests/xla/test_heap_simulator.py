"""Addresses in the order of the program, where gaps stay unused, and by size, where small ones go into gaps."""

from unity_jax.xla.heap_simulator import Heap, packed_bytes
from unity_jax.xla.live_ranges import LiveRanges
from unity_jax.xla.schedule import Step


def test_the_smallest_gap_that_fits_is_taken():
    heap = Heap()
    a, b, c, d = (heap.take(n) for n in (40, 10, 20, 10))
    assert (a, b, c, d) == (0, 40, 50, 70)
    heap.give(a, 40)
    heap.give(c, 20)
    assert heap.take(15) == 50
    assert heap.take(5) == 65
    assert heap.take(41) == 80
    assert heap.size == 121


def test_gaps_beside_each_other_become_one():
    heap = Heap()
    starts = [heap.take(10) for _ in range(4)]
    for i in (0, 2, 1):
        heap.give(starts[i], 10)
    assert heap.take(30) == 0
    heap.give(starts[3], 10)
    assert heap.take(25) == 30  # the last gap grows
    assert heap.size == 55


def test_a_long_life_between_short_ones_costs_more_than_is_alive():
    """a of 4 is there first, then the long b of 1 above it; c of 5 fits into no gap once a is gone."""
    steps = [Step((), (), (0,)), Step((), (0,), (1,)), Step((), (), (2,)), Step((), (1, 2), ())]
    ranges = LiveRanges(steps, range(4), (4, 1, 5), (1, 1, 1), {})
    heap = Heap()
    assert ranges.run(heap) == (6, 2)
    assert heap.size == 10
    assert ranges.live(2) == [1, 2]


def test_bodies_take_from_the_same_heap():
    """The loop holds 8 in two buffers, beside the 3 that it reads and its workspace of 2."""
    body = LiveRanges([Step((), (), (0, 1)), Step((), (0, 1), ())], range(2), (4, 4), (1, 1), {})
    steps = [Step((), (), (0,)), Step((), (0,), (), workspace=2)]
    heap = Heap()
    assert LiveRanges(steps, range(2), (3,), (1,), {1: (body,)}).run(heap) == (13, 1)
    assert heap.size == 13


def test_what_is_never_there_at_once_shares_its_place():
    assert packed_bytes([(0, 1, 8), (2, 3, 5), (4, 4, 8)]) == 8


def test_what_is_there_at_once_lies_side_by_side():
    assert packed_bytes([(0, 2, 8), (1, 3, 5), (3, 4, 8)]) == 13


def test_a_gap_is_filled():
    """4 lies above 8; once 8 is gone, 3 goes below it."""
    assert packed_bytes([(0, 1, 8), (1, 3, 4), (2, 3, 3)]) == 12


def test_lives_that_interlock_leave_a_gap():
    """13 are there at time 1: 6 from 0 on; 4 above the 8 of time 2; and 3, for which the 2 between are too few."""
    assert packed_bytes([(2, 3, 8), (0, 1, 6), (1, 2, 4), (0, 1, 3)]) == 15


def test_nothing_takes_nothing():
    assert packed_bytes([]) == packed_bytes([(0, 1, 0)]) == 0


def test_spans_of_a_program_with_a_loop():
    """The loop runs at times 1 to 3: its body makes and reads 4, beside the 3 that it reads and the 2 that it needs."""
    body = LiveRanges([Step((), (), (0,)), Step((), (0,), ())], range(2), (4,), (1,), {})
    steps = [Step((), (), (0,)), Step((), (0,), (), workspace=2)]
    spans = [s for s in LiveRanges(steps, range(2), (3,), (1,), {1: (body,)}).spans() if s[2]]
    assert spans == [(0, 3, 3), (1, 3, 2), (1, 2, 4)]
    assert packed_bytes(spans) == 9


def test_what_is_written_over_an_operand_has_one_span():
    steps = [Step((), (), (0,)), Step((), (0,), (1,), over=(0,)), Step((), (1,), ())]
    assert [s for s in LiveRanges(steps, range(3), (8, 8), (1, 1), {}).spans() if s[2]] == [(0, 2, 8)]
