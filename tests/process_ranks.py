"""What the ranks of test_process.py run: functions of a module, as processes need them."""

from __future__ import annotations

import functools
import itertools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

import plait
from plait.api.job.gpt import BytesGPT, loss_fn
from plait.comm.failure import guard
from plait.comm.protocol import World
from plait.engine.compiler import Captures, Compiler
from plait.errors import LossError, PlanError

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def symbols(rows: int = 8, sequence: int = 17, seed: int = 7) -> Tensor:
    return torch.randint(0, 256, (rows, sequence), generator=torch.Generator().manual_seed(seed))


def batch(rows: int = 8, sequence: int = 17, seed: int = 7) -> dict[str, Tensor]:
    found = symbols(rows, sequence, seed)
    return {"x": found[:, :-1].contiguous(), "y": found[:, 1:].contiguous()}


def gpt(seed: int = 0, layers: int = 1) -> BytesGPT:
    torch.manual_seed(seed)
    return BytesGPT(layers, width=32, heads=4, sequence=16)


@functools.cache
def captures() -> Captures:
    """Of `gpt()`; the process that ranks are forked from has captured batches of 8 and of 12 rows."""
    return Captures(gpt(), loss_fn)


def trainer_of(plan: str, world: World | None = None) -> plait.Trainer:
    """A Trainer of `gpt()` for ranks that need not each capture it."""
    compiler = Compiler(captures(), plait.Plan.parse(plan))
    return plait.Trainer(compiler.model, loss_fn, ADAMW, plan, world=world, compiler=compiler)


def text(world: World) -> str:
    return " ".join(f"{axis}={size}" for axis, size in world.mesh.axes if size > 1)


def state_is_dtensors(world: World) -> dict[str, Any]:
    """Two steps under one plan; what the state looks like, and the whole model."""
    trainer = trainer_of(text(world), world)
    losses = [float(trainer.step(batch(seed=i))) for i in range(2)]
    state = trainer.state_dict()
    model = state["model"]
    moments = state["optimizer"]["state"]["blocks.0.up.weight"]["exp_avg"]
    whole = trainer.full_state_dict()
    again = trainer_of(text(world), world)
    again.load_state_dict(state)
    again.prepare(batch())
    same = all(torch.equal(a, b) for a, b in zip(again.full_state_dict().values(), whole.values(), strict=True))
    return {
        "losses": losses,
        "dtensors": all(isinstance(value, DTensor) for value in model.values()),
        "local": tuple(model["blocks.0.up.weight"].to_local().shape),
        "moments": (tuple(moments.shape), tuple(moments.to_local().shape)),
        "whole": {name: value.numpy() for name, value in whole.items()},
        "same": same,
        "next": (float(trainer.step(batch(seed=5))), float(again.step(batch(seed=5)))),
    }


def save(world: World, path: Path) -> list[float]:
    trainer = trainer_of(text(world), world)
    for i in range(2):
        trainer.step(batch(seed=i))
    trainer.save(path, {"note": "two steps"})
    return [float(trainer.step(batch(seed=i))) for i in range(2, 5)]


def resume(world: World, path: Path) -> list[float]:
    trainer = trainer_of(text(world), world)
    trainer.prepare(batch())
    assert trainer.load(path) == {"note": "two steps"}
    assert trainer.step_number == 2
    return [float(trainer.step(batch(seed=i))) for i in range(2, 5)]


def adopts_the_users_model(world: World) -> bool:
    """With data parallelism the user's own model is what is trained."""
    model = gpt(seed=world.rank)  # every rank its own values: rank 0's count
    before = model.head.weight.detach().clone()
    trainer = plait.Trainer(model, loss_fn, ADAMW, text(world))
    trainer.step(batch())
    assert not torch.equal(model.head.weight, before)
    whole = trainer.full_state_dict()
    return all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


def from_meta(world: World) -> dict[str, Any]:
    """The first values of a model that never had any."""
    with torch.device("meta"):
        model = BytesGPT(layers=2, width=32, heads=4, sequence=16)
    trainer = plait.Trainer(model, loss_fn, ADAMW, text(world), world=world, seed=4)
    trainer.prepare(batch())
    return {name: value.numpy() for name, value in trainer.full_state_dict().items()}


def loader_and_global_batches(world: World) -> list[float]:
    """A rank that reads only its own rows trains as one that is given the whole batch."""
    rows = symbols(rows=24)

    class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"x": rows[i, :-1], "y": rows[i, 1:]}

    local = plait.loader(Rows(), batch_size=8, shuffle=False, world=world, plan=text(world))
    trainer = trainer_of(text(world), world)
    losses = []
    for part in local:
        assert isinstance(part, plait.LocalBatch)
        losses.append(float(trainer.step(part)))
    other = trainer_of(text(world), world)
    whole = [
        float(other.step({"x": b[:, :-1], "y": b[:, 1:]})) for (b,) in DataLoader(TensorDataset(rows), batch_size=8)
    ]
    assert losses == whole, (losses, whole)
    return losses


def evaluates(world: World) -> tuple[float, float, float]:
    torch.manual_seed(0)
    model = BytesGPT(layers=1, width=32, heads=4, sequence=16, dropout=0.5)
    trainer = plait.Trainer(model, loss_fn, ADAMW, text(world), world=world)
    one = trainer.evaluate(batch())
    loop = trainer.evaluate(iter([batch(seed=1), batch(4, seed=2)]))
    with torch.no_grad():
        model.eval()
        expected = float(loss_fn(model, batch()))
    return one, expected, loop


def second_shape(world: World) -> list[float]:
    trainer = plait.Trainer(gpt(), loss_fn, ADAMW, text(world), world=world)
    return [float(trainer.step(batch(rows, length))) for rows, length in ((8, 17), (4, 9), (8, 17))]


class Stops(nn.Module):
    """Looks at a number to decide what to do: no graph can hold that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:  # the line that the message must name
            x = self.first(x)
        return self.second(self.first(x))


def stops() -> Stops:
    torch.manual_seed(0)
    return Stops()


class Centred(Stops):
    """Has a trained centre, which also follows the mean of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x - self.centre)
        self.centre.data = self.centre.data * 0.9 + x.mean(0) * 0.1
        return found


class Keeps(nn.Module):
    """Moves a frozen copy of its weights, as a momentum encoder does; may also keep a mean of its rows."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.inner, self.copy = stops(), stops().requires_grad_(False)
        self.rows = rows
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.copy.parameters(), self.inner.parameters(), strict=True):
                mine.data = mine.data * 0.5 + other.data * 0.5
            if self.rows:
                self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return self.inner(x) - self.copy(x) * 0.5


def keeps(rows: bool) -> list[float]:
    """The losses of a plain loop over a Keeps."""
    model = Keeps(rows)
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        total, weight = stops_loss(model, stops_batch())
        (total / weight).backward()
        optimizer.step()
        losses.append(float((total / weight).detach()))
    return losses


def stops_loss(model: nn.Module, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    keep = rows["keep"]
    return plait.Weighted(((model(rows["x"])[:, 0] - rows["y"]).square() * keep).sum(), keep.sum())


def stops_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(8, 8, generator=generator),
        "y": torch.randn(8, generator=generator),
        "keep": torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1]),
    }


def under_ddp(world: World) -> list[float]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = plait.Trainer(
            Stops(), stops_loss, functools.partial(torch.optim.SGD, lr=0.1), text(world), world=world
        )
        losses = [float(trainer.step(stops_batch())) for _ in range(3)]
    if world.rank == 0:
        assert any("process_ranks.py" in str(w.message) for w in caught)
    return losses


def labelled(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return (model(rows["x"])[:, 0] - rows["y"])[rows["keep"] > 0].square().mean()


def contrasting(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    found = model(rows["x"])
    return (found - found.T).square().mean() + found.square().mean()


def alone(model: nn.Module, rows: dict[str, Tensor]) -> Any:
    errors = (model(rows["x"])[:, 0] - rows["y"]).square()
    return errors.mean(), {"errors": errors, "most": plait.Max(errors.max()), "mean": errors.mean()}


def random_loss(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return (model(rows["x"] + torch.randn_like(rows["x"]))[:, 0] - rows["y"]).square().mean()


def other_numbers_under_ddp(world: World) -> dict[str, Any]:
    """What becomes of losses that the ranks' own do, and do not, make."""
    found: dict[str, Any] = {}
    rows = {name: value[:7] for name, value in stops_batch().items()}

    def step(loss: Any, model: nn.Module, plan: str = "", **more: Any) -> Any:
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = plait.Trainer(model, loss, sgd, f"{text(world)} {plan}", world=world, **more).step(rows)
        return tree_map(Tensor.tolist, found)  # a tensor would be gone with its process

    for loss in (labelled, contrasting, stops_loss, alone, random_loss):
        try:
            found[loss.__name__] = step(loss, stops())
        except LossError as error:
            found[loss.__name__] = str(error)
    found["allowed"] = float(step(contrasting, stops(), allow=("local_loss",)))
    for plan in ("", "batchnorm=local"):
        try:
            found[f"norm {plan}"] = float(step(stops_loss, nn.Sequential(stops(), nn.BatchNorm1d(1)), plan))
        except PlanError as error:
            found[f"norm {plan}"] = str(error)
    try:
        step(stops_loss, Keeps(rows=True))
    except LossError as error:
        found["keeps rows"] = str(error)
    try:
        step(stops_loss, Centred())
    except LossError as error:
        found["centred"] = str(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        trainer = plait.Trainer(Keeps(rows=False), stops_loss, sgd, text(world), world=world)
        found["keeps"] = [float(trainer.step(stops_batch())) for _ in range(3)]
    return found


def refused_elsewhere(world: World) -> str:
    trainer = plait.Trainer(Stops(), stops_loss, functools.partial(torch.optim.SGD, lr=0.1), text(world), world=world)
    try:
        trainer.step(stops_batch())
    except PlanError as error:
        return str(error)
    return ""


def wire_bytes(world: World) -> tuple[int, int]:
    trainer = trainer_of(text(world), world)
    trainer.step(batch())
    before = world.comm("data").links.total()
    trainer.step(batch())
    return world.comm("data").links.total() - before, 4 * sum(p.numel() for p in gpt().parameters())


def whole_state(trainer: plait.Trainer) -> dict[str, Any]:
    """Model and optimizer state as whole arrays, and all else."""
    state = trainer.state_dict()
    found = {f"model/{name}": value for name, value in state["model"].items()}
    for name, values in state["optimizer"]["state"].items():
        found |= {f"{name}/{key}": value for key, value in values.items()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: value.cpu().numpy().copy() for name, value in whole.items()} | {"step": state["step"]}


def save_state(world: World, plan: str, path: Path) -> dict[str, Any]:
    trainer = trainer_of(plan, world)
    for i in range(2):
        trainer.step(batch(12, seed=i))
    trainer.save(path, wait=False)
    found = whole_state(trainer)
    trainer.step(batch(12, seed=2))
    trainer.close()
    return found


def load_state(world: World, plan: str, path: Path, again: Path) -> dict[str, Any]:
    trainer = trainer_of(plan, world)
    trainer.prepare(batch(12))
    trainer.load(path)
    found = whole_state(trainer)
    trainer.save(again)
    return found


def eager_state(world: World, path: Path) -> tuple[list[float], list[float]]:
    """What a model that cannot be captured does after a save, and after it is loaded again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = plait.Trainer(
            Stops(), stops_loss, functools.partial(torch.optim.Adam, lr=0.1), text(world), world=world
        )
        trainer.step(stops_batch())
    trainer.save(path, wait=False)
    first = [float(trainer.step(stops_batch())) for _ in range(3)]
    trainer.load(path)
    return first, [float(trainer.step(stops_batch())) for _ in range(3)]


def train_until(folder: str, plan: str, steps: int) -> None:
    """Go on from the last checkpoint in the folder, if there is one, and save each step in the background.

    Every rank writes what it did: step, loss, and the rows it saw.
    """
    rows = TensorDataset(symbols(rows=48))
    trainer = trainer_of(plan)
    data = plait.loader(rows, batch_size=8, seed=1, plan=plan, collate=_numbered)
    trainer.prepare(next(iter(plait.loader(rows, batch_size=8, seed=1, plan=plan, collate=_numbered))))
    if list(Path(folder).glob("step-*/manifest.json")):
        data.load_state_dict(trainer.load(folder)["data"])
    print("ready", flush=True)
    with open(f"{folder}-{trainer.world.rank}.log", "a", buffering=1) as log:
        while trainer.step_number < steps:
            for part in data:
                loss = float(trainer.step(part))
                log.write(f"{trainer.step_number} {loss.hex()} {part.tree['x'].sum()}\n")
                trainer.save(folder, {"data": data.state_dict()}, wait=False)
                if trainer.step_number == steps:
                    break
    trainer.close()


def _numbered(items: list[tuple[Tensor]]) -> dict[str, Tensor]:
    found = torch.stack([item for (item,) in items])
    return {"x": found[:, :-1].contiguous(), "y": found[:, 1:].contiguous()}


def file_place(tensor: Tensor) -> str:
    """What memory file a tensor lies in, and where; the same for all that share it."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, offset, _, inode, *name = line.split(None, 5)
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            return f"{inode} {address - start + int(offset, 16)} {' '.join(name)}"
    return ""


def central_storage(world: World) -> dict[str, Any]:
    """Three steps with one copy of the variables: where the parameters lie, and what was trained."""
    model = gpt(seed=world.rank)  # every rank its own values: rank 0's count
    trainer = plait.Trainer(model, loss_fn, ADAMW, f"{text(world)} central=host", world=world)
    trainer.engine._adopt = True
    trainer.prepare(batch())
    inputs = trainer.executor.rank_parameters.inputs  # type: ignore[union-attr]
    before = world.comm("data").links.total()
    losses = [float(trainer.step(batch(seed=i))) for i in range(3)]
    sent = world.comm("data").links.total() - before
    whole = trainer.full_state_dict()
    found = {
        "places": {name: file_place(value) for name, value in inputs.items()},
        "losses": losses,
        "bytes": sent,
        "whole": {name: value.numpy() for name, value in whole.items()},
        "model": {name: value.detach().clone().numpy() for name, value in model.state_dict().items()},
    }
    world.everyone().barrier()
    return found


def train_guarded(folder: str, plan: str) -> None:
    """Save the second step, then go on until something fails."""
    trainer = trainer_of(plan)
    with guard(trainer.world):
        for step in itertools.count():
            trainer.step(batch(12, seed=step))
            if step == 1:
                trainer.save(folder)
                print("ready", flush=True)
