"""Parameters in half precision: the model reads copies in half precision of weights that are kept and trained wider.

It is FSDP2's `MixedPrecisionPolicy(param_dtype=...)` (torch.distributed.fsdp), with each module that has parameters
under `fully_shard`: its floating inputs are cast as by `cast_forward_inputs`, so that all that it computes and hands on
is in half precision, and each gradient is cast to the dtype of its weight before it is summed over ranks or
microbatches. Buffers keep their dtype, as there, where `fully_shard` does not touch them: the statistics of batch norm
and the frequencies of rotary embeddings would lose digits that they need. The loss function computes in whatever dtype
the model's outputs have and its own code casts them to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from plait.compile.capture.batch import batch_tensors, map_batch
from plait.compile.capture.fake_parameters import Exchange
from plait.compile.ir.calls import output_node, placeholders
from plait.compile.ir.node_info import info_of, is_backward, set_info
from plait.compile.ir.views import is_cast
from plait.compile.ops.dims import HALF


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


def _put_back(replaced: list[tuple[dict[str, Any], str, Tensor, Tensor]]) -> None:
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

        def after(module: nn.Module, args: Any, result: Any) -> Any:
            return _cast(result, dtype)

        stack.callback(module.register_forward_hook(after).remove)


def _cast(values: Any, dtype: torch.dtype, only: Collection[torch.dtype] = ()) -> Any:
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
