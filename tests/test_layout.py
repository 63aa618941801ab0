"""Layouts, meshes and annotations: values that print, parse and check themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import LayoutError, PlanError
from plait.plan.annotation import parse_annotation, resolve_annotations
from plait.spec.layout import (
    REPLICATE,
    Layout,
    Only,
    Partial,
    Shard,
    block_lengths,
    divides,
    local_shape,
    parse_blocks,
)
from plait.spec.mesh import Mesh

MESH = Mesh((("data", 2), ("tensor", 4)))


def test_mesh_ranks_and_coordinates_are_inverse() -> None:
    assert [MESH.rank(MESH.coordinates(r)) for r in range(MESH.size)] == list(range(8))
    assert MESH.group(5, "tensor") == (4, 5, 6, 7)
    assert MESH.groups("data") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_groups_of_many_ranks_are_made_from_strides() -> None:
    mesh = Mesh((("pipeline", 3), ("data", 2), ("tensor", 2)))
    for axis in mesh.names:
        assert mesh.groups(axis) == tuple(sorted({mesh.group(rank, axis) for rank in range(mesh.size)}))
    large = Mesh((("pipeline", 16), ("data", 1024), ("tensor", 8)))
    assert [len(large.groups(axis)) for axis in large.names] == [8192, 128, 16384]
    assert [large.stride(axis) for axis in large.names] == [8192, 8, 1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Mesh((("data", 2), ("data", 2))), "once"),
        (lambda: Mesh((("data", 0),)), "size 0"),
        (lambda: MESH.axis_size("pipe"), "unknown axis 'pipe'"),
        (lambda: MESH.coordinates(8), "rank 8"),
    ],
)
def test_mesh_refuses(make, text) -> None:
    with pytest.raises(PlanError, match=text):
        make()


@pytest.mark.parametrize(
    "text",
    [
        "f32[]",
        "f32[8@data, 128, 768@tensor/3]",
        "f32[8@data, 768@tensor/4+1+1]",
        "bf16[8@data, 16] +tensor",
        "f32[4] +data ^tensor",
        "f32[64, 3, 3, 3] only:tensor=1",
    ],
)
def test_layout_prints_what_it_parses(text: str) -> None:
    assert str(Layout.parse(text)) == text


placements = st.sampled_from(
    [Shard(0), Shard(1), Shard(1, 3), Shard(1, (4, 1, 1)), Partial(), Partial("max"), Partial("min"), Only(1)]
)


@given(st.tuples(placements, placements), st.tuples(st.integers(1, 99), st.integers(1, 99)))
def test_layout_round_trip(given_placements, shape) -> None:
    layout = Layout("f32", shape, tuple(zip(("data", "tensor"), given_placements, strict=True)))
    again = Layout.parse(str(layout))
    assert again.shape == shape
    assert dict(again.placements) == dict(layout.placements)


def test_local_shape_composes_axes() -> None:
    assert Layout.parse("f32[16@data@tensor, 12@pipe]").shape == (16, 12)
    assert Layout.parse("f32[16@data@tensor, 12]").local_shape(MESH) == (2, 12)
    assert local_shape((12, 6), Shard(0, 3), 2) == (6, 6)
    assert local_shape((24, 6), Shard(0, (4, 1, 1)), 2) == (12, 6)


def test_unequal_blocks_are_proportions() -> None:
    assert Shard(0, (8, 2, 2)) == Shard(0, (4, 1, 1)) and Shard(0, (5, 5)) == Shard(0, 2)
    assert divides((48,), Shard(0, (4, 1, 1)), 8) and not divides((48,), Shard(0, (4, 1, 1)), 16)
    assert block_lengths(48, (4, 1, 1)) == (32, 8, 8)
    assert parse_blocks("4+1+1") == (4, 1, 1) and parse_blocks("2+2") == 2
    assert parse_blocks("0+1") is None and parse_blocks("0") is None


def test_a_shard_that_does_not_divide_names_axis_size_and_shape() -> None:
    with pytest.raises(LayoutError, match=r"tensor=4 does not divide dim 1 .* 6 .*\[8, 6\]"):
        Layout.parse("f32[8, 6@tensor]").local_shape(MESH)


@pytest.mark.parametrize("text", ["f32", "f32[a]", "f32[2] *data", "f32[2@data, 2@data]"])
def test_layout_refuses(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.parse(text)


def test_annotations() -> None:
    assert parse_annotation("tensor, -", (8, 6), MESH, "w") == {"data": REPLICATE, "tensor": Shard(0)}
    assert parse_annotation("-, tensor/3", (8, 24), MESH, "w")["tensor"] == Shard(1, 3)
    assert parse_annotation("only:tensor=3", (8, 6), MESH, "w") == {"tensor": Only(3)}
    assert parse_annotation("-", (8, 6), MESH, "w") == {"data": REPLICATE, "tensor": REPLICATE}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor", "1 dims but w has shape"),
        ("model, -", "names the axis 'model'"),
        ("-, tensor", r"tensor=4 does not divide dim 1 of w: 6"),
        ("tensor, tensor", "two dims over the axis"),
        ("only:tensor=4", "axis tensor has ranks 0 to 3"),
        ("tensor/x, -", "not a number of blocks"),
        ("tensor/2+0, -", "not a number of blocks"),
    ],
)
def test_annotations_refuse(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parse_annotation(text, (8, 6), MESH, "w")


def test_a_pattern_that_matches_nothing_offers_near_names() -> None:
    shapes = {"layers.0.q_proj.weight": (8, 8), "layers.0.k_proj.weight": (8, 8)}
    with pytest.raises(LayoutError, match=r"matches no parameter; did you mean layers\.0\.q_proj\.weight"):
        resolve_annotations({"*.q_prj.weight": "tensor, -"}, shapes, MESH)


def test_the_first_pattern_decides() -> None:
    shapes = {"a.weight": (8, 8), "b.weight": (8, 8)}
    found = resolve_annotations({"a.*": "-", "*.weight": "tensor, -"}, shapes, MESH)
    assert found["a.weight"]["tensor"] == REPLICATE
    assert found["b.weight"]["tensor"] == Shard(0)
