"""A plain PyTorch loop and the same under a plan, for tests of what a step reads and changes beside its parameters."""

import functools

import pytest
import torch
from torch import nn

import plait

PLANS = ["data=1", "data=2", "tensor=2", "data=2 zero=3", "pipeline=2 micro=2"]
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def net(width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, width)).double()


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 4, (8,), generator=generator)}


def micros(rows, num):
    return [{k: v.chunk(num)[i] for k, v in rows.items()} for i in range(num)]


def plain(make, plan, steps=4, optimizer=SGD):
    """Losses and final parameters of the plain loop, with as many microbatches as the plan has."""
    model, loss_fn, change = make()
    made, losses = optimizer(model.parameters()), []
    num = plait.Plan.parse(plan).micro
    for step in range(steps):
        made.zero_grad()
        found = [loss_fn(model, rows) for rows in micros(batch(), num)]
        (sum(found) / num).backward()
        made.step()
        losses.append(float(sum(found).detach() / num))
        change(model, step)
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def planned(make, plan, steps=4, optimizer=SGD):
    """The same under the plan, every rank with objects of its own."""

    plan = plait.Plan.parse(plan)
    each = [make() for _ in range(plan.mesh.size)]  # not by the ranks, who have random numbers in common

    def rank(world):
        model, loss_fn, change = each[world.rank]
        trainer = plait.Trainer(model, loss_fn, optimizer, plan, world=world)
        losses = []
        for step in range(steps):
            losses.append(float(trainer.step(batch())))
            change(model, step)
        return losses, trainer.full_state_dict()

    found = plait.run_ranks(plan.mesh, rank)
    assert all(losses == found[0][0] for losses, _ in found)
    return found[0]


def check(make, plan, **options):
    losses, parameters = plain(make, plan, **options)
    got, state = planned(make, plan, **options)
    assert got == pytest.approx(losses, rel=1e-9)
    for name, value in parameters.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def nothing(model, step):
    pass
