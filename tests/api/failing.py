"""What tests of bad input share: a plan of next to nothing, and a call that is to fail."""

import pytest

import unity_jax as unity
from tests.api.steps import X


def double(x):
    return x * 2


def plan(fun=double, *args, **settings):
    return unity.auto_shard(fun, **settings).plan(*(args or (X,)))


def fails(error, match, fun, *args, **kwargs):
    """The call raises this error, whose message fits on a screen, from which pytest hides our frames."""
    with pytest.raises(error, match=match) as caught:
        fun(*args, **kwargs)
    assert len(str(caught.value)) < 1500
    return caught
