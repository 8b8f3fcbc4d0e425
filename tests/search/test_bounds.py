"""Lower bounds against brute force: of all assignments, and of those that hold one value of one variable."""

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_jax.search import eliminate
from unity_jax.search.bounds import lower_bound
from unity_jax.search.eliminate import easy, eliminated, minimize, order
from unity_jax.search.network import Network
from unity_jax.search.tables import Store

pytestmark = pytest.mark.slow  # the same numbers on every JAX version


@st.composite
def networks(draw):
    """Up to six variables of two or three values; tables of one to three of them, some entries forbidden."""
    sizes = draw(st.lists(st.integers(2, 3), min_size=1, max_size=6))
    store = Store(1.0)
    more = st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=3)
    scopes = [(v,) for v in range(len(sizes))] + [tuple(sorted(s)) for s in draw(st.lists(more, max_size=9))]
    entries = st.sampled_from([0.0, 0.0, 1.0, 2.0, 3.0, 7.0, 20.0, np.inf])

    def table(scope):
        shape = tuple(sizes[v] for v in scope)
        count = int(np.prod(shape))
        return store.add(np.array(draw(st.lists(entries, min_size=count, max_size=count))).reshape(shape))

    return Network(store, sizes, [(scope, table(scope)) for scope in scopes], float(draw(st.integers(0, 3))))


def cost(net, x):
    """Of one assignment."""
    return net.constant + sum(net.store[name][tuple(x[v] for v in scope)] for scope, name in net.factors)


def least_costs(net):
    """(variable, value) the least cost of assignments with that value."""
    least = [np.full(k, np.inf) for k in net.sizes]
    for x in itertools.product(*map(range, net.sizes)):
        for v, a in enumerate(x):
            least[v][a] = min(least[v][a], cost(net, x))
    return least


@pytest.mark.parametrize("table_limit", [1, 3, 9, 1000])
@settings(max_examples=100, deadline=None)
@given(net=networks(), sweeps=st.integers(1, 3))
def test_no_assignment_costs_less_than_its_bounds(table_limit, net, sweeps):
    least, bound = least_costs(net), lower_bound(net, sweeps, table_limit)
    assert sorted(bound.least) == list(range(len(net.sizes)))
    assert net.store.largest <= max(table_limit, 1)
    assert bound.value <= min(least[0])
    for v, costs in enumerate(least):
        assert 0 <= bound.assignment[v] < net.sizes[v]
        assert (bound.value <= bound.least[v]).all()
        assert (bound.least[v] <= costs).all() and not np.isnan(bound.least[v]).any()


@settings(max_examples=100, deadline=None)
@given(net=networks())
def test_what_is_eliminated_whole_is_bounded_exactly(net):
    least, bound = least_costs(net), lower_bound(net, 1, 1000)
    assert bound.value == min(least[0]) == cost(net, bound.assignment)


@settings(max_examples=100, deadline=None)
@given(net=networks(), most=st.sampled_from([1, 3, 9]))
def test_eliminating_keeps_the_least_cost_of_every_value_of_the_other_variables(net, most):
    before = least_costs(net)
    found = eliminated(net, easy(net, most))
    after = least_costs(found.left)
    for v in set(range(len(net.sizes))) - set(found.buckets):
        np.testing.assert_array_equal(before[v], after[v])


@settings(max_examples=100, deadline=None)
@given(net=networks(), part=st.sampled_from([1, 2, 4, 8]))
def test_sums_that_are_made_in_parts_are_the_same(net, part):
    with mock.patch.object(eliminate, "PART", part):
        found = minimize(net, order(net.sizes, [scope for scope, _ in net.factors]))
    assert found.value == least_costs(net)[0].min()
