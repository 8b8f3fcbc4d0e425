"""Places of arguments that are free: one buffer at a time, the largest first, in the last place that holds it."""

from unity_jax.xla.buffer_assignment import placed


def test_one_buffer_at_a_time():
    assert placed({0: (1, 3), 1: (3, 4), 2: (4, 5)}, [8, 8, 8], [(0, 8)]) == {0, 2}


def test_nothing_before_the_argument_is_read_last():
    assert placed({0: (0, 3), 1: (2, 4)}, [8, 8], [(1, 8)]) == {1}
    assert placed({0: (1, 3)}, [8], [(1, 8)]) == set()  # what reads it last does not write over it


def test_the_largest_that_fits_comes_first():
    assert placed({0: (1, 3), 1: (1, 3), 2: (1, 3)}, [4, 8, 16], [(0, 8)]) == {1}


def test_the_last_place_is_taken():
    """The first buffer takes the second place though it fits into both; so the second one, which is there earlier,
    still has the first place."""
    assert placed({0: (4, 5), 1: (2, 5)}, [8, 8], [(1, 8), (3, 8)]) == {0, 1}


def test_what_is_not_in_memory_takes_no_place():
    assert placed({0: (1, 3)}, [0], [(0, 8)]) == set()
