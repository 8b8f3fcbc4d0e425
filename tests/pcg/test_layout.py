"""Layouts: notation, local shapes, and which of them exist."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from unity_jax.pcg.layout import Layout, layouts, short_dtype
from unity_jax.pcg.mesh import MeshAxes

MESH = MeshAxes(("data", "model"), (2, 4))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(((), ())), "f32[8,64]"),
        (Layout((("data",), ("model",))), "f32[8@data,64@model]"),
        (Layout((("data", "model"), ())), "f32[8@(data,model),64]"),
        (Layout((("data",), ()), (("model", "sum"),)), "f32[8@data,64]{sum:model}"),
        (Layout(((), ()), (("data", "max"), ("model", "max"))), "f32[8,64]{max:data,model}"),
    ],
)
def test_notation_is_that_of_jax_typeof(layout: Layout, text: str) -> None:
    assert layout.typeof((8, 64), "float32") == text


def test_partition_specs_go_both_ways() -> None:
    for layout in layouts((8, 16, 4), MESH, even=True):
        assert Layout.from_spec(layout.spec(), 3) == layout
    assert Layout.from_spec(P(None, ("data", "model")), 3) == Layout(((), ("data", "model"), ()))
    with pytest.raises(ValueError, match="partial"):
        Layout(((),), (("data", "sum"),)).spec()


def test_local_shapes_round_up() -> None:
    layout = Layout((("model",), ("data",)))
    assert layout.local_shape((10, 7), MESH) == (3, 4)
    assert not layout.divides((10, 7), MESH)
    assert layout.divides((12, 8), MESH)


def test_enumeration() -> None:
    found = layouts((8, 3), MESH, partial=True)
    assert found[0].is_replicated
    assert len(set(found)) == len(found)
    assert all(n >= MESH.size(a) for lay in found for n, a in zip((8, 3), lay.dims, strict=True))
    # data: nothing, rows, columns (3 >= 2), partial; model: nothing, rows, partial (columns are too few)
    assert len(found) == 4 * 3
    assert len(layouts((8, 3), MESH, even=True)) == 2 * 2
    assert layouts((), MESH) == (Layout(()),)


def test_axes_of_size_one_split_nothing() -> None:
    assert layouts((8,), MeshAxes(("a", "b"), (1, 2))) == (Layout(((),)), Layout((("b",),)))


def test_dtypes_are_short() -> None:
    assert [short_dtype(d) for d in ("bfloat16", "uint32", "bool", "complex64")] == ["bf16", "u32", "bool", "c64"]
