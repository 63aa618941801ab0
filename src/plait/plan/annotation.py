"""Annotations: the layouts of parameters that a user asks for, by pattern of their names.

    {"*.q_proj.weight": "tensor, -", "*.c_attn.weight": "-, tensor/3", "branch1.*": "only:tensor=1", "*.norm.*": "-"}

A text has one word for each dim: an axis, an axis with a number of blocks (`tensor/3`, or `tensor/4+1+1` for unequal
blocks), or `-` for a dim that is not sharded. A single `-` replicates a parameter of any number of dims, and
`only:axis=i` puts it on one rank of the axis. The first pattern that matches a parameter counts.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping

from plait.errors import LayoutError
from plait.spec.layout import REPLICATE, Only, Placement, Shard, check_shard, parse_blocks
from plait.spec.mesh import Mesh

Annotations = Mapping[str, str]
AxisPlacements = dict[str, Placement]  # by axis


def parse_annotation(text: str, shape: tuple[int, ...], mesh: Mesh, name: str) -> AxisPlacements:
    """The placement along each axis of the mesh that an annotation gives a parameter of `shape` called `name`.

    Raises:
        LayoutError: the text cannot be read, or does not fit the shape or the mesh.
    """
    if found := re.fullmatch(r"\s*only:(\w+)=(\d+)\s*", text):
        axis, index = found[1], int(found[2])
        _check_axis(axis, mesh, text, name)
        if index >= mesh.axis_size(axis):
            raise LayoutError(f"{text!r} for {name}: axis {axis} has ranks 0 to {mesh.axis_size(axis) - 1}")
        return {axis: Only(index)}
    words = [word.strip() for word in text.split(",")]
    if words == ["-"]:
        return dict.fromkeys(mesh.names, REPLICATE)
    if len(words) != len(shape):
        raise LayoutError(
            f"{text!r} has {len(words)} dims but {name} has shape {list(shape)}; give one word for each dim"
        )
    found_placements: AxisPlacements = dict.fromkeys(mesh.names, REPLICATE)
    left = shape
    for dim, word in enumerate(words):
        if word == "-":
            continue
        axis, _, blocks = word.partition("/")
        _check_axis(axis, mesh, text, name)
        parsed = parse_blocks(blocks or "1")
        if parsed is None:
            raise LayoutError(
                f"{text!r} for {name}: {blocks!r} is not a number of blocks; write 3 for three equal blocks, 4+1+1 for"
                f" unequal ones"
            )
        if found_placements[axis] != REPLICATE:
            raise LayoutError(f"{text!r} for {name} shards two dims over the axis {axis}; name it for one of them")
        placement = Shard(dim, parsed)
        size = mesh.axis_size(axis)
        check_shard(left, placement, size, axis, name)
        left = tuple(n // size if i == dim else n for i, n in enumerate(left))
        found_placements[axis] = placement
    return found_placements


def resolve_annotations(
    annotations: Annotations, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh
) -> dict[str, AxisPlacements]:
    """The placements of every parameter that a pattern matches, by name.

    Raises:
        LayoutError: a pattern matches no parameter, or its text does not fit one.
    """
    resolved: dict[str, AxisPlacements] = {}
    for pattern, text in annotations.items():
        names = [name for name in shapes if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise LayoutError(f"the layout pattern {pattern!r} matches no parameter; {_hint(pattern, shapes)}")
        for name in names:
            if name not in resolved:
                resolved[name] = parse_annotation(text, shapes[name], mesh, name)
    return resolved


def _check_axis(axis: str, mesh: Mesh, text: str, name: str) -> None:
    if axis not in mesh.names:
        known = ", ".join(mesh.names) or "none"
        raise LayoutError(f"{text!r} for {name} names the axis {axis!r}; the axes of the plan are {known}")


def _hint(pattern: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(pattern.replace("*", ""), list(names), n=3, cutoff=0.3)
    return f"did you mean {', '.join(near)}?" if near else "the model has no parameter of a similar name"
