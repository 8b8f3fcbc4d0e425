"""Addresses by size: no two buffers of one time overlap, and a small one goes into the gap that it fits best."""

from unity_jax.cost.lives import Lives
from unity_jax.cost.packing import packed_bytes
from unity_jax.cost.schedule import Step


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
    body = Lives([Step((), (), (0,)), Step((), (0,), ())], range(2), (4,), (1,), {})
    steps = [Step((), (), (0,)), Step((), (0,), (), workspace=2)]
    spans = [s for s in Lives(steps, range(2), (3,), (1,), {1: (body,)}).spans() if s[2]]
    assert spans == [(0, 3, 3), (1, 3, 2), (1, 2, 4)]
    assert packed_bytes(spans) == 9


def test_what_is_written_over_an_operand_has_one_span():
    steps = [Step((), (), (0,)), Step((), (0,), (1,), writes_over=True), Step((), (1,), ())]
    assert [s for s in Lives(steps, range(3), (8, 8), (1, 1), {}).spans() if s[2]] == [(0, 2, 8)]
