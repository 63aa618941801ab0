"""The batch of a drawn model: tensors and numbers, in one of the containers that a loader may yield."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAMES = ("categories", "condition", "count", "mask", "memory", "temperature", "weight", "x", "y")
CONTAINERS = ("dict", "tuple", "nested", "dataclass", "named", "mapping", "worded")


@dataclass
class Example:
    """A batch as a dataclass; `rest` is what only some models read."""

    x: Tensor
    y: Tensor
    rest: dict[str, Any]


class Pair(NamedTuple):
    """A batch as a named tuple."""

    inputs: dict[str, Any]
    target: Tensor


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as BatchEncoding of Hugging Face is."""


def pack(leaves: dict[str, Any], container: str) -> Any:
    """The leaves in a container; a tuple has them all, in the order of NAMES."""
    rest = {name: leaf for name, leaf in leaves.items() if name not in ("x", "y")}
    inputs = {name: leaf for name, leaf in leaves.items() if name != "y"}
    if container == "tuple":
        return tuple(leaves[name] for name in NAMES)
    if container == "nested":
        return {"inputs": [leaves["x"], rest], "target": (leaves["y"],)}
    if container == "dataclass":
        return Example(leaves["x"], leaves["y"], rest)
    if container == "named":
        return Pair(inputs, leaves["y"])
    if container == "mapping":
        return Encoding(leaves)
    if container == "worded":
        return {**leaves, "split": "train", "nothing": None}
    return leaves


def unpack(batch: Any) -> dict[str, Any]:
    """The leaves by name, of whatever `pack` made."""
    if isinstance(batch, Example):
        return {"x": batch.x, "y": batch.y, **batch.rest}
    if isinstance(batch, Pair):
        return {**batch.inputs, "y": batch.target}
    if isinstance(batch, tuple):
        return dict(zip(NAMES, batch, strict=True))
    assert isinstance(batch, Mapping)
    if "inputs" in batch:
        x, rest = batch["inputs"]
        return {"x": x, "y": batch["target"][0], **rest}
    return dict(batch)


def draw_leaves(source: str, rows: int, length: int, out: int, dtype: torch.dtype) -> dict[str, Any]:
    """All leaves but the target."""
    shapes = {
        "ids": (rows, length),
        "floats": (rows, length, 6),
        "image": (rows, 3, length, length),
        "video": (rows, 3, length, length, length),
    }
    x = torch.randn(shapes.get(source, (rows, 6)), dtype=dtype)
    return {
        "x": torch.randint(0, out, shapes["ids"]) if source == "ids" else x,
        "mask": (torch.arange(length) < torch.randint(2, length + 1, (rows, 1))).long(),
        "memory": torch.randn(rows, 3, 8, dtype=dtype),
        "condition": torch.randn(rows, 4, dtype=dtype),
        "categories": torch.randint(0, 12, (rows, 3)),
        "weight": torch.randint(0, 3, (rows,)).to(dtype) + 0.5,
        "temperature": 0.75,
        "count": 2,
    }
