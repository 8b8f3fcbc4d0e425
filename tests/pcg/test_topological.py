"""Orders in which things can come that need others before them."""

from hypothesis import given
from hypothesis import strategies as st

from unity_jax.pcg.topological import topological


@st.composite
def needs(draw: st.DrawFn) -> list[set[int]]:
    """Of each, which others it needs: any at all, so that there are circles."""
    count = draw(st.integers(0, 8))
    return [draw(st.sets(st.integers(0, count - 1), max_size=3)) for _ in range(count)]


@given(needs(), st.data())
def test_each_comes_once_after_what_it_needs_lowest_first(before: list[set[int]], data: st.DataObject) -> None:
    rank = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=len(before), max_size=len(before)))
    order, came = topological(before, rank), set[int]()
    for i in order:
        could = [j for j, needed in enumerate(before) if j not in came and needed <= came]
        assert i == min(could, key=lambda j: (j if rank is None else rank[j], j))
        came.add(i)
    assert all(not needed <= came for i, needed in enumerate(before) if i not in came)  # these wait for themselves
