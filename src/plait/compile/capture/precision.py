"""Mixed precision: by PyTorch's autocast, or with parameters in half precision (parameter_precision.py).

Under autocast matrix products are in half precision, weights and sums in float32 (Micikevicius et al. 2018, "Mixed
Precision Training"). Modules that match a pattern have a precision of their own.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from plait.compile.capture.model_facts import model_facts
from plait.compile.capture.parameter_precision import cast_parameters
from plait.compile.ir.calls import op_spec_of
from plait.compile.ops.dims import HALF
from plait.errors import PlanError, Refusal
from plait.plan.legality import of_exception
from plait.plan.plan import OF_PARAMETERS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """`name` is fp32, bf16 or fp16, by autocast, or bf16-params or fp16-params. `exceptions` are (pattern of module
    names, name); the first match decides."""

    name: str = "fp32"
    exceptions: tuple[tuple[str, str], ...] = ()

    @property
    def scaled(self) -> bool:
        """Whether gradients could underflow, so that the loss must be scaled."""
        return any(name.startswith("fp16") for name in (self.name, *(name for _, name in self.exceptions)))

    @property
    def of_parameters(self) -> torch.dtype | None:
        """The dtype in which the model reads its parameters, if it is not theirs."""
        return DTYPES[self.name.removesuffix(OF_PARAMETERS)] if self.name.endswith(OF_PARAMETERS) else None

    def refusal(self, error: Exception, module: str, op: str = "") -> PlanError | None:
        """The PlanError for an op without a kernel in half precision, or for weights of another dtype; None for any
        other error."""
        said = (str(error).splitlines() or [""])[0]
        if self == FULL:
            return None
        what = f"{op or 'an op'} of {module or 'the model or the loss'}"
        if self.of_parameters is not None and re.search(r"\b(Half|BFloat16|dtypes?|scalar type)\b", said):
            remedy = f"precision.{module}=fp32" if module else "precision.MODULE=fp32, or cast what it gets"
            what = f"{what} does not take these dtypes with precision={self.name} ({said})"
            return PlanError(Refusal(what, "", f"compute it in float32: {remedy}"))
        if re.search(r"\b(Half|BFloat16)\b", said):
            remedy = f"compute it in float32: precision.{module}=fp32" if module else "cast what it gets to float32"
            return PlanError(Refusal(f"{what} has no kernel in half precision ({said})", "", remedy))
        if "mixed dtype" in said:
            remedy = "give the model float32 weights, which is what mixed precision is for, or leave precision= out"
            return PlanError(
                Refusal(f"{what} has no kernel for these dtypes in precision={self.name} ({said})", "", remedy)
            )
        return None

    @contextmanager
    def computing(self, model: nn.Module, device: str) -> Iterator[None]:
        """Run the model's forward and the loss under autocast, if this is it. PlanError for a pattern that matches no
        module."""
        with ExitStack() as stack:
            if self.of_parameters is not None:
                yield
                return
            for module, name in self._exceptional(model):
                stack.enter_context(_hooked(module, name, device))
            if self.name != "fp32":
                stack.enter_context(torch.autocast(device, DTYPES[self.name]))
            yield

    @contextmanager
    def casting(self, model: nn.Module, stand_ins: Mapping[int, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """Let the model read its parameters in this precision, in forward and backward; see `cast_parameters`. Yields
        what it reads in their place, by name. PlanError for a pattern that matches no module.

        Batch norm is kept in float32, as by the first FSDP: its kernels take no weights in another dtype than that of
        the running statistics.
        """
        if self.of_parameters is None:
            yield {}
            return
        kept = [module for module, _ in self._exceptional(model)]
        kept += [module for module in model.modules() if isinstance(module, _BatchNorm)]
        with cast_parameters(model, self.of_parameters, kept, stand_ins) as copies:
            yield copies

    def _exceptional(self, model: nn.Module) -> list[tuple[nn.Module, str]]:
        found: dict[str, tuple[nn.Module, str]] = {}
        facts = model_facts(model)
        for pattern, name in self.exceptions:
            here = [(path, module) for path, module in model.named_modules() if fnmatch.fnmatchcase(path, pattern)]
            for refusal in of_exception(pattern, name, facts.modules or (), facts.parameters or {}):
                raise PlanError(refusal)
            for path, module in here:
                found.setdefault(path, (module, name))
        return list(found.values())


@contextmanager
def _hooked(module: nn.Module, name: str, device: str) -> Iterator[None]:
    dtype = DTYPES[name]
    wide = torch.float64 if any(p.dtype == torch.float64 for p in module.parameters()) else torch.float32
    halves = any(p.dtype in HALF for p in module.parameters())
    inside: list[tuple[Any, bool]] = []

    def cast(value: Any) -> Any:
        return value.to(wide) if isinstance(value, Tensor) and value.dtype in HALF else value

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        context = torch.autocast(device, dtype if name != "fp32" else None, enabled=name != "fp32")
        inside.append((context, torch.is_autocast_enabled(device)))
        context.__enter__()
        return pytree.tree_map((cast), (args, kwargs)) if name == "fp32" else None

    def after(module: nn.Module, args: Any, result: Any) -> Any:
        context, others = inside.pop()
        context.__exit__(None, None, None)
        return result if others or halves else pytree.tree_map(cast, result)  # modules outside expect float32

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def narrowest(graph: Graph) -> list[float]:
    """For each output of a graph, the coarsest rounding on its way: the largest `torch.finfo(dtype).eps` of a value in
    half precision that it depends on, or 0.0."""
    coarsest: dict[Node, float] = {}
    for node in graph.nodes:
        if node.op == "output":
            return [coarsest[result] if isinstance(result, Node) else 0.0 for result in node.args[0]]
        if op_spec_of(node).reads == "shape":  # such as the gradient of the loss, which is 1
            coarsest[node] = 0.0
            continue
        values = node.meta["val"] if isinstance(node.meta.get("val"), (tuple, list)) else (node.meta.get("val"),)
        own = [torch.finfo(v.dtype).eps for v in values if isinstance(v, Tensor) and v.dtype in HALF]
        coarsest[node] = max([*own, *(coarsest[source] for source in node.all_input_nodes)], default=0.0)
    raise AssertionError("a graph without output")


FULL = Precision()
