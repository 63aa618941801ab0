"""The user's model while its weights are elsewhere: placeholders in their place, and how the model gets the weights
back.

A plan that shards or offloads weights leaves placeholders in the model, which know the parameter's name, shape and
dtype but have no values. Reading values of one raises ModelError, or fetches the whole tensor within
`gathered(at_once=False)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from plait.errors import ModelError
from plait.plan.plan import Plan
from plait.plan.sharding_plan import DEVICE, ParameterSharding
from plait.spec.layout import Only, Shard

Fetch = Callable[[str], Tensor]

_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad", "is_meta", "is_cuda",
    "is_cpu", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_sparse_csr", "itemsize", "nbytes", "names",
    "output_nr", "retains_grad", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "is_mps", "is_xpu",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "requires_grad_", "__hash__", "is_signed", "storage_offset", "register_hook", "get_device",
    "is_inference",
)  # fmt: skip


def _harmless() -> set[Hashable]:
    """The functions that need no values of a parameter."""
    found: set[Any] = {getattr(torch.Tensor, name) for name in _METHODS}
    for name in _PROPERTIES:
        row = getattr(torch.Tensor, name, None)
        found |= {getattr(row, "__get__", None)}
    setters = [getattr(torch.Tensor, name) for name in ("requires_grad", "grad", "_backward_hooks")]
    return found | {row.__set__ for row in setters} | {torch.is_floating_point, torch.is_complex, torch.numel}


class Away(nn.Parameter):
    """The placeholder of a parameter called `title`. `why` says where its values are and how to get them."""

    title: str
    why: str
    fetch: Fetch | None = None

    def __new__(cls, form: Tensor, title: str, why: str, requires_grad: bool) -> Away:
        made: Away = torch.Tensor._make_subclass(cls, form, requires_grad)
        made.title, made.why = title, why
        return made

    def __init__(self, *_: object) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*tree_map(_value, tuple(args)), **tree_map(_value, kwargs))

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<{self.title}, {list(self.shape)} of {self.dtype}, which is elsewhere>"

    def __deepcopy__(self, memo: object) -> Any:
        return nn.Parameter(_value(self).clone(), self.requires_grad)

    def __reduce_ex__(self, protocol: object) -> Any:
        return nn.Parameter(_value(self), self.requires_grad).__reduce_ex__(protocol)


_HARMLESS = _harmless()


def _value(given: object) -> Any:
    """The whole tensor in place of a placeholder; any other value unchanged."""
    if not isinstance(given, Away):
        return given
    if given.fetch is None:
        raise ModelError(f"{given.title} is not in the model now: {given.why}")
    return given.fetch(given.title)


class AsItWas:
    """A snapshot of a model before training starts, to restore it if the start fails."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
        tensors = [t for _, _, *own in self._modules for each in own for t in each.values() if t is not None]  # type: ignore[attr-defined]
        self._data = [(t, t.data, t.grad) for t in tensors if not isinstance(t, Away)]

    def restore(self) -> None:
        """Put modes, parameters, buffers and gradients back."""
        for module, training, parameters, buffers in self._modules:
            module.training = training
            _put(module, parameters)
            module._buffers.update(buffers)
        for tensor, data, grad in self._data:
            if tensor.data_ptr() != data.data_ptr() or tensor.is_meta != data.is_meta:
                tensor.data = data
            tensor.grad = grad


def refuse_away(model: nn.Module) -> None:
    """Raise ModelError for a model whose weights another trainer has."""
    for parameter in model.parameters():
        if isinstance(parameter, Away):
            raise ModelError(
                f"the model's weights are with another trainer, such as {parameter.title}: {parameter.why}; or build"
                " the model anew"
            )


def release(model: nn.Module, names: Collection[str], whys: Mapping[str, str]) -> None:
    """Replace parameters that are stored elsewhere by placeholders, and free the model's copies."""
    own = dict(model.named_parameters())
    changed = replace_parameters(model, {name: _placeholder(name, own[name], whys[name]) for name in names})
    for module in {id(it): it for it in (model, *(module for module, _ in changed))}.values() if names else ():
        module.register_load_state_dict_pre_hook(_refuse_to_load)


def _refuse_to_load(module: nn.Module, *_: object) -> None:
    """Raise ModelError before load_state_dict copies anything: torch would copy some tensors and report the rest as
    meta."""
    for parameter in module.parameters():
        _value(parameter) if isinstance(parameter, Away) and parameter.fetch is None else None


def replace_parameters(
    model: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> list[tuple[nn.Module, dict[str, object]]]:
    """Replace the model's parameters of these names (first names, for tied parameters) under all names that they
    have.

    Returns the modules that changed, each with its former parameters, for `put_back`.
    """
    found: list[tuple[nn.Module, dict[str, Any]]] = []
    by_id = {id(p): parameters[name] for name, p in model.named_parameters() if name in parameters}
    for module in model.modules():
        mine = {key: by_id[id(p)] for key, p in module._parameters.items() if id(p) in by_id}
        if mine:
            found.append((module, {key: module._parameters[key] for key in mine}))
            _put(module, mine)
    return found


def put_back(before: list[tuple[nn.Module, dict[str, object]]]) -> None:
    """Undo `replace_parameters`."""
    for module, parameters in before:
        _put(module, parameters)


def where(parameter: ParameterSharding, plan: Plan) -> str:
    """Where the values of a parameter are, and how the user gets them, as a sentence."""
    cut = [axis for axis, p in parameter.state.placements if isinstance(p, Shard)]
    only = [axis for axis, p in parameter.state.placements if isinstance(p, Only)]
    at = f"the ranks of {' and '.join(cut)} have a part of it each" if cut else "the trainer has it"
    at += f", on some ranks of {only[0]} only" if only else ""
    at += f", on the {parameter.memory}" if parameter.memory != DEVICE else ""
    return (
        f"under the plan {plan.title!r} {at}. Use the model within `with trainer.gathered():`, or take"
        " trainer.full_state_dict()"
    )


def placeholders(model: nn.Module, names: Collection[str], why: str) -> dict[str, Away]:
    """A placeholder for each of these parameters, by name."""
    return {name: _placeholder(name, p, why) for name, p in model.named_parameters() if name in names}


def _placeholder(name: str, own: nn.Parameter, why: str) -> Any:
    form = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")
    if isinstance(form, FakeTensor):  # a dry run, whose model has no values
        return nn.Parameter(form, own.requires_grad)
    made = Away(form, name, why, own.requires_grad)
    for hook in (own._backward_hooks or {}).values():  # a later capture puts hooks into its graph
        made.register_hook(hook)
    return made


def _put(module: nn.Module, parameters: Mapping[str, Any]) -> None:
    for key, parameter in parameters.items():
        if parameter is not None and parameter is not module._parameters.get(key):
            weights = module.__dict__.get("_flat_weights")  # a second list of the parameters, in recurrent modules
            before = module._parameters.get(key)
            module._parameters[key] = parameter
            if isinstance(weights, list):
                weights[:] = [parameter if each is before else each for each in weights]
