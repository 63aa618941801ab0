"""Steps of backend=xla: `python xla_ranks.py`, with 8 devices, prints one JSON line for each of CASES."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.backends.xla.jax_arrays import as_in_torch, to_torch
from plait.backends.xla.lowerings.random_draws import drawn
from plait.backends.xla.lowerings.table import Result, jax_dtype
from plait.compile.ops.draw import draw, seed_of
from plait.errors import LossError, ModelError, PlaitError

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
EVERY = "data=2 zero=3 tensor=2 backend=xla"  # of which most cases share the programs


class Small(nn.Module):
    """A fused q, k, v, dropout, two norms, of which one has running statistics, and a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(16, 8)
        self.norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.drop = nn.Dropout(0.25)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.symbols.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.symbols(x)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(h)).chunk(3, -1))
        h = h + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        h = h + self.drop(self.down(F.gelu(self.up(self.batch_norm(h.flatten(0, 1)).view_as(h))))) * self.scale
        return self.head(h)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The mean over the symbols that count, unevenly many in the rows; and what the model says."""
    logits = model(batch["x"])
    losses = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
    kept = (batch["y"] < 12).flatten()
    said = logits.argmax(-1)
    loss = plait.Weighted((losses * kept).sum(), kept.sum())
    return loss, {"said": said, "right": (said == batch["y"]).float().mean(), "most": plait.Max(logits.max())}


def small(dtype: torch.dtype = torch.float64) -> Small:
    torch.manual_seed(0)
    return Small().to(dtype)


def batches(num: int = 1, rows: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    both = [torch.randint(0, 16, (num, rows, 6), generator=generator) for _ in range(2)]
    return [{"x": x, "y": y} for x, y in zip(*both, strict=True)]


def trainer(plan: str, model: nn.Module | None = None, optimizer: Any = ADAMW, **options: Any) -> plait.Trainer:
    return plait.Trainer(
        small() if model is None else model, options.pop("loss_fn", loss_fn), optimizer, plan, **options
    )


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of tensors by name."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@functools.cache
def verifier(dtype: torch.dtype) -> plait.Verifier:
    return plait.Verifier(small(dtype), loss_fn, batches()[0], clip_norm=0.5, steps=1)


def verified(plan: str) -> dict[str, Any]:
    report = verifier(torch.float32).verify(f"{plan} backend=xla")
    return {"ok": report.ok, "report": str(report)}


def trained() -> dict[str, Any]:
    """Four steps of AdamW with clipping and a schedule, an evaluation and the buffers, as on one device."""
    found = []
    for plan in ("data=1", EVERY):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a schedule looks for the optimizer's steps
            run = trainer(
                plan,
                clip_norm=0.1,
                scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
            )
            steps = [run.step(batch) for batch in batches(4)]
            short = {name: leaf[:5] for name, leaf in batches()[0].items()}
            evaluated = run.evaluate([batches()[0], short])
            values = run.full_state_dict()
            found.append((torch.stack([loss for loss, _ in steps]), steps[-1][1], evaluated, values, run))
    (one, said, score, values, _), (losses, says, scored, mine, run) = found
    programs = [each.step for each in run.executor._executables.values()]
    return {
        "losses": float((one - losses).abs().max()), "values": apart(values, mine),
        "said": torch.equal(said["said"], says["said"]), "most": float((said["most"] - says["most"]).abs()),
        "score": abs(score[0] - scored[0]), "right": float((score[1]["right"] - scored[1]["right"]).abs()),
        "programs": sum(len(step._combined) for step in programs),
    }  # fmt: skip


def optimizers() -> dict[str, Any]:
    """Two steps of each of PyTorch's optimizers that work by element, on a linear layer."""
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    of_torch = torch.optim
    factories = {
        "SGD": functools.partial(of_torch.SGD, lr=0.1, momentum=0.9, nesterov=True),
        "Adam": functools.partial(of_torch.Adam, amsgrad=True, weight_decay=0.1), "Adagrad": of_torch.Adagrad,
        "RMSprop": functools.partial(of_torch.RMSprop, momentum=0.9, centered=True), "NAdam": of_torch.NAdam,
        "RAdam": of_torch.RAdam, "Adamax": of_torch.Adamax, "Adadelta": of_torch.Adadelta, "ASGD": of_torch.ASGD,
        "two": [("weight", of_torch.Adam), ("*", functools.partial(of_torch.SGD, lr=0.1))],
    }  # fmt: skip
    found = {}
    for name, factory in factories.items():
        values = []
        for plan in ("data=1", "data=2 zero=1 backend=xla"):
            torch.manual_seed(0)
            run = trainer(plan, nn.Linear(4, 2).double(), factory, loss_fn=lambda model, x: model(x).square().mean())
            for _ in range(2):
                run.forward_backward(x)
                run.optimizer_step()
            optimizer: Any = run.optimizer
            state = {
                f"{i} {key}": torch.as_tensor(value)
                for i, own in enumerate(optimizer.state.values())
                for key, value in own.items()
                if value is not None
            }
            values.append(run.full_state_dict() | state)
        found[name] = apart(*values)
    return found


def checkpoints() -> dict[str, Any]:
    """Three steps by PyTorch, and with the second one by XLA, each from a checkpoint; then a step that is undone."""
    runs = []
    for plans in (("data=1",) * 3, ("data=1", EVERY, "data=1")):
        with tempfile.TemporaryDirectory() as folder:
            for number, (plan, batch) in enumerate(zip(plans, batches(3), strict=True)):
                run = trainer(plan, clip_norm=0.1)
                if number:
                    run.load(folder)
                run.step(batch)
                run.save(folder)
                if plan == EVERY:
                    kept = copy.deepcopy(run.state_dict())
                    run.step(batch)
                    after = run.full_state_dict()
                    run.load_state_dict(kept)
                    run.step(batch)
                    again = apart(after, run.full_state_dict())
                values = run.full_state_dict()
                run.close()
        runs.append(values)
    return {"apart": apart(*runs), "again": again}


def halves() -> dict[str, Any]:
    """Gradients of two batches for one update, weights that the user changes, an average, and what is in the model."""
    found = []
    for plan in ("data=1", EVERY):
        run = trainer(plan, clip_norm=0.1)
        one, other = batches(2)
        run.forward_backward(one)
        run.forward_backward(other)
        gradients = run.gradients()
        norm = run.optimizer_step()
        assert norm is not None
        average = run.ema(0.5)
        with run.gathered() as model, torch.no_grad():
            model.up.weight.mul_(0.5)
            model.batch_norm.running_mean.fill_(0.25)
        run.forward_backward(one)
        run.optimizer_step()
        with average.applied():
            score, _ = run.evaluate(other)
        found.append((gradients, {"norm": norm, "score": torch.tensor(score)}, run.full_state_dict()))
        model = run.engine.compiler.model
    try:
        model.up.weight.sum()
        away = ""
    except ModelError as error:
        away = str(error)
    return {"apart": [apart(a, b) for a, b in zip(*found, strict=True)], "away": away}


def thawed() -> dict[str, Any]:
    """A parameter that begins to train at the second step."""
    values, x = [], torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for plan in ("data=1", "data=2 backend=xla"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
        model[1].requires_grad_(False)
        run = trainer(plan, model, loss_fn=lambda model, x: model(x).square().mean())
        for number in range(3):
            model[1].requires_grad_(number > 0)
            run.step(x)
        values.append(run.full_state_dict())
    return {"apart": apart(*values)}


def not_finite() -> dict[str, Any]:
    """A loss that is not finite, which changes nothing."""
    run = trainer(
        "data=2 backend=xla", loss_fn=lambda model, batch: model(batch["x"]).square().mean() * batch["by"].mean()
    )
    given = {"x": batches()[0]["x"], "by": torch.ones(8)}
    run.step(given)
    before = run.full_state_dict()
    try:
        run.step(given | {"by": torch.full((8,), float("nan"))})
        error = ""
    except LossError as found:
        error = str(found)
    after = {name: value for name, value in run.full_state_dict().items() if "batch_norm" not in name}
    run.step(given)
    return {"apart": apart({name: before[name] for name in after}, after), "error": error, "step": run.step_number}


def draws() -> dict[str, Any]:
    """Random numbers of XLA and of PyTorch that differ at all."""
    kinds = {
        "bernoulli": (0.3,), "uniform": (-1.0, 2.0), "normal": (0.0, 1.0), "randint": (0.0, 1e6), "exponential": (1.0,),
        "geometric": (0.2,), "cauchy": (0.0, 1.0), "log_normal": (1.0, 2.0),
    }  # fmt: skip
    shapes, dtypes = ((5, 7), (3, 8, 1), (), (2, 3, 13)), (torch.float32, torch.bfloat16)
    key = 123456789123
    calls = [(kind, dtypes[i % 2], shapes[i % 4]) for i, kind in enumerate([*kinds, "bernoulli", "uniform"])]

    def every(seed: Any) -> list[Any]:
        return [
            drawn(seed, 3, kind, kinds[kind], Result(shape, jax_dtype(dtype))).astype(jax_dtype(dtype))
            for kind, dtype, shape in calls
        ]

    with as_in_torch():
        found = jax.jit(every)(np.array([seed_of(key) & 0xFFFFFFFF, seed_of(key) >> 32], np.uint32))
    wanted = [draw(key, 3, shape, dtype, torch.device("cpu"), kind, kinds[kind]) for kind, dtype, shape in calls]
    same = [torch.equal(to_torch(mine), one) for mine, one in zip(found, wanted, strict=True)]
    return {"differ": [str(call) for call, equal in zip(calls, same, strict=True) if not equal]}


def sequence() -> dict[str, Any]:
    """How many values of the program have the shape of a part of the residual stream, and how many the whole shape."""
    run = trainer("tensor=2 sequence=yes backend=xla")
    run.forward_backward(batches()[0])
    (executable,) = run.executor._executables.values()
    inputs = executable._inputs(0, dict(run.executor.model.named_buffers()), [batches()[0]], None)
    with as_in_torch():
        text = executable.step.run.lower(run.executor.arrays, inputs).compile().as_text()
    return {"parts": text.count("f64[8,3,8]"), "whole": text.count("f64[8,6,8]")}


class Norms(torch.optim.Optimizer):
    """Divides each gradient by its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad / p.grad.norm())


def hooked(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class Singular(nn.Module):
    """An op that no lowering has."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(x).sum()


def refused() -> dict[str, Any]:
    """What is said of what cannot be, before the first step."""
    one, square = batches()[0], torch.randn(4, 4)
    two = "data=2 backend=xla"

    def of_reading(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean() * len(str(float(model(x).sum())))

    def of_mean(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean()

    calls: dict[str, Callable[[], Any]] = {
        "devices": lambda: verifier(torch.float32).verify("replica=4 data=2 tensor=2 backend=xla"),
        "optimizer": lambda: trainer(two, optimizer=Norms).prepare(one),
        "muon": lambda: trainer(two, nn.Linear(4, 4, bias=False), torch.optim.Muon, loss_fn=of_mean).prepare(square),
        "hooks": lambda: trainer(two, optimizer=hooked).prepare(one),
        "op": lambda: trainer(two, nn.Sequential(nn.Linear(4, 4), Singular()), loss_fn=of_mean).prepare(square),
        "layout": lambda: trainer("tensor=2 backend=xla", layouts={"up.*": "only:tensor=1"}).prepare(one),
        "graph": lambda: trainer(two, nn.Linear(4, 4), loss_fn=of_reading).prepare(square),
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing"
        except PlaitError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def memory_ends() -> dict[str, Any]:
    """What is said where a step needs more memory than there is."""

    def of_pairs(model: nn.Module, x: Tensor) -> Tensor:
        wide = x.flatten()[0].detach() + torch.arange(2**22)
        return model(x).mean() + torch.outer(wide, wide).sort(0).values.sum()

    try:
        trainer("data=2 zero=1 backend=xla", nn.Linear(4, 4), loss_fn=of_pairs).step(torch.randn(4, 4))
    except PlaitError as error:
        return {"said": f"{type(error).__name__}: {error}"}
    return {"said": "nothing"}


def lowerings() -> dict[str, Any]:
    import xla_lowerings

    return xla_lowerings.compared()


PLANS = (
    "replica=2 data=2 zero=3 tensor=2 precision=bf16", "data=2 context=3 zero=2 micro=2 precision=fp16",
    "data=2 tensor=2 sequence=yes precision=bf16-params",
)  # fmt: skip
CASES: dict[str, Callable[[], dict[str, Any]]] = {plan: functools.partial(verified, plan) for plan in PLANS}
for _case in (trained, optimizers, checkpoints, halves, thawed, not_finite, draws, sequence, refused, memory_ends):
    CASES[_case.__name__] = _case
CASES["lowerings"] = lowerings


if __name__ == "__main__":
    import sys
    import time

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, case in CASES.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        start = time.process_time()
        try:
            line = case()
        except BaseException as error:
            line = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps({"case": name, **line, "seconds": time.process_time() - start}), flush=True)
