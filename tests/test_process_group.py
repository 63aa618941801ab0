"""Code for many processes, in a process of a group: model, loss and optimizer are those of one device all the same."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_loops import batch, net, nothing, plain, planned
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import plait


@pytest.fixture
def group_of_two():
    """Makes this process the first of two, whose collectives do nothing."""
    yield lambda: dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert dist.is_initialized()
    dist.destroy_process_group()


def processes():
    return dist.get_world_size() if dist.is_initialized() else 1


def by_processes():
    """The normalization of DETR's losses."""

    def loss_fn(model, rows):
        num = torch.as_tensor(float(len(rows["x"])), dtype=torch.float64)
        if processes() > 1:
            dist.all_reduce(num)
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum") / (num / processes()).clamp(min=1)

    return net(), loss_fn, nothing


def synchronized_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)).double()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), nothing


class Scaled(torch.optim.SGD):
    """Divides by the number of processes, as optimizers that sum gradients themselves."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(processes())
        super().step(closure)


@pytest.mark.parametrize("plan", ["data=2", "tensor=2", "pipeline=2 micro=2"])
@pytest.mark.parametrize("make", [by_processes, synchronized_batch_norm])
def test_model_loss_and_optimizer_find_no_process_group(make, plan, group_of_two):
    sgd = functools.partial(Scaled, lr=0.1)
    losses, parameters = plain(make, plan, steps=2, optimizer=sgd)
    group_of_two()
    found, state = planned(make, plan, steps=2, optimizer=sgd)
    assert found == pytest.approx(losses, rel=1e-9)
    for name, value in parameters.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_verify_compares_with_one_device(group_of_two):
    group_of_two()
    model, loss_fn, _ = by_processes()
    assert plait.verify(model, loss_fn, batch(), "data=2").ok


def asks_unguarded(model, rows):
    return F.cross_entropy(model(rows["x"]), rows["y"]) / dist.get_world_size()


def sums_in_a_group(group, model, rows):
    loss = F.cross_entropy(model(rows["x"]), rows["y"])
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return loss + total


def squares(model, rows):
    return model(rows["x"]).pow(2).mean()


class Gathers(torch.optim.SGD):
    def step(self, closure=None):
        dist.all_reduce(self.param_groups[0]["params"][0])
        super().step(closure)


@pytest.mark.parametrize(
    ("loss_fn", "optimizer", "who"),
    [
        (asks_unguarded, torch.optim.SGD, "dist.get_world_size()"),
        (sums_in_a_group, torch.optim.SGD, "dist.all_reduce(total, group=group)"),
        (asks_unguarded, Gathers, "dist.get_world_size()"),
        (squares, Gathers, "Gathers"),
        (squares, functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD), "optimizer's function"),
    ],
)
def test_what_communicates_by_itself_is_refused_by_name(loss_fn, optimizer, who, group_of_two):
    group_of_two()
    if loss_fn is sums_in_a_group:
        loss_fn = functools.partial(loss_fn, dist.new_group([0, 1]))
    with pytest.raises(plait.PlanError, match="through torch.distributed: .*leave it out") as caught:
        plait.Trainer(net(), loss_fn, functools.partial(optimizer, lr=0.1), "data=1", world=alone()).step(batch())
    assert who in str(caught.value)


def alone():
    worlds = []
    plait.run_ranks(plait.Plan.parse("data=1").mesh, worlds.append)
    return worlds[0]
