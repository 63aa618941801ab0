"""Parameters that one process holds with their optimizer: a server's pieces, or the coordinator's full model.

It is a TrainState, so that a server's snapshot and the run's checkpoint have one format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.process_world import process_world
from plait.compile.ir.dtypes import torch_name
from plait.engine.checkpoint.snapshot import persistent_buffers
from plait.engine.optimizer_trials import EXACT, depends_on_the_cut
from plait.engine.rank_optimizers import OptimizerFactory, SchedulerFactory, build_optimizer, build_scheduler
from plait.engine.train_state import TrainState
from plait.errors import PlanError, Refusal
from plait.integrations.ray_servers.arrays import offsets, views
from plait.optim.combined import CombinedOptimizer
from plait.plan.plan import Plan
from plait.schedule.variable_placement import Piece, Variable
from plait.spec.layout import Layout

# Options of a parameter group that are local to a process: the parameters, and the choice of implementation.
_OWN = ("params", "param_names", "foreach", "fused", "capturable")


class _ServedParts:
    """The ModelParts of a server: parameters, each whole and in this process."""

    changing: frozenset[str] = frozenset()  # a server holds no parameter that the forward pass changes in place

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> None:
        self.model = model
        self.parameters = parameters
        self.buffers = buffers
        self.dtypes = {name: p.dtype for name, p in parameters.items()}
        self.layouts = {name: Layout(torch_name(p.dtype), tuple(p.shape)) for name, p in parameters.items()}

    def local(self, name: str) -> Tensor:
        return self.parameters[name].detach()

    def set_local(self, name: str, part: Tensor) -> None:
        self.parameters[name].detach().copy_(part)

    def whole(self, name: str, local: Tensor | None) -> Tensor:
        assert local is not None
        return local

    def updated(self) -> None:
        """Nothing to do: a server's parameters are read where they are."""


class OptimizerShard(TrainState):
    """Parameters, and the user's optimizer that updates them, as checkpoints save and load them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: OptimizerFactory,
        make_scheduler: SchedulerFactory | None,
        plan: Plan,
        seed: int,
        model: nn.Module | None = None,
    ) -> None:
        super().__init__(plan, process_world(Plan().mesh, device="cpu"), seed)
        buffers = {} if model is None else dict(model.named_buffers())
        self.executor = _ServedParts(model or _module(parameters), dict(parameters), buffers)
        self.optimizer = build_optimizer(make_optimizer, parameters, self.held.layouts, self.world)
        self.scheduler = build_scheduler(make_scheduler, self.optimizer)
        self.optimizer.step()  # without gradients: a scheduler warns of an optimizer that has not stepped
        self.update = SimpleNamespace(settle=lambda parameter: None, state_of=self._state_of)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by name."""
        found: dict[str, nn.Parameter] = self.held.parameters
        return found

    @property
    def rate(self) -> float:
        """The learning rate of the first parameter group."""
        assert self.optimizer is not None
        return float(self.optimizer.param_groups[0].get("lr", 0.0))

    def advance(self, step: int) -> None:
        """Count the steps up to `step` as done, and set the learning rate of the next one."""
        while self.step_number < step:
            self.step_number += 1
            if self.scheduler is not None:
                self.scheduler.step()

    def optimizer_state(self) -> dict[str, dict[str, object]]:
        """The optimizer's state, by variable name and key. Tensors are the optimizer's own, not copies."""
        return {name: self._state_of(p) for name, p in self.parameters.items()}

    def set_optimizer_state(self, state: Mapping[str, Mapping[str, object]]) -> None:
        """Replace the optimizer's state by a copy of the given one; variables that it does not name keep theirs."""
        assert self.optimizer is not None
        for name, parameter in self.parameters.items():
            if state.get(name):
                self.optimizer.state[parameter] = {
                    key: value.clone() if torch.is_tensor(value) else value for key, value in state[name].items()
                }

    def options(self) -> list[dict[str, Any]]:
        """The options of the optimizer's parameter groups, without parameters; `members` has the names of each group's
        parameters."""
        assert self.optimizer is not None
        rest = [{k: v for k, v in g.items() if k not in _OWN} for g in self.optimizer.param_groups]
        return [{**options, "members": names} for options, names in zip(rest, self._members(), strict=True)]

    def set_options(self, groups: Sequence[Mapping[str, object]], scheduler: Mapping[str, object] | None) -> None:
        """Load the group options and the scheduler state of an optimizer of all variables.

        The groups here are matched by their members, because the user's function may have made fewer groups for fewer
        variables. Raises PlanError if a group here is none of the given groups or a part of one.
        """
        assert self.optimizer is not None
        chosen = [_group_of(index, names, groups) for index, names in enumerate(self._members())]
        for group, index in zip(self.optimizer.param_groups, chosen, strict=True):
            group.update({k: v for k, v in groups[index].items() if k != "members"})
        if self.scheduler is not None and scheduler is not None:
            self.scheduler.load_state_dict(_of_groups(scheduler, chosen, len(groups)))

    def _members(self) -> list[list[str]]:
        """The parameter names of each group."""
        assert self.optimizer is not None
        names = {id(p): name for name, p in self.parameters.items()}
        return [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]

    def persistent_buffers(self) -> dict[str, Tensor]:
        """The buffers of the model that are part of its state_dict, by name."""
        kept = persistent_buffers(self.held.model)
        return {name: b for name, b in self.held.buffers.items() if name in kept}

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        assert self.optimizer is not None
        return dict(self.optimizer.state.get(parameter, {}))


def _group_of(index: int, names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> int:
    """The index of the group that contains the named parameters; for a group without parameters, the one at its own
    index."""
    found = [i for i, group in enumerate(groups) if names and {*names} <= {*group["members"]}]
    if names and not found:
        what = (
            f"the optimizer has {', '.join(names)} in one group where a server has only some of the variables, and in"
            " several where one process has all"
        )
        raise PlanError(Refusal(what, "", "let its groups depend on each parameter alone, or use servers=1"))
    return found[0] if found else min(index, len(groups) - 1)


def _of_groups(state: Mapping[str, object], chosen: Sequence[int], num_groups: int) -> dict[str, Any]:
    """The part of a scheduler's state that is about the chosen groups: its lists have an item for each group."""
    if [*chosen] == [*range(num_groups)]:
        return dict(state)

    def of(key: str, value: Any) -> Any:
        if key == "_schedulers":
            return [_of_groups(each, chosen, num_groups) for each in value]
        per_group = isinstance(value, list) and len(value) == num_groups and key != "_milestones"
        return [value[index] for index in chosen] if per_group else value

    return {key: of(key, value) for key, value in state.items()}


class ServerShard(OptimizerShard):
    """A server's pieces, as views of one flat memory of bytes, `flat`, [number of bytes] uint8."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        make_optimizer: OptimizerFactory,
        make_scheduler: SchedulerFactory | None = None,
        plan: Plan = Plan(),  # noqa: B008  (a frozen value)
        seed: int = 0,
    ) -> None:
        self.pieces = tuple(pieces)
        self.flat = torch.zeros(offsets(pieces)[-1], dtype=torch.uint8)
        self._mean = torch.empty(0, dtype=torch.uint8)  # memory for the mean of several gradients, made on first use
        made = {piece.name: nn.Parameter(view) for piece, view in zip(pieces, views(self.flat, pieces), strict=True)}
        super().__init__(made, make_optimizer, make_scheduler, plan, seed)
        # A gradient may be in read-only memory. torch's own optimizers do not write to gradients; others may.
        self._copies_gradients = not type(self.optimizer).__module__.startswith(("torch.optim", "plait.optim"))

    def set_gradients(self, gradients: Sequence[Sequence[Tensor | None]], shares: Sequence[float]) -> None:
        """Set the weighted sum of gradients, each a tensor per piece, with `shares` as weights."""
        if len(gradients) == 1 and shares[0] == 1.0 and not self._copies_gradients:
            found: list[Tensor | None] = list(gradients[0])
        else:
            found = self._sum(gradients, shares)
        for parameter, gradient in zip(self.parameters.values(), found, strict=True):
            parameter.grad = gradient

    def square(self) -> float:
        """The squared 2-norm of the gradients that are set."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return sum(float(norm.double().square()) for norm in torch._foreach_norm(gradients))

    def step(self, scale: float = 1.0) -> None:
        """Take an optimizer step with the gradients that are set, scaled by `scale`, and clear them."""
        assert self.optimizer is not None
        if scale != 1.0:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * scale
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _sum(self, gradients: Sequence[Sequence[Tensor | None]], shares: Sequence[float]) -> list[Tensor | None]:
        if self._mean.numel() == 0:
            self._mean = torch.empty_like(self.flat)
        found: list[Tensor | None] = []
        for index, into in enumerate(views(self._mean, self.pieces)):
            some = [(g[index], share) for g, share in zip(gradients, shares, strict=True) if g[index] is not None]
            for number, (gradient, share) in enumerate(some):
                assert gradient is not None
                if number == 0:
                    torch.mul(gradient, share, out=into)
                else:
                    into.add_(gradient, alpha=share)
            found.append(into if some else None)
        return found


def may_cut(variables: Sequence[Variable], make_optimizer: OptimizerFactory) -> bool:
    """Whether the optimizer updates the rows of a tensor independently, so that servers may share a tensor.

    Raises PlanError for several optimizers.
    """
    small = {v.name: nn.Parameter(torch.zeros((2,) * len(v.shape), dtype=getattr(torch, v.dtype))) for v in variables}
    layouts = {name: Layout(torch_name(p.dtype), tuple(p.shape)) for name, p in small.items()}
    optimizer = build_optimizer(make_optimizer, small, layouts, process_world(Plan().mesh, device="cpu"))
    if isinstance(optimizer, CombinedOptimizer):
        what = f"a server updates its pieces of the variables with one optimizer, and {optimizer.title} are several"
        raise PlanError(Refusal(what, "", "use one optimizer, or data=N in place of workers="))
    if hasattr(optimizer, "bind") or type(optimizer) in EXACT:
        return False
    return not any(
        depends_on_the_cut(optimizer, group, ndim)
        for group in optimizer.param_groups
        for ndim in {p.ndim for p in group["params"]}
    )


def _module(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module tree that has these parameters under their names."""
    root = nn.Module()
    for name, parameter in parameters.items():
        *path, key = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(key, parameter)
    return root
