"""A case as a script that stands alone: the sources of what it uses, and the call of verify."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType
from typing import Any

from fuzz import (
    batches,
    blocks_any,
    blocks_chosen,
    blocks_image,
    blocks_sequence,
    blocks_video,
    grammar,
    loss,
    model,
    optimizers,
    shape,
    texts,
)
from fuzz.grammar import Spec, block
from fuzz.outcome import Outcome

_MODULES: tuple[ModuleType, ...] = (
    shape, blocks_any, blocks_sequence, blocks_image, blocks_video, blocks_chosen, model, batches, loss, optimizers,
    grammar,
)  # fmt: skip
_IMPORTS = """from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import plait
"""


def render(spec: Spec, plan: str, outcome: Outcome, origin: str) -> str:
    """The text of the script; `origin` says how the case was drawn."""
    sources = _sources()
    wanted = ["Shape", *(layer.name for layer in spec.layers), "Model", "Loss", "make", "make_batch"]
    used: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in used and name in sources and name != "block":
            used.add(name)
            wanted += [node.id for node in ast.walk(ast.parse(sources[name])) if isinstance(node, ast.Name)]
            wanted += _annotations(sources[name])
    body = "\n\n".join(text for name, text in sources.items() if name in used)
    plan, layouts = texts.split(plan)
    schedule = texts.own_schedule(plan)
    if schedule is not None:
        plan = texts.OWN.sub("schedule=./schedule.txt", plan)
        body += f"\n\nPath('schedule.txt').write_text({schedule!r})"
    given = f", layouts={layouts!r}" if layouts else ""
    last = outcome.detail.strip().splitlines()[-1:] or [outcome.reason]
    return (
        f'"""{outcome.kind}: {outcome.reason}\n\n{last[0]}\n{origin}\n"""\n\n{_IMPORTS}\n\ntorch.set_num_threads(1)\n\n'
        f"block = globals().__getitem__\n\n{body}\n\nspec = {spec!r}\nmade = make(spec)\n"
        "verifier = plait.Verifier(\n    made.model, made.loss_fn, made.batch, optimizer=made.optimizer,"
        f" clip_norm=spec.clip_norm\n)\nprint(verifier.verify({plan!r}{given}))\n"
    )


def _annotations(source: str) -> list[str]:
    """Names that a dataclass's fields are annotated with."""
    return [word for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute) for word in [node.attr]]


def _sources() -> dict[str, str]:
    """The source of every definition of the package by its name, in the order in which they can stand."""
    found: dict[str, str] = {}
    for module in _MODULES:
        text = inspect.getsource(module)
        for node in ast.parse(text).body:
            names: list[Any] = []
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            decorators = getattr(node, "decorator_list", [])
            start = min([node.lineno, *(each.lineno for each in decorators)])
            for name in names:
                found.setdefault(name, "\n".join(text.splitlines()[start - 1 : node.end_lineno]))
    return found


__all__ = ["block", "render"]
