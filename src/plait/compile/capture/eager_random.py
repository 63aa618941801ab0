"""Run eager code with the random numbers of the captured step, and show dropout inside attention to a capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plait.compile.ops import op_spec
from plait.compile.ops.draw import draw
from plait.compile.ops.random import check_random


class VisibleDropout(TorchFunctionMode):
    """Runs attention with dropout as plain ops, so that its dropout is an op of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            if rate > 0:
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


class GlobalRandom(TorchDispatchMode):
    """Runs eager code with the random numbers of the captured graph: the same ops, in the same order, under `key`."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self._key = key
        self._index = 0
        self._visible: list[VisibleDropout] = []

    def __enter__(self) -> GlobalRandom:
        self._visible.append(VisibleDropout())
        self._visible[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._visible.pop().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replace = op_spec(func).random
        if replace is not None:
            return replace(self._draw, *args, **kwargs)
        check_random(func, args, kwargs)
        return func(*args, **kwargs)

    def _draw(
        self, shape: Any, dtype: torch.dtype, device: torch.device, kind: str, params: tuple[float, ...]
    ) -> Tensor:
        self._index += 1
        return draw(self._key, self._index - 1, tuple(shape), dtype, device, kind, params)
