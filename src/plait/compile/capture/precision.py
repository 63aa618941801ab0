"""Mixed precision: by PyTorch's autocast, or with parameters in half precision.

Under autocast matrix products are in half precision, weights and sums in float32 (Micikevicius et al. 2018, "Mixed
Precision Training"). Modules that match a pattern have a precision of their own.

With parameters in half precision the model reads copies of weights that are kept and trained wider, as with FSDP2's
`MixedPrecisionPolicy(param_dtype=...)` (torch.distributed.fsdp) where each module that has parameters is under
`fully_shard`: its floating inputs are cast as by `cast_forward_inputs`, so that all that it computes and hands on is in
half precision, and each gradient is cast to the dtype of its weight before it is summed over ranks or microbatches.
Buffers keep their dtype, as there, where `fully_shard` does not touch them: the statistics of batch norm and the
frequencies of rotary embeddings would lose digits that they need. The loss function computes in whatever dtype the
model's outputs have and its own code casts them to.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from plait.compile.capture.batch import batch_tensors, map_batch
from plait.compile.capture.fake_parameters import Exchange
from plait.compile.ir.calls import is_cast, op_spec_of, output_node, placeholders
from plait.compile.ir.dtypes import torch_name
from plait.compile.ir.node_info import info_of, is_backward, set_info
from plait.compile.ops.dims import HALF
from plait.errors import PlanError, Refusal
from plait.plan.legality import of_exception
from plait.plan.plan import OF_PARAMETERS
from plait.plan.step_facts import ParameterFacts, StepFacts


@contextmanager
def cast_parameters(
    model: nn.Module, dtype: torch.dtype, kept: Collection[nn.Module], stand_ins: Mapping[int, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Context in which the model's floating parameters are read as copies in `dtype`, and its modules' inputs cast.

    Args:
        model: the model. Gradients of the copies reach its own parameters.
        dtype: the half precision.
        kept: modules whose parameters, and those of modules within, stay as they are. Their inputs are cast to float32
            (float64 if they have tensors in it), and what they return is cast to `dtype` for the modules outside.
        stand_ins: the model's tensors by the ids of those to which code may refer in their place; empty if to them.

    Yields the copies by name of parameter. Backward that calls modules again must run within the context too.
    """
    wide = _within(model, kept)
    made: dict[tuple[int, torch.dtype], Tensor] = {}
    found: dict[str, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
    with ExitStack() as stack:
        stack.callback(_put_back, replaced)
        for prefix, module in model.named_modules():
            for key, own in module._parameters.items():
                if own is None or module in wide or not own.is_floating_point() or own.dtype == dtype:
                    continue
                copy = made.setdefault((id(own), dtype), own.to(dtype))
                copy.__dict__.update({k: v for k, v in own.__dict__.items() if k not in copy.__dict__})
                replaced.append((module._parameters, key, own, copy))
                found[f"{prefix}.{key}" if prefix else key] = copy
        for held, key, _, copy in replaced:
            held[key] = copy
        shared = {id(own) for module in wide for own in module._parameters.values()}
        copies = {id(own): copy for _, _, own, copy in replaced if id(own) not in shared}
        referred = {other: copies[id(own)] for other, own in stand_ins.items() if id(own) in copies} or copies
        for name, module in model.named_modules():
            outside = model.get_submodule(name.rpartition(".")[0]) if name else None
            _cast_at(module, dtype, wide, outside, stack)
        stack.enter_context(Exchange(referred, lambda real: real, plain=True))
        yield found


def changes_copy(name: str, precision: str) -> str:
    """Why a step may not change a parameter in place of which it has a copy."""
    return (
        f"the step changes the parameter {name} in place, but with precision={precision} what it has is a copy in half"
        " precision, which is gone after the step; keep its module in full precision, with precision.MODULE=fp32"
    )


def _within(model: nn.Module, kept: Collection[nn.Module]) -> dict[nn.Module, torch.dtype]:
    """The modules that are kept wide, with those within them, and the dtype in which each of them computes."""
    found: dict[nn.Module, torch.dtype] = {}
    for outer in (module for module in model.modules() if module in kept):
        has_double = any(own.dtype == torch.float64 for own in (*outer.parameters(), *outer.buffers()))
        found |= dict.fromkeys(outer.modules(), torch.float64 if has_double else torch.float32)
    return found


def _put_back(replaced: list[tuple[dict[str, object], str, Tensor, Tensor]]) -> None:
    for held, key, own, copy in replaced:
        if held.get(key) is copy:
            held[key] = own


def _cast_at(
    module: nn.Module,
    dtype: torch.dtype,
    wide: Mapping[nn.Module, torch.dtype],
    outside: nn.Module | None,
    stack: ExitStack,
) -> None:
    """Cast what goes into a module, and what comes out of one that is kept in another dtype than the one around it."""
    own = wide.get(module, dtype)
    if module in wide:
        into = partial(_cast, dtype=own, only=HALF)
    elif any(p.is_floating_point() for p in module.parameters()):
        into = partial(_cast, dtype=own)
    else:
        return  # such as a loss, or a softmax in float32

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return into((args, kwargs))

    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    if module in wide and outside is not None and outside not in wide:

        def after(module: nn.Module, args: object, result: object) -> Any:
            return _cast(result, dtype)

        stack.callback(module.register_forward_hook(after).remove)


def _cast(values: object, dtype: torch.dtype, only: Collection[torch.dtype] = ()) -> Any:
    """The values with floating tensors, or those in one of the dtypes `only`, cast; the same object if none is."""

    def is_cast(value: Any) -> bool:
        floating = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype
        return floating and (not only or value.dtype in only)

    if not any(map(is_cast, batch_tensors(values))):
        return values
    return map_batch(lambda _, value: value.to(dtype) if is_cast(value) else value, values)


def place_casts(graph: Graph, parameters: Collection[str]) -> None:
    """Move each cast of a parameter to its first reader, and of a gradient right behind what it casts. Changes `graph`.

    `parameters` are the names of their placeholders. All parameters are cast before the model runs, and autograd casts
    all gradients at its end: a copy of every weight and every gradient would live through the whole step, and no
    gradient could be sent before backward ends.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for parameter in (node for node in placeholders(graph) if node.name in parameters):
        for cast in [user for user in parameter.users if user.op == "call_function" and is_cast(user)]:
            readers = [user for user in cast.users if user.op != "output"]
            if readers and not is_backward(cast):
                first = min(readers, key=order.__getitem__)
                first.prepend(cast)
                set_info(cast, module=info_of(first).module)
    for result in output_node(graph).args[0]:  # type: ignore[union-attr]
        if isinstance(result, Node) and result.op == "call_function" and is_cast(result) and is_backward(result):
            source = result.args[0]
            if isinstance(source, Node) and source.op == "call_function":
                source.append(result)
                set_info(result, module=info_of(source).module)


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

    def cast(value: object) -> Any:
        return value.to(wide) if isinstance(value, Tensor) and value.dtype in HALF else value

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        context = torch.autocast(device, dtype if name != "fp32" else None, enabled=name != "fp32")
        inside.append((context, torch.is_autocast_enabled(device)))
        context.__enter__()
        return pytree.tree_map((cast), (args, kwargs)) if name == "fp32" else None

    def after(module: nn.Module, args: Any, result: object) -> Any:
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


def model_facts(model: nn.Module) -> StepFacts:
    """The facts of a model: its parameters, and the names of its modules."""
    parameters = {
        name: ParameterFacts(tuple(p.shape), torch_name(p.dtype), p.requires_grad)
        for name, p in model.named_parameters()
    }
    return StepFacts(parameters, tuple(name for name, _ in model.named_modules()))
