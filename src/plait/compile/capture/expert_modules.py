"""Experts that are modules of their own: the parameters that one has in the place of another's."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from torch import Tensor, nn


class ExpertModules:
    """The parameters of a model by names that differ in a number, as those of the modules of a list do."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def siblings(self, parameter: Tensor, number: int, numbers: Sequence[int]) -> list[Tensor] | None:
        """For the parameter of the expert that has this number, those of the experts of all `numbers`.

        In `layers.0.experts.3.up.weight` it is the last number that is 3, as in `layers.0.experts.expert_3.weight`.
        None if there are none, or of other shapes: then it is no parameter of one expert.
        """
        name = self._names.get(id(parameter))
        parts = [] if name is None else name.split(".")
        for at in reversed(range(len(parts))):
            counted = re.fullmatch(r"(.*?)(\d+)", parts[at])
            if counted is None or int(counted[2]) != number:
                continue
            names = (".".join([*parts[:at], f"{counted[1]}{each}", *parts[at + 1 :]]) for each in numbers)
            found = [self._tensors.get(one) for one in names]
            same = [one for one in found if one is not None and _form(one) == _form(parameter)]
            if len(same) == len(numbers):
                return same
        return None

    @functools.cached_property
    def _tensors(self) -> dict[str, Tensor]:
        """Parameters as the modules have them while the step is captured."""
        return {
            f"{path}.{key}" if path else key: value
            for path, module in self._model.named_modules(remove_duplicate=False)
            for key, value in module._parameters.items()
            if value is not None
        }

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {id(value): name for name, value in self._tensors.items()}


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad
