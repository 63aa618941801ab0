"""What Python holds: compared before each step with what it was when the step was captured, and changed by the step."""

import array
import collections
import contextvars
import enum
import functools
import importlib
import itertools
import os
import random
import secrets
import sys
import threading
import types
import typing
import uuid
import weakref

import numpy as np
import plain_loops
import pytest
import torch
import torch.nn.functional as F
from plain_loops import SGD, batch, check, net, nothing
from torch import nn

import plait


class Stateful(nn.Module):
    """What a forward changes on its module, or reads there."""

    def __init__(self, how):
        super().__init__()
        self.net, self.how = net(), how
        self.calls, self.first, self.last = 0, True, None

    def forward(self, x):
        y = self.net(x)
        if self.how == "counts":
            self.calls += 1
        elif self.how == "warms up":
            self.calls += 1
            y = y * 2 if self.calls < 3 else y
        elif self.how == "every other":
            self.calls += 1
            y = y * 2 if self.calls % 2 == 0 else y
        elif self.how == "once":
            y, self.first = (y + 1 if self.first else y), False
        elif self.how == "logs":
            self.last = y.detach()
        elif self.how == "caches":
            self.last = torch.arange(16.0) if self.last is None else self.last
            y = y + self.last
        elif self.how == "computes":
            self.calls += 1
            y = y * self.calls
        elif self.how == "leaves":
            y = y if self.last is None else y + self.last
            self.last = y.detach().mean(0)
        elif self.how == "draws":
            y = y * random.random()
        return y


@pytest.mark.parametrize("how", ["counts", "warms up", "every other", "once", "logs", "caches"])
def test_what_a_forward_changes_in_python(how):
    check(lambda: (Stateful(how), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), nothing), "data=2", steps=5)
    model = Stateful(how)
    trainer = plait.Trainer(model, lambda m, b: m(b["x"]).pow(2).mean(), SGD, "")
    for _ in range(3):
        trainer.step(batch())
    assert model.calls == (3 if how in ("counts", "warms up", "every other") else 0)
    assert model.first is (how != "once")
    assert len(trainer.engine.compiler.captures._found) <= 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("computes", "changes model:calls from 0 to 1 and computes with it"),
        ("leaves", "leaves a tensor at model:last that the next step reads"),
        ("draws", "draws from Python's random"),
    ],
)
def test_what_no_graph_can_stand_for_is_named(how, message):
    model, state = Stateful(how), random.getstate()
    for plan in ("data=2", "tensor=2"):
        with pytest.raises(plait.CaptureError, match=message):
            plait.verify(model, lambda m, b: m(b["x"]).pow(2).mean(), batch(), plan)
    assert (model.calls, model.last) == (0, None) and random.getstate() == state


def test_a_value_that_makes_no_difference_is_captured_once_more_and_then_no_longer_looked_at():
    settings = {"name": "a", "epoch": 0, "history": [0.0]}

    def loss_fn(model, rows):
        return model(rows["x"]).pow(2).mean() if settings["epoch"] < 100 else model(rows["x"]).abs().mean()

    trainer = plait.Trainer(net(), loss_fn, SGD, "")
    for epoch in range(6):
        settings["epoch"] = epoch
        settings["history"].append(0.0)
        trainer.step(batch())
    assert len({id(captured) for captured in trainer.engine.compiler.captures._found.values()}) == 1
    settings["epoch"] = 100  # and still its conditions count
    expected = trainer.engine.compiler.model(batch()["x"]).abs().mean().item()
    assert float(trainer.step(batch())) == pytest.approx(expected, rel=1e-9)


def test_many_captures_are_warned_of():
    weight = {"w": 0.0}
    trainer = plait.Trainer(net(), lambda m, b: m(b["x"]).pow(2).mean() * weight["w"], SGD, "")

    def train():
        for step in range(10):
            weight["w"] = float(step)
            trainer.step(batch())

    with pytest.warns(UserWarning, match=r"captured 9 times.*loss_fn:weight\['w'\] is 8.0 after 7.0.*0-d tensor"):
        train()


def test_a_number_read_of_a_tensor_from_outside_is_compared():
    gate = torch.tensor(1.0)
    trainer = plait.Trainer(net(), lambda m, b: m(b["x"]).pow(2).mean() * (2 if gate > 0.5 else 1), SGD, "")
    first = float(trainer.step(batch()))
    gate.fill_(0.0)
    expected = trainer.engine.compiler.model(batch()["x"]).pow(2).mean().item()
    assert float(trainer.step(batch())) == pytest.approx(expected, rel=1e-9) and first > 0


def test_another_module_in_the_place_of_one_is_refused():
    model = net()
    trainer = plait.Trainer(model, lambda m, b: m(b["x"]).pow(2).mean(), SGD, "")
    trainer.step(batch())
    model[2] = nn.Linear(32, 16).double()
    with pytest.raises(plait.PlanError, match="the module 2 of the model was exchanged"):
        trainer.step(batch())


class Hooked(nn.Module):
    """Registers hooks at its first forward, and remembers that it has, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        if not getattr(self, "is_hooked", False):
            self.first.register_forward_hook(lambda module, args, output: self.seen.append(output))
            self.is_hooked = True
        self.seen = []
        z = self.second(self.first(x).relu())
        return z, self.seen[0]


def test_hooks_that_the_first_forward_registers_are_there_at_every_capture() -> None:
    model = Hooked().double()
    verifier = plait.Verifier(model, lambda m, b: sum(part.square().mean() for part in m(b["x"])), batch())
    for plan in ("data=2", "tensor=2", "pipeline=2 micro=2"):
        assert verifier.verify(plan).ok
    assert not hasattr(model, "is_hooked") and not model.first._forward_hooks


def an_iterator():
    items = itertools.count(1)
    return lambda m, b: m(b["x"]).square().mean() * next(items)


def a_generator():
    items = (item for item in (1.0, 2.0, 3.0))
    return lambda m, b: m(b["x"]).square().mean() * next(items)


def a_running_mean_of_numbers():
    state = types.SimpleNamespace(mean=1.0)

    def loss_fn(m, b):
        loss = m(b["x"]).square().mean()
        state.mean = 0.9 * state.mean + 0.1 * loss.item()
        return loss / state.mean

    return loss_fn


def a_memory_bank():
    bank = collections.deque(maxlen=4)

    def loss_fn(m, b):
        z = m(b["x"])
        loss = z.square().mean()
        if bank:
            loss = loss + (z - bank[-1]).square().mean()
        bank.append(z.detach())
        return loss

    return loss_fn


def test_a_log_of_tensors_is_no_state():
    history = []

    def loss_fn(m, b):
        loss = m(b["x"]).square().mean()
        history.append(loss.detach())
        return loss

    assert plait.verify(net(), loss_fn, batch(), "tensor=2").ok
    assert history == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (a_memory_bank, r"leaves a tensor at loss_fn:bank\[0\] that the next step reads"),
        (an_iterator, "takes an item from the iterator loss_fn:items"),
        (a_generator, "takes an item from the iterator loss_fn:items"),
        (a_running_mean_of_numbers, "leaves at loss_fn:state.mean a number"),
    ],
)
def test_what_one_step_leaves_to_the_next_in_python_is_refused_by_its_place(make, message):
    with pytest.raises(plait.PlaitError, match=message):
        plait.verify(net(), make(), batch(), "tensor=2")


class Made(collections.OrderedDict):
    """Makes a value of what it holds, as the activation functions of transformers are."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


class Losses:
    """Collects the losses of layers, and has a new list for the next step."""

    def __init__(self):
        self.found = []

    def total(self):
        total, self.found = sum(self.found), []
        return total


def test_a_list_that_the_step_fills_and_exchanges_is_no_state():
    losses = Losses()

    def loss_fn(m, b):
        losses.found.append(m(b["x"]).square().mean())
        return losses.total()

    assert plait.verify(net(), loss_fn, batch(), "tensor=2").ok
    assert losses.found == []


def test_what_a_dict_makes_of_its_values_is_not_asked_for(tmp_path, monkeypatch):
    """And modules that a step imports stay."""
    (tmp_path / "imported_late.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Made(relu=None, act=nn.ReLU)

    def loss_fn(m, b):
        importlib.import_module("imported_late")
        return made["act"](m(b["x"])).mean() * len(sys.modules) / len(sys.modules)

    assert plait.verify(net(), loss_fn, batch(), "tensor=2").ok
    assert "imported_late" in sys.modules
    assert made.keys() == {"relu", "act"}


class Making(nn.Module):
    """Makes a buffer in its first forward, by `make` of its rows, and what `again` makes of it in each later one."""

    def __init__(self, make, again=None):
        super().__init__()
        self.net, self.make, self.again = net(), make, again
        self.register_buffer("kept", None)

    def forward(self, x):
        y = self.net(x)
        if self.kept is None:
            self.register_buffer("kept", self.make(y.detach()))
        elif self.again is not None:
            self.kept = self.again(self.kept)
        return y * self.kept


def mean_square(m, b):
    return m(b["x"]).square().mean()


def test_a_table_that_the_first_forward_keeps_is_made_in_each():
    def table(y):
        made = torch.zeros(16, dtype=torch.float64)
        made[::2] = torch.arange(8.0)
        return made

    assert plait.verify(Making(table), mean_square, batch(), "tensor=2").ok
    trainer = plait.Trainer(model := Making(table), mean_square, SGD, "data=1")
    assert trainer.step(batch()) > trainer.step(batch())
    assert model.kept is None


@pytest.mark.parametrize(
    ("make", "again"),
    [
        (lambda y: y.mean(0), None),
        (lambda y: y.mean(0), lambda kept: kept * 0.9),
        (lambda y: y.new_ones(()), torch.exp),
    ],
    ids=["of the first rows", "a moving average", "a count"],
)
def test_a_buffer_that_one_step_makes_for_the_next_is_refused(make, again):
    with pytest.raises(plait.CaptureError, match="makes the buffer kept, and the next step goes on from it"):
        plait.verify(Making(make, again), mean_square, batch(), "tensor=2")


def test_modules_that_are_in_place_may_be_put_there():
    def loss_fn(m, b):
        return m.to(b["x"].device)(b["x"]).square().mean()

    assert plait.verify(net(), loss_fn, batch(), "tensor=2").ok
    with pytest.raises(plait.CaptureError, match="moves or casts a Sequential, with .to"):
        plait.verify(net(), lambda m, b: m.float()(b["x"].float()).mean(), batch(), "tensor=2")


def test_a_function_in_the_place_of_another_is_another_step():
    model = net()
    model.act = F.gelu
    trainer = plait.Trainer(model, lambda m, b: m.act(m(b["x"])).square().mean(), SGD, "data=1")
    trainer.step(batch())
    model.act = torch.tanh
    expected = float(torch.tanh(model(batch()["x"])).square().mean().detach())
    assert float(trainer.step(batch())) == pytest.approx(expected, rel=1e-9)


def test_a_learning_rate_that_the_loss_reads_is_compared():
    model = net()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    rate = functools.partial(torch.optim.SGD, lr=0.0)
    trainer = plait.Trainer(model, lambda m, b: m(b["x"]).square().mean() * scheduler.get_last_lr()[0], rate, "data=1")
    losses = []
    for _ in range(3):
        losses.append(float(trainer.step(batch())))
        other.step()
        scheduler.step()
    assert losses == pytest.approx([losses[0], losses[0] / 2, losses[0] / 4], rel=1e-9)


def test_an_array_of_numpy_is_a_constant():
    weights = np.arange(1.0, 17.0)
    verifier = plait.Verifier(net(), lambda m, b: (m(b["x"]) * torch.from_numpy(weights)).square().mean(), batch())
    assert verifier.verify("data=2").ok and verifier.verify("tensor=2").ok


class SteppedBySchedule(torch.optim.SGD):
    """Steps a scheduler of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self, 1, 0.5)

    def step(self, closure=None):
        super().step()
        self.scheduler.step()


@pytest.mark.parametrize("plan", ["tensor=2", "data=2 zero=3"])
def test_trying_an_optimizer_leaves_its_scheduler_alone(plan):
    report = plait.verify(
        net(), lambda m, b: m(b["x"]).square().mean(), batch(), plan, optimizer=SteppedBySchedule, steps=3
    )
    assert report.ok


class Settings:
    scale = 1.0
    table: typing.ClassVar = {"a": 1.0}


class Level(enum.Enum):
    LOW = 1


CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
BUFFER, NUMBERS, VIEW = bytearray(b"\1"), array.array("d", [1.0]), memoryview(bytearray(b"\1\1"))
SETTINGS, UNDER = collections.UserDict(a=1.0), {"a": 1.0}
CHAIN, PROXY = collections.ChainMap(UNDER), types.MappingProxyType(UNDER)
LOCAL, OBJECT, GLOBAL = threading.local(), Settings(), 1.0
LOCAL.v, REFERENCE, Level.LOW.scale = 1.0, weakref.ref(OBJECT), 1.0


def imports():
    import plain_loops as one  # as functions do that avoid a cycle of imports

    return getattr(one, "SCALE", 1.0)


READ = {
    "a class attribute": (lambda: Settings.scale, lambda v: setattr(Settings, "scale", v)),
    "a dict of a class": (lambda: Settings.table["a"], lambda v: Settings.table.update(a=v)),
    "the class of an object": (lambda: type(OBJECT).scale, lambda v: setattr(Settings, "scale", v)),
    "the environment": (lambda: float(os.environ["PLAIT_TEST_X"]), lambda v: os.environ.update(PLAIT_TEST_X=str(v))),
    "getenv": (lambda: float(os.getenv("PLAIT_TEST_X", "1")), lambda v: os.environ.update(PLAIT_TEST_X=str(v))),
    "a context variable": (CONTEXT.get, CONTEXT.set),
    "bytes": (lambda: BUFFER[0], lambda v: BUFFER.__setitem__(0, int(v))),
    "an array": (lambda: NUMBERS[0], lambda v: NUMBERS.__setitem__(0, v)),
    "a view": (lambda: VIEW[0], lambda v: VIEW.__setitem__(0, int(v))),
    "UserDict": (lambda: SETTINGS["a"], lambda v: SETTINGS.update(a=v)),
    "ChainMap": (lambda: CHAIN["a"], lambda v: UNDER.update(a=v)),
    "a proxy": (lambda: PROXY["a"], lambda v: UNDER.update(a=v)),
    "a thread's own": (lambda: LOCAL.v, lambda v: setattr(LOCAL, "v", v)),
    "a weak reference": (lambda: REFERENCE().scale, lambda v: setattr(OBJECT, "scale", v)),
    "globals()": (lambda: globals()["GLOBAL"], lambda v: globals().update(GLOBAL=v)),
    "a member of an enum": (lambda: Level.LOW.scale, lambda v: setattr(Level.LOW, "scale", v)),
    "a module": (imports, lambda v: setattr(plain_loops, "SCALE", v)),
}


@pytest.mark.parametrize("how", READ)
def test_what_a_step_reads_in_python_is_compared(how, monkeypatch):
    read, change = READ[how]
    monkeypatch.setenv("PLAIT_TEST_X", "1")
    monkeypatch.setattr(plain_loops, "SCALE", 1.0, raising=False)
    monkeypatch.setattr(OBJECT, "scale", 1.0, raising=False)
    if "class" in how:
        monkeypatch.delattr(OBJECT, "scale")
    change(1.0)
    model = net()

    def loss_fn(m, b):
        return m(b["x"]).square().mean() * read()

    trainer = plait.Trainer(model, loss_fn, SGD, "")
    for value in (1.0, 3.0, 1.0, 2.0):
        change(value)
        with torch.no_grad():
            expected = model(batch()["x"]).square().mean() * value
        assert float(trainer.step(batch())) == pytest.approx(float(expected), rel=1e-12)
    change(1.0)


@pytest.mark.parametrize("draw", [uuid.uuid4, lambda: random.SystemRandom().random(), secrets.token_bytes])
def test_random_bytes_of_the_system_are_draws(draw):
    with pytest.raises(plait.CaptureError, match="it draws from the system's random bytes"):
        plait.verify(net(), lambda m, b: (draw(), m(b["x"]).square().mean())[1], batch(), "data=2")


def test_a_module_that_asks_for_random_bytes_as_it_is_imported_draws_nothing(tmp_path, monkeypatch):
    (tmp_path / "asks_for_bytes.py").write_text("import os\nBYTES = os.urandom(8)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def loss_fn(m, b):
        import asks_for_bytes  # noqa: F401  # as libraries import others when they are first used

        return m(b["x"]).square().mean()

    assert plait.verify(net(), loss_fn, batch(), "data=2").ok


def test_what_a_step_imports_stays_imported(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def loss_fn(m, b):
        import imported_late  # noqa: F401

        return m(b["x"]).square().mean() * (1.0 if "imported_late" in sys.modules else 2.0)

    assert plait.verify(net(), loss_fn, batch(), "data=2").ok
    assert "imported_late" in sys.modules


@pytest.mark.parametrize("how", ["a module, run before", "with fullgraph", "in place", "the loss"])
def test_what_torch_compile_has_made_is_captured_as_it_was_written(how):
    def make():
        model = net()
        loss_fn = lambda m, b: F.cross_entropy(m(b["x"]), b["y"])  # noqa: E731
        if how == "in place":
            model.compile(backend="aot_eager")
        elif how == "the loss":
            loss_fn = torch.compile(loss_fn, backend="aot_eager")
        else:
            model[0] = torch.compile(model[0], backend="aot_eager", fullgraph=how == "with fullgraph")
        if how == "a module, run before":
            model(batch()["x"])
        return model, loss_fn, nothing

    check(make, "tensor=2", steps=2)
