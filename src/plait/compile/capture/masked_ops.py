"""Torch functions on selected rows: on each row by itself, or reductions over the rows that count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from plait.compile.capture.late_values import LateNumber
from plait.compile.capture.masked_rows import (
    HANDLERS,
    Selected,
    TorchFunction,
    UnknownCount,
    dynamic,
    is_whole,
    plain,
    rows_of,
    same_rows,
)

_IGNORED = -100  # the class that cross_entropy and nll_loss ignore by default

# ---- what works on each row by itself ----


def _pointwise(func: TorchFunction, *args: Any, **kwargs: Any) -> Selected:
    """Each element by itself; tensors among the arguments must not vary along the selection's rows."""
    first = same_rows((args, kwargs))[0]
    ndim = max(one.ndim for one in same_rows((args, kwargs)))

    def along(v: object) -> Any:
        if is_whole(v) and not (v.ndim < ndim or (v.ndim == ndim and v.shape[0] == 1)):
            raise dynamic()
        if isinstance(v, Selected) and v.ndim != ndim:
            raise dynamic()
        return first.owner.beside(v, first) if is_whole(v) else v

    args, kwargs = plain(map_aggregate((args, kwargs), along))
    return first.like(func(*args, **kwargs))


def _by_row(func: TorchFunction, x: object, *args: Any, **kwargs: Any) -> Selected:
    """Rows of `x` by themselves, with other tensors that have no rows (weights)."""
    if not isinstance(x, Selected) or len(same_rows((args, kwargs))):
        raise dynamic()
    if x.ndim < 2:
        raise dynamic()
    return x.like(func(x.values, *args, **kwargs))


def _matmul(func: TorchFunction, x: object, other: Any) -> Selected:
    if not isinstance(x, Selected) or isinstance(other, Selected) or x.ndim != 2 or other.ndim > 2:
        raise dynamic()
    return x.like(torch.matmul(x.values, other))


def _norm(func: TorchFunction, x: object, shape: Any, *args: Any, **kwargs: Any) -> Selected:
    """layer_norm, rms_norm: the last dims, whose shape is an argument."""
    if not isinstance(x, Selected) or len(shape) >= x.ndim:
        raise dynamic()
    return x.like(func(x.values, shape, *args, **kwargs))


def _embedding(func: TorchFunction, index: object, weight: object, *args: Any, **kwargs: Any) -> Selected:
    if not isinstance(index, Selected) or isinstance(weight, Selected):
        raise dynamic()
    return index.like(func(index.values, weight, *args, **kwargs))


def _dropout(
    func: TorchFunction, x: Selected, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Selected:
    if training and p:
        raise dynamic(
            "dropout draws as many numbers as there are rows; apply it to all rows, before they are selected or after"
            " their results are back in place, or let p be 0"
        )
    return x


def _dims(x: Selected, dim: object) -> set[int]:
    return {d % x.ndim for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}


def _along_dim(func: TorchFunction, x: object, *args: Any, **kwargs: Any) -> Any:
    """softmax(dim), sort(dim), unsqueeze(dim)...: along another dim than the rows."""
    dim = kwargs["dim"] if "dim" in kwargs else args[0] if args else None
    if not isinstance(x, Selected) or not isinstance(dim, int) or 0 in _dims(x, dim):
        raise dynamic()
    others = same_rows((args, kwargs))
    args, kwargs = plain((args, kwargs))
    if others:
        same_rows([x, *others])
    return _wrapped(x, func(x.values, *args, **kwargs))


def _wrapped(x: Selected, found: Any) -> Any:
    if is_whole(found):
        return x.like(found)
    return type(found)([x.like(part) for part in found])


def _normalize(
    func: TorchFunction, x: object, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: object = None
) -> Selected:
    if not isinstance(x, Selected) or 0 in _dims(x, dim) or out is not None:
        raise dynamic()
    return x.like(func(x.values, p, dim, eps))


def _unsqueeze(func: TorchFunction, x: Selected, dim: int) -> Selected:
    if dim == 0 or dim == -x.ndim - 1:
        raise dynamic()
    return x.reshaped(x.values.unsqueeze(dim))


def _squeeze(func: TorchFunction, x: Selected, dim: object = None) -> Selected:
    dims = [d for d in range(1, x.ndim) if x.values.shape[d] == 1] if dim is None else sorted(_dims(x, dim))
    if 0 in dims:
        raise dynamic()
    return x.reshaped(x.values.squeeze(tuple(dims)))


def _pieces(func: TorchFunction, x: Selected, size: object, dim: int = 0) -> tuple[Selected, ...]:
    """split and chunk along another dim than the rows."""
    if not isinstance(x, Selected) or 0 in _dims(x, dim):
        raise dynamic()
    return tuple(x.like(part) for part in func(x.values, size, dim))


def _flatten(func: TorchFunction, x: Selected, start_dim: int = 0, end_dim: int = -1) -> Selected:
    if x.ndim == 1:
        return x
    if start_dim % x.ndim == 0 and math.prod(x.values.shape[1:]) != 1:
        raise dynamic()
    return x.reshaped(x.values.flatten(start_dim, end_dim))


def _view(func: TorchFunction, x: Selected, *shape: Any) -> Selected:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    rows, rest = sizes[0], sizes[1:]
    row = math.prod(x.values.shape[1:])
    known = isinstance(rows, (LateNumber, UnknownCount)) or (
        rows == -1 and all(isinstance(n, int) and n > 0 for n in rest)
    )
    if not known or (-1 not in rest and math.prod(rest) != row):
        raise dynamic()
    return x.reshaped(x.values.reshape(len(x.values), *rest))


def _transpose(func: TorchFunction, x: Selected, one: int, two: int) -> Selected:
    if 0 in _dims(x, (one, two)):
        raise dynamic()
    return x.like(x.values.transpose(one, two))


def _joined(func: TorchFunction, parts: Sequence[Any], dim: int = 0) -> Selected:
    """stack and cat of values of the same rows; cat of rows after rows."""
    found = [p for p in parts if isinstance(p, Selected)]
    if func is torch.stack:
        if dim in (0, -found[0].ndim - 1) or len(found) != len(parts):
            raise dynamic()
        return rows_of(parts, lambda *values: torch.stack(values, dim))
    if dim % found[0].ndim:
        if len(found) != len(parts):
            raise dynamic()
        return rows_of(parts, lambda *values: torch.cat(values, dim))
    keeps = [
        p.keep if isinstance(p, Selected) else torch.ones(len(p), dtype=torch.bool, device=p.device) for p in parts
    ]
    keep = torch.cat(keeps)
    return Selected(torch.cat(plain(list(parts))), found[0].owner.mask(keep), found[0].owner)


def _get(func: TorchFunction, x: object, index: Any) -> Any:
    if not isinstance(x, Selected):
        raise dynamic()
    if isinstance(index, Selected):
        if index.values.dtype != torch.bool or index.ndim != 1:
            raise dynamic()
        same_rows([x, index])
        return Selected.of(x.values, x.keep & index.values, x.owner)
    items = index if isinstance(index, tuple) else (index,)
    if items and _cuts_rows(items[0]):
        return _get(func, x.between(items[0].start or 0, items[0].stop), (slice(None), *items[1:]))
    if items and items[0] is Ellipsis and len([i for i in items if i is not None]) - 1 < x.ndim:
        ok = all(i is Ellipsis or i is None or isinstance(i, (int, slice)) for i in items)
    else:
        ok = bool(items) and isinstance(items[0], slice) and items[0] == slice(None)
        ok = ok and all(i is Ellipsis or i is None or isinstance(i, (int, slice)) for i in items[1:])
    if not ok:
        raise dynamic()
    return x.reshaped(x.values[index])


def _cuts_rows(index: object) -> bool:
    """Whether an index is `[a:b]`, by numbers that count from the first row."""
    ends = (index.start, index.stop) if isinstance(index, slice) and index.step in (None, 1) else ()
    return any(end is not None for end in ends) and all(end is None or (type(end) is int and end >= 0) for end in ends)


# ---- what goes over the rows ----


def _reduce(finish: Callable[..., Tensor], fill: Any) -> Callable[..., Any]:
    """A reduction: over other dims row by row; over the rows with those that do not count filled."""

    def handler(func: TorchFunction, x: object, dim: object = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Selected):
            raise dynamic()
        if dim is not None and 0 not in _dims(x, dim):
            return _wrapped(x, func(x.values, dim, *args, **kwargs))
        if args or kwargs.keys() - {"dtype"}:
            raise dynamic()
        values = x.values if kwargs.get("dtype") is None else x.values.to(kwargs["dtype"])
        every = set(range(x.ndim)) if dim is None else _dims(x, dim)
        filled = x.filled(values, fill(values) if callable(fill) else fill)
        return x.owner.reduced(finish(x, filled, tuple(sorted(every))))

    return handler


def _sum(x: Selected, filled: Tensor, dims: tuple[int, ...]) -> Tensor:
    return filled.sum(dims)


def _mean(x: Selected, filled: Tensor, dims: tuple[int, ...]) -> Tensor:
    each = math.prod(filled.shape[d] for d in dims if d)
    return filled.sum(dims) / (x.count * each).to(filled.dtype)


def _spread(finish: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The variance over rows that count; over other dims row by row."""

    def handler(
        func: TorchFunction, x: Selected, dim: object = None, unbiased: Any = None, keepdim: bool = False,
        correction: Any = None,
    ) -> Any:  # fmt: skip
        if isinstance(dim, bool):  # std(unbiased)
            dim, unbiased = None, dim
        if dim is not None and 0 not in _dims(x, dim):
            given = {} if unbiased is None and correction is None else {"correction": _less(unbiased, correction)}
            return _wrapped(x, func(x.values, dim, keepdim=keepdim, **given))
        dims = tuple(sorted(range(x.ndim) if dim is None else _dims(x, dim)))
        num = (x.count * math.prod(x.values.shape[d] for d in dims if d)).to(x.dtype)
        mean = x.filled(x.values, 0).sum(dims, keepdim=True) / num
        squares = x.filled((x.values - mean).square(), 0).sum(dims, keepdim=keepdim)
        return x.owner.reduced(finish(squares / (num - _less(unbiased, correction)).clamp(min=0)))

    return handler


def _less(unbiased: bool | None, correction: float | None) -> float:
    return correction if correction is not None else float(unbiased is not False)


def _lowest(values: Tensor) -> float:
    return -math.inf if values.dtype.is_floating_point else torch.iinfo(values.dtype).min


def _highest(values: Tensor) -> float:
    return math.inf if values.dtype.is_floating_point else torch.iinfo(values.dtype).max


def _reduced(loss: Selected, reduction: str) -> Any:
    if reduction == "none":
        return loss
    every = tuple(range(loss.ndim))
    filled = loss.filled(loss.values, 0)
    if reduction == "batchmean":
        return loss.owner.reduced(filled.sum() / loss.count.to(filled.dtype))
    return loss.owner.reduced(_mean(loss, filled, every) if reduction == "mean" else _sum(loss, filled, every))


def _pointwise_loss(func: TorchFunction, x: object, target: object, *args: Any, **kwargs: Any) -> Any:
    """mse_loss and the like: as many elements as the input has."""
    reduction = kwargs.pop("reduction", "mean")
    if kwargs.pop("size_average", None) is not None or kwargs.pop("reduce", None) is not None:
        raise dynamic()
    return _reduced(_pointwise(func, x, target, *args, **kwargs, reduction="none"), reduction)


def _class_loss(
    func: TorchFunction, x: object, target: object, weight: object = None, *args: Any, **kwargs: Any
) -> Any:
    """cross_entropy and nll_loss: rows that do not count have the target that is ignored."""
    if args or not isinstance(x, Selected) or not isinstance(target, Selected) or target.dtype.is_floating_point:
        raise dynamic()
    same_rows([x, target])
    ignored = kwargs.get("ignore_index", _IGNORED)
    found = func(x.values, target.filled(target.values, ignored), weight, **kwargs)
    return target.like(found) if kwargs.get("reduction", "mean") == "none" else x.owner.reduced(found)


def _numel(func: TorchFunction, x: Selected) -> LateNumber:
    return x.owner.late.number(x.count * math.prod(x.values.shape[1:]))


def _size(func: TorchFunction, x: Selected, dim: int | None = None) -> Any:
    return x.shape if dim is None else x.shape[dim]


def _dim(func: TorchFunction, x: Selected) -> int:
    return x.ndim


def _index_add(func: TorchFunction, x: Any, dim: int, index: object, source: object, *, alpha: float = 1) -> Any:
    if isinstance(x, Selected) or dim != 0 or not isinstance(index, Selected) or not isinstance(source, Selected):
        raise dynamic()
    same_rows([index, source])
    values, places = source.filled(source.values, 0), index.filled(index.values, 0)
    return index.owner.adding(x, index.keep, lambda: func(x, 0, places, values, alpha=alpha))


def _index_select(func: TorchFunction, x: Any, dim: int, index: object) -> Any:
    if isinstance(x, Selected) or dim != 0 or not isinstance(index, Selected):
        raise dynamic()
    return index.like(torch.index_select(x, 0, index.values))


# fmt: off
_POINTWISE = (
    "add", "sub", "rsub", "mul", "div", "true_divide", "truediv", "floordiv", "mod", "pow", "rpow", "radd", "rmul",
    "rtruediv", "rdiv", "neg", "abs", "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "square",
    "reciprocal", "sin", "cos", "tan", "tanh", "sigmoid", "erf", "clamp", "clip", "clamp_min", "clamp_max", "relu",
    "relu_", "gelu", "silu", "mish", "elu", "selu", "leaky_relu", "softplus", "logsigmoid", "hardtanh", "hardswish",
    "hardsigmoid", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor",
    "and", "or", "xor", "invert", "not", "isfinite", "isnan", "isinf", "where", "maximum", "minimum", "lerp", "float",
    "double", "half", "bfloat16", "long", "int", "bool", "to", "type", "type_as", "detach", "clone", "contiguous",
    "nan_to_num", "masked_fill", "floor", "ceil", "round", "sign", "remainder", "fmod", "atan", "asin", "acos",
    "sinh", "cosh",
)
_ALONG_DIM = (
    "softmax", "log_softmax", "cumsum", "cumprod", "sort", "argsort", "argmax", "argmin", "gather", "logsumexp",
    "take_along_dim",
)
_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "soft_margin_loss", "poisson_nll_loss",
)
_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "pow", "rpow", "eq", "ne",
    "lt", "le", "gt", "ge", "and", "or", "xor", "matmul", "getitem", "neg", "abs", "invert",
)
# fmt: on
HANDLERS |= {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(["linear"], _by_row),
    **dict.fromkeys(["matmul", "mm"], _matmul),
    **dict.fromkeys(["layer_norm", "rms_norm"], _norm),
    **dict.fromkeys(_ALONG_DIM, _along_dim),
    **dict.fromkeys(_LOSSES, _pointwise_loss),
    **dict.fromkeys(["cross_entropy", "nll_loss"], _class_loss),
    "normalize": _normalize,
    "embedding": _embedding,
    "dropout": _dropout,
    **dict.fromkeys(["chunk", "split"], _pieces),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "flatten": _flatten,
    "view": _view,
    "reshape": _view,
    "transpose": _transpose,
    "stack": _joined,
    "cat": _joined,
    "getitem": _get,
    "sum": _reduce(_sum, 0),
    "mean": _reduce(_mean, 0),
    "any": _reduce(lambda x, filled, dims: filled.any() if len(dims) == x.ndim else filled.any(dims), 0),
    "all": _reduce(lambda x, filled, dims: filled.all() if len(dims) == x.ndim else filled.all(dims), 1),
    "amax": _reduce(lambda x, filled, dims: filled.amax(dims), _lowest),
    "amin": _reduce(lambda x, filled, dims: filled.amin(dims), _highest),
    "max": _reduce(lambda x, filled, dims: filled.amax(dims), _lowest),
    "min": _reduce(lambda x, filled, dims: filled.amin(dims), _highest),
    "var": _spread(lambda variance: variance),
    "std": _spread(torch.sqrt),
    "numel": _numel,
    "size": _size,
    "dim": _dim,
    "index_add": _index_add,
    "index_add_": _index_add,
    "index_select": _index_select,
}


def give_operators(kind: type[Any]) -> None:
    """Let Python's operators on values of the class call its `__torch_function__`."""
    for name in _OPERATORS:
        setattr(kind, f"__{name}__", _operator(name))


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, f"__{name}__")
    return lambda first, *others: type(first).__torch_function__(method, (), (first, *others), {})


give_operators(Selected)
