"""A folded program takes what it takes, and as often more what one more layer takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from unity_jax.cost.layers import repeated, simulated
from unity_jax.cost.tasks import COMPUTE, Task
from unity_jax.cost.timeline import simulate
from unity_jax.machine.machine import Machine

CPU = Machine.preset("cpu:2")


def chain(times: Sequence[int]) -> list[Task]:
    """Alike tasks of a second, each behind the one before; those that stand for several hand on to the next layer."""

    def task(i: int, n: int) -> Task:
        between = (i,) if n > 1 else ()
        return Task(COMPUTE, 1.0, (i - 1,) if i else (), times=n, enters=between, leaves=between)

    return [task(i, n) for i, n in enumerate(times)]


@pytest.mark.parametrize("times", [1, 2, 5])
def test_layers_follow_each_other_in_every_pass(times: int) -> None:
    """In the forward pass and in the backward pass."""
    forward_and_backward = chain([1, times, 1, 1, times, 1])
    assert simulated(forward_and_backward, CPU).step_seconds == pytest.approx(4 + 2 * times)


def test_a_layer_is_repeated_behind_itself() -> None:
    again = repeated(chain([1, 3, 1, 3, 1]), 3)
    assert [task.after for task in again] == [(), (0,), (0, 1), (1, 2), (3,), (3, 4), (4, 5)]


def test_what_enters_a_layer_and_is_computed_again_is_not_awaited() -> None:
    """It is made of what the backward pass made of other layers: that would wait for itself."""
    forward, other, backward = chain([3, 1, 3])
    again = repeated([dataclasses.replace(forward, enters=(2,)), other, backward], 3)
    assert [task.after for task in again] == [(), (), (0, 1), (2,), (2, 3)]


def test_what_awaits_itself_is_never_simulated() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        simulate([Task(COMPUTE, 1.0, (1,)), Task(COMPUTE, 1.0, (0,))], CPU)
