"""Which collectives become one: what fits, in order, and needs nothing that waits for it."""

from unity_jax.cost.combining import Combiner


def test_collectives_are_combined_as_long_as_they_fit():
    combiner = Combiner(30)
    groups = [combiner.join("gather", size, 0) for size in (10, 20, 10, 31, 10)]
    assert groups == [0, 0, 1, 2, 1]


def test_kinds_are_apart():
    combiner = Combiner(30)
    assert combiner.join("gather", 1, 0) != combiner.join("reduce", 1, 0)


def test_what_needs_the_result_is_not_combined_with_it():
    combiner = Combiner(30)
    first = combiner.join("gather", 1, 0)
    second = combiner.join("gather", 1, 1 << first)
    assert second != first
    assert combiner.join("gather", 1, 0) == first


def test_groups_do_not_wait_for_each_other():
    """A reduction needs the first gather, so a gather that needs a member of that reduction cannot join the first."""
    combiner = Combiner(30)
    gather = combiner.join("gather", 1, 0)
    reduction = combiner.join("reduce", 1, 1 << gather)
    later = combiner.join("reduce", 1, 0)
    assert later == reduction
    assert combiner.join("gather", 1, 1 << later) != gather
