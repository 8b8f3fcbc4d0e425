"""The order of steps: what frees memory first, what runs beside a collective, and that every order can run."""

import random

from unity_jax.xla.latency_hiding_scheduler import hidden
from unity_jax.xla.list_scheduler import listed
from unity_jax.xla.schedule import Schedule, Step


def ordered(schedule):
    return hidden(schedule, listed(schedule))


def test_what_frees_memory_goes_first():
    """Two chains of a large value and a small one: the first is finished before the second begins."""
    steps = [
        Step((), (), (0,)),
        Step((), (), (1,)),
        Step((0,), (0,), (2,)),
        Step((1,), (1,), (3,)),
        Step((2, 3), (2, 3), ()),
    ]
    assert listed(Schedule(steps, [100.0, 100.0, 1.0, 1.0])) in ([0, 2, 1, 3, 4], [1, 3, 0, 2, 4])


def beside(*costs):
    """A collective that the last step awaits, and steps of these costs that only the last step reads."""
    steps = [Step((), (), (0,)), Step((0,), (0,), (1,)), Step((1,), (0, 1), (), start=1, latency=50.0)]
    steps += [Step((0,), (0,), (2 + i,), cost) for i, cost in enumerate(costs)]
    made = tuple(range(2, 2 + len(costs)))
    return Schedule([*steps, Step((2, *range(3, 3 + len(costs))), (1, *made), ())], [1.0] * (2 + len(costs)))


def test_other_steps_run_between_start_and_done():
    order = ordered(beside(10.0, 10.0))
    assert order.index(1) < order.index(3) < order.index(2)
    assert order.index(1) < order.index(4) < order.index(2)


def test_only_as_much_runs_beside_a_collective_as_it_takes():
    """Six kernels of 20 us could run beside either of two collectives of 50 us, or none: three do beside each."""
    steps = [Step((), (), (0,)), Step((0,), (0,), (1,)), Step((0,), (0,), (2,))]
    steps += [Step((i,), (0, i), (), start=i, latency=50.0) for i in (1, 2)]
    steps += [Step((0,), (0,), (3 + i,), 20.0) for i in range(6)]
    order = ordered(Schedule([*steps, Step(tuple(range(3, 11)), tuple(range(1, 9)), ())], [1.0] * 9))
    for start, done in ((1, 3), (2, 4)):
        assert sum(order.index(start) < order.index(i) < order.index(done) for i in range(5, 11)) == 3


def test_an_update_is_late_because_its_arguments_wait_for_nothing_else():
    """Of two sums of gradients, each with an update that reads two moments as well, both updates are last."""
    moments = [Step((), (), ()) for _ in range(4)]
    steps = [*moments, Step((), (), (0,)), Step((), (), (1,)), Step((4,), (0,), (2,)), Step((5,), (1,), (3,))]
    steps += [Step((6, 0, 1), (2,), (4,)), Step((7, 2, 3), (3,), (5,))]
    steps += [Step((), (), (6,)), Step((10,), (6,), (), start=10), Step((8, 9, 11), (4, 5, 6), ())]
    order = ordered(Schedule(steps, [8.0, 8.0, 4.0, 4.0, 1.0, 1.0, 1.0]))
    assert set(order) == set(range(4, 13))
    assert max(order.index(i) for i in (6, 7)) < min(order.index(i) for i in (8, 9))


def test_one_collective_is_in_flight_at_a_time():
    steps = []
    for i in range(3):
        steps += [Step((), (), (2 * i,)), Step((3 * i,), (2 * i,), (2 * i + 1,))]
        steps.append(Step((3 * i + 1,), (2 * i, 2 * i + 1), (), start=3 * i + 1, latency=50.0))
    order = ordered(Schedule([*steps, Step((2, 5, 8), (1, 3, 5), ())], [1.0] * 6))
    flying = 0
    for i in order:
        flying += (i % 3 == 1) - (i % 3 == 2) if i < 9 else 0
        assert flying <= 1


def test_a_gradient_that_nothing_waits_for_is_computed_beside_a_later_collective():
    """A product that only the end reads is not computed where its operand appears, which therefore lives on."""
    steps = [
        Step((), (), (0,)),  # activations
        Step((0,), (0,), (1,)),  # their product: a gradient
        Step((0,), (0,), (2,)),  # what goes on to the next layer
        Step((2,), (2,), (3,)),
        Step((3,), (3,), (4,)),  # a collective
        Step((4,), (3, 4), (), start=4, latency=50.0),
        Step((1, 5), (1, 4), ()),
    ]
    order = ordered(Schedule(steps, [100.0, 10.0, 5.0, 5.0, 5.0]))
    assert order.index(4) < order.index(1) < order.index(5)


def random_steps(rng):
    """Kernels and collectives that read the results of others."""
    steps, there = [], []  # each result, with the step after which it is there
    for result in range(30):
        needs = rng.sample(there, min(len(there), rng.randrange(3)))
        after, reads = tuple(at for at, _ in needs), tuple(b for _, b in needs)
        steps.append(Step(after, reads, (result,), rng.choice([1.0, 10.0])))
        if rng.random() < 0.3:
            start = len(steps) - 1
            steps.append(Step((start,), (*reads, result), (), start=start, latency=50.0))
        there.append((len(steps) - 1, result))
    return steps


def test_every_order_can_run():
    for seed in range(30):
        rng = random.Random(seed)
        steps = random_steps(rng)
        order = ordered(Schedule(steps, [rng.random() for _ in range(30)]))
        place = {i: p for p, i in enumerate(order)}
        assert sorted(order) == list(range(len(steps)))
        assert all(place[j] < place[i] for i, step in enumerate(steps) for j in step.after)
