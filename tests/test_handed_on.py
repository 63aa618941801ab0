"""Tensors that one step leaves for the next: in attributes, buffers, containers and objects, as one device has them."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import PlaitError

NUM_STEPS = 4


@dataclasses.dataclass
class Memory:
    h: Tensor
    scale: float = 2.0


class Pair(NamedTuple):
    h: Tensor
    c: Tensor


def zeros() -> Tensor:
    return torch.zeros(4, 5, dtype=torch.float64)


class Stateful(nn.Module):
    """Its forward reads what the last one has left; `go_on` leaves the next."""

    def __init__(self, begin: Callable[[nn.Module], None], read: Callable[[Any], Tensor], go_on: Any) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 5), nn.Linear(5, 2)
        self.read, self.go_on = read, go_on
        begin(self)

    def forward(self, x: Tensor) -> Tensor:
        new = self.layer(x) + self.read(self)
        self.go_on(self, new.detach().tanh())
        return self.head(new)


def _state(value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda m: setattr(m, "state", value())


def _two(m: Any) -> Tensor:
    return m.state[0] + 2 * m.state[1]


def _buffers(m: Any) -> None:
    for name in ("now", "before"):
        m.register_buffer(name, zeros())


def _attributes(m: Any) -> None:
    m.now, m.before = zeros(), zeros()


def _both(m: Any) -> Tensor:
    return m.now + 2 * m.before


def _shift(m: Any, new: Tensor) -> None:
    m.now, m.before = new, m.now


def _shift_list(m: Any, new: Tensor) -> None:
    m.state[0], m.state[1] = new, m.state[0]


def _move_up(m: Any, new: Tensor) -> None:
    m.state.append(new)
    m.state.popleft()


def _frozen(m: Any) -> None:
    m.code = nn.Parameter(zeros(), requires_grad=False)
    m.register_buffer("last", zeros())


def _replace_frozen(m: Any, new: Tensor) -> None:
    m.code = nn.Parameter(0.5 * m.code + m.last, requires_grad=False)
    m.last = new


STATES: dict[str, tuple[Any, Any, Any]] = {
    "tuple": (_state(lambda: (zeros(), zeros())), _two, lambda m, new: setattr(m, "state", (new, m.state[0] + new))),
    "named tuple": (_state(lambda: Pair(zeros(), zeros())), lambda m: m.state.h - m.state.c,
                    lambda m, new: setattr(m, "state", Pair(new, new + 1))),
    "new list": (_state(lambda: [zeros(), zeros()]), _two, lambda m, new: setattr(m, "state", [new, new * 2])),
    "items of a list": (_state(lambda: [zeros(), zeros()]), _two, _shift_list),
    "queue": (_state(lambda: deque([zeros(), zeros()])), _two, _move_up),
    "new dict": (_state(lambda: {"h": zeros()}), lambda m: m.state["h"],
                 lambda m, new: setattr(m, "state", {"h": new})),
    "object": (_state(lambda: Memory(zeros())), lambda m: m.state.h * m.state.scale,
               lambda m, new: setattr(m, "state", Memory(new))),
    "tuple in a dict in a list": (_state(lambda: [{"a": (zeros(), zeros())}]), lambda m: m.state[0]["a"][1],
                                  lambda m, new: m.state[0].update(a=(new, new * 2))),
    "attributes that move up": (_attributes, _both, _shift),
    "buffers that move up": (_buffers, _both, _shift),
    "view of a buffer": (_buffers, _both, lambda m, new: (setattr(m, "before", m.now.view(4, 5)),
                                                          setattr(m, "now", new))),
    "frozen parameter": (_frozen, lambda m: m.code + m.last, _replace_frozen),
}  # fmt: skip

REFUSED: dict[str, tuple[tuple[Any, Any, Any], str]] = {
    "a list that grows": ((_state(lambda: [zeros()]), lambda m: sum(m.state), lambda m, new: m.state.append(new)),
                          r"leaves a tensor at model:state\[1\] that the next step reads"),
    "a tuple in place of None": ((_state(lambda: None), lambda m: 0 if m.state is None else _two(m),
                                  lambda m, new: setattr(m, "state", (new, new * 2))),
                                 "leaves a tensor at model:state that the next step reads"),
    "a list in place of an empty one": ((_state(list), lambda m: sum(m.state),
                                         lambda m, new: setattr(m, "state", [new])),
                                        "leaves a tensor at model:state that the next step reads"),
    "a count beside a tensor": ((_state(lambda: (zeros(), 0)), lambda m: m.state[0],
                                 lambda m, new: setattr(m, "state", (new, m.state[1] + 1))),
                                "leaves a tensor at model:state that the next step reads"),
    "another shape": ((_state(lambda: (zeros(),)), lambda m: m.state[0].mean(),
                       lambda m, new: setattr(m, "state", (new[:2],))),
                      r"reads model:state\[0\], .* and puts .* of shape \[2, 5\] in its place"),
    "one tensor at two places": ((_state(lambda: (zeros(),) * 2), _two,
                                  lambda m, new: setattr(m, "state", (new, new * 2))),
                                 r"reads one tensor at model:state\[.\] and model:state\[.\], and puts two"),
    "a trained parameter": ((lambda m: setattr(m, "code", nn.Parameter(zeros())), lambda m: m.code,
                             lambda m, new: setattr(m, "code", nn.Parameter(new))),
                            "puts another parameter in the place of code"),
    "another module": ((lambda m: setattr(m, "spare", nn.Linear(5, 2)), lambda m: 0,
                        lambda m, new: setattr(m, "head", m.spare)),
                       "puts another module in the place of head"),
    "a new parameter": ((lambda m: None, lambda m: 0, lambda m, new: setattr(m, "code", nn.Parameter(new))),
                        "makes the parameter code"),
    "a new key of a dict": ((_state(lambda: {"a": zeros()}), lambda m: m.state.get("b", 0),
                             lambda m, new: m.state.setdefault("b", new)),
                            r"leaves a tensor at model:state\['b'\] that the next step reads"),
    "the first key of a dict": ((_state(dict), lambda m: m.state.get("b", 0),
                                 lambda m, new: m.state.setdefault("b", new)),
                                r"leaves a tensor at model:state\['b'\] that the next step reads"),
}  # fmt: skip


class Knot:
    """Refers to others that refer to it."""


def _knots(m: Any) -> None:
    m.state = None
    m.knots = [Knot() for _ in range(12)]
    for knot in m.knots:
        knot.__dict__.update({f"to_{number}": other for number, other in enumerate(m.knots)})


REFUSED["objects that refer to each other"] = (
    (_knots, lambda m: 0, lambda m, new: setattr(m, "state", m.knots[0])),
    "an object of Knot through which more than 262144 values are reached",
)


def make(state: tuple[Any, Any, Any]) -> nn.Module:
    torch.manual_seed(0)
    return Stateful(*state).double()


def loss_fn(model: Any, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean()


def batch(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)}


SGD = functools.partial(torch.optim.SGD, lr=0.3)


def losses(state: tuple[Any, Any, Any], plan: str) -> list[float]:
    def rank(world: Any) -> list[float]:
        trainer = plait.Trainer(models[world.rank], loss_fn, SGD, plan, world=world)
        return [float(trainer.step(batch(step))) for step in range(NUM_STEPS)]

    mesh = plait.Plan.parse(plan).mesh
    models = [make(state) for _ in range(mesh.size)]
    return plait.run_ranks(mesh, rank)[0]


@functools.cache
def on_one_device(name: str) -> list[float]:
    model, found = make(STATES[name]), []
    optimizer = SGD([p for p in model.parameters() if p.requires_grad])
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model, batch(step))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("plan", ["data=1", "data=2 zero=3"])
@pytest.mark.parametrize("name", STATES)
def test_what_a_step_leaves_for_the_next_has_the_values_of_one_device(name: str, plan: str) -> None:
    assert losses(STATES[name], plan) == pytest.approx(on_one_device(name), rel=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_hands_on_is_refused_by_name(name: str) -> None:
    state, message = REFUSED[name]
    with pytest.raises(PlaitError, match=message):
        losses(state, "tensor=2")
