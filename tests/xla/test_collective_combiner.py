"""Which collectives become one: what fits, in the order in which results need them, and needs nothing that waits for
it."""

from unity_jax.network.collectives import Collective
from unity_jax.xla.collective_combiner import Sent, Waits, together

OF = Collective("all_gather", ("x",), 1, 1, 1, 1e-6, "")


def groups(collectives: list[tuple[str, float, tuple[int, ...]]], ends: tuple[int, ...] = (), threshold: float = 30.0):
    """The groups of collectives, each a step of its own: its kind, bytes and the steps that it waits for."""
    after = [needs for _, _, needs in collectives]
    sent = [Sent(kind, nbytes, i, OF) for i, (kind, nbytes, _) in enumerate(collectives)]
    return [[s.at for s in group] for group in together(sent, Waits(sent, after, ends), threshold)]


def test_collectives_are_combined_as_long_as_they_fit():
    assert groups([("gather", size, ()) for size in (10, 20, 10, 31, 10)]) == [[0, 1], [2, 4], [3]]


def test_kinds_are_apart():
    assert groups([("gather", 1, ()), ("reduce", 1, ()), ("gather", 1, ())]) == [[0, 2], [1]]


def test_what_needs_the_result_is_not_combined_with_it():
    assert groups([("gather", 1, ()), ("gather", 1, (0,)), ("gather", 1, ())]) == [[0], [1, 2]]


def test_groups_do_not_wait_for_each_other():
    """Both gathers are one; the first reduction needs the first of them and the second is needed by the other, so the
    reductions are two."""
    collectives = [("gather", 1.0, ()), ("reduce", 1.0, (0,)), ("reduce", 1.0, ()), ("gather", 1.0, (2,))]
    assert groups(collectives) == [[0, 3], [1], [2]]


def test_what_only_the_last_result_needs_is_combined_last():
    """The loss needs the second, which comes after the first in the program and before the third in it."""
    collectives = [("reduce", 10.0, ()), ("reduce", 10.0, ()), ("reduce", 10.0, (0,)), ("reduce", 10.0, (2,))]
    assert groups(collectives, ends=(3, 1)) == [[0], [2], [3, 1]]
    assert groups(collectives, ends=(1, 3)) == [[1, 0], [2], [3]]
