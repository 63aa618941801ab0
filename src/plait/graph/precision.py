"""Mixed precision as PyTorch does it: products in half precision by autocast, weights and sums in float32.

(Micikevicius et al. 2018, "Mixed Precision Training".) Modules that a pattern names have a precision of their own.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from plait.errors import PlanError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """`name` is fp32, bf16 or fp16; `exceptions` are (pattern of module names, name), of which the first that fits
    decides."""

    name: str = "fp32"
    exceptions: tuple[tuple[str, str], ...] = ()

    @property
    def scaled(self) -> bool:
        """Whether gradients could underflow, so that the loss is to be scaled."""
        return "fp16" in (self.name, *(name for _, name in self.exceptions))

    def refusal(self, error: Exception, module: str, op: str = "") -> PlanError | None:
        """What to say of an op that has no kernel in half precision; None for any other error."""
        said = (str(error).splitlines() or [""])[0]
        if self == FULL or not re.search(r"\b(Half|BFloat16)\b", said):
            return None
        what = f"{op or 'an op'} of {module or 'the loss'} has no kernel in half precision ({said})"
        remedy = f"compute it in float32: precision.{module}=fp32" if module else "cast what goes into it to float32"
        return PlanError(f"{what}; {remedy}")

    @contextmanager
    def computing(self, model: nn.Module, device: str) -> Iterator[None]:
        """Run the model's forward and the loss in this precision. PlanError for a pattern that fits no module."""
        with ExitStack() as stack:
            for module, name in self._exceptional(model):
                stack.enter_context(_hooked(module, name, device))
            if self.name != "fp32":
                stack.enter_context(torch.autocast(device, DTYPES[self.name]))
            yield

    def _exceptional(self, model: nn.Module) -> list[tuple[nn.Module, str]]:
        found: dict[str, tuple[nn.Module, str]] = {}
        for pattern, name in self.exceptions:
            here = [(path, module) for path, module in model.named_modules() if fnmatch.fnmatchcase(path, pattern)]
            if not here:
                some = ", ".join([path for path, _ in model.named_modules() if path][:5])
                raise PlanError(f"precision.{pattern}={name} fits no module of the model; it has {some}, ...")
            for path, module in here:
                found.setdefault(path, (module, name))
        return list(found.values())


@contextmanager
def _hooked(module: nn.Module, name: str, device: str) -> Iterator[None]:
    dtype = DTYPES[name]
    inside: list[Any] = []

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        context = torch.autocast(device, dtype if name != "fp32" else None, enabled=name != "fp32")
        context.__enter__()
        inside.append(context)
        return pytree.tree_map((cast), (args, kwargs)) if name == "fp32" else None

    def after(*_: Any) -> None:
        inside.pop().__exit__(None, None, None)

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_SHAPE_ALONE = frozenset(  # of their input only the shape is read: the gradient of the loss is 1
    getattr(torch.ops.aten, name).default
    for name in ("ones_like", "zeros_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)


def narrowest(graph: Graph) -> list[float]:
    """Of each output of a graph the coarsest rounding on the way to it: the largest `torch.finfo(dtype).eps` of a value
    in half precision that it comes from, 0.0 of an output that comes from none."""
    coarsest: dict[Node, float] = {}
    for node in graph.nodes:
        if node.op == "output":
            return [coarsest[result] if isinstance(result, Node) else 0.0 for result in node.args[0]]
        if node.target in _SHAPE_ALONE:
            coarsest[node] = 0.0
            continue
        values = node.meta["val"] if isinstance(node.meta.get("val"), (tuple, list)) else (node.meta.get("val"),)
        own = [torch.finfo(v.dtype).eps for v in values if isinstance(v, Tensor) and v.dtype in HALF]
        coarsest[node] = max([*own, *(coarsest[source] for source in node.all_input_nodes)], default=0.0)
    raise AssertionError("a graph without output")


HALF = (torch.bfloat16, torch.float16)
FULL = Precision()
