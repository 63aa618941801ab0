"""What a step reads that is neither parameter, buffer nor batch, and what it changes beside its parameters.

Compared with plain PyTorch, under plans of every kind.
"""

import collections
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from plain_loops import PLANS, SGD, batch, check, net, nothing, plain
from torch import nn

import plait

# tensors and modules that the loss closes over


def weight_filled():
    weight = torch.tensor(0.0, dtype=torch.float64)
    return (
        net(),
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"]) + weight * m(b["x"]).pow(2).mean(),
        lambda m, i: weight.fill_(i + 1.0),
    )


def weight_rebound():
    state = {"w": torch.tensor(0.0, dtype=torch.float64)}

    def change(model, step):
        state["w"] = torch.tensor(step + 1.0, dtype=torch.float64)

    return net(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]) + state["w"] * m(b["x"]).pow(2).mean(), change


def weight_number():
    state = {"w": 0.0}
    return (
        net(),
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"]) + state["w"] * m(b["x"]).pow(2).mean(),
        lambda m, i: state.update(w=float(i // 2)),
    )


def mean_teacher():
    teacher = net().requires_grad_(False)

    def change(model, step):  # of what every plan leaves as it is
        for p in teacher.parameters():
            p.mul_(0.5)

    return net(), lambda m, b: F.mse_loss(m(b["x"]), teacher(b["x"]) * 0.5 + 1), change


def centre_in_place():
    centre = torch.zeros(16, dtype=torch.float64)

    def loss_fn(model, rows):
        z = model(rows["x"])
        loss = (z - centre).pow(2).mean()
        centre.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)
        return loss

    return net(), loss_fn, nothing


def centre_rebound():
    state = {"centre": torch.zeros(16, dtype=torch.float64)}

    def loss_fn(model, rows):
        z = model(rows["x"])
        loss = (z - state["centre"]).pow(2).mean()
        state["centre"] = state["centre"] * 0.9 + z.detach().mean(0) * 0.1
        return loss

    return net(), loss_fn, nothing


class Scaled(nn.Module):
    """A plain attribute that is a tensor, and one that is a number."""

    def __init__(self):
        super().__init__()
        self.net, self.scale, self.shift = net(), torch.ones(16, dtype=torch.float64), 0.0

    def forward(self, x):
        return self.net(x) * self.scale + self.shift


def attributes():
    def change(model, step):
        model.scale = model.scale + step
        model.shift = float(step // 2)

    return Scaled(), lambda m, b: m(b["x"]).pow(2).mean(), change


OUTSIDE = [
    weight_filled, weight_rebound, weight_number, mean_teacher, centre_in_place, centre_rebound, attributes,
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        *((make, "data=1") for make in OUTSIDE),
        *((make, plan) for make in (weight_rebound, mean_teacher, centre_in_place) for plan in PLANS[1:]),
        (centre_rebound, "pipeline=2 micro=2"), (weight_number, "tensor=2"), (attributes, "data=2"),
    ],
)  # fmt: skip
def test_outside(make, plan):
    check(make, plan)


def test_the_other_half_of_a_gan():
    def networks():
        torch.manual_seed(0)
        return nn.Linear(8, 16).double(), nn.Linear(16, 1).double()

    def loss_of(d, g, rows):
        with torch.no_grad():
            fake = g(rows["x"][:, :8])
        return F.softplus(d(fake)).mean() + F.softplus(-d(rows["x"])).mean()

    def losses_of(g_step, d_step):
        return [float(step(batch(i)).detach()) for i in range(3) for step in (d_step, g_step)]

    def stepping(model, loss_fn):
        made = SGD(model.parameters())

        def step(rows):
            made.zero_grad()
            loss = loss_fn(model, rows)
            loss.backward()
            made.step()
            return loss

        return step

    g, d = networks()
    one = losses_of(
        stepping(g, lambda m, b: F.softplus(-d(m(b["x"][:, :8]))).mean()), stepping(d, lambda m, b: loss_of(m, g, b))
    )
    g, d = networks()
    g_trainer = plait.Trainer(g, lambda m, b: F.softplus(-d(m(b["x"][:, :8]))).mean(), SGD, "")
    d_trainer = plait.Trainer(d, lambda m, b: loss_of(m, g, b), SGD, "")
    assert losses_of(g_trainer.step, d_trainer.step) == pytest.approx(one, rel=1e-9)
    assert all(p.grad is None for p in d.parameters())


# parameters that the step itself changes


class Momentum(nn.Module):
    """BYOL, MoCo: a second encoder that follows the first, updated in forward."""

    def __init__(self, how):
        super().__init__()
        self.q, self.k, self.how = net(), net().requires_grad_(False), how

    @torch.no_grad()
    def follow(self):
        for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
            if self.how == "data =":
                b.data = b.data * 0.5 + a.data * 0.5
            elif self.how == "data.mul_().add_()":
                b.data.mul_(0.5).add_(a.data, alpha=0.5)
            elif self.how == "mul_().add_()":
                b.mul_(0.5).add_(a, alpha=0.5)
            elif self.how == "lerp_":
                b.lerp_(a, 0.5)
            else:
                b.copy_(b * 0.5 + a * 0.5)

    def forward(self, x):
        self.follow()
        with torch.no_grad():
            target = self.k(x)
        return F.mse_loss(self.q(x), target + 1)


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        *((how, "data=1") for how in ("data =", "data.mul_().add_()", "mul_().add_()", "lerp_", "copy_")),
        *(("data =", plan) for plan in PLANS[1:]),
    ],
)
def test_momentum_encoders(how, plan):
    check(lambda: (Momentum(how), lambda m, b: m(b["x"]), nothing), plan)


class Queue(nn.Module):
    """MoCo: the logits against the queue keep a view of it for backward, and the step fills it anew."""

    def __init__(self):
        super().__init__()
        self.q = net()
        self.register_buffer("queue", torch.randn(16, 32, dtype=torch.float64))
        self.register_buffer("turns", torch.randn(16, 16, dtype=torch.complex128))

    def forward(self, x):
        q = F.normalize(self.q(x), dim=1)
        turned = torch.view_as_real(self.turns).sum(2)
        logits = torch.einsum("nc,ck->nk", [q @ turned, self.queue.clone().detach()])
        with torch.no_grad():
            self.queue = torch.cat([self.queue[:, len(q) :], q.T], 1)
            self.turns = self.turns * 0.5j
        return logits


@pytest.mark.parametrize("plan", ["pipeline=2", "pipeline=2 micro=2", "pipeline=2 micro=4 schedule=zb-h1"])
def test_a_view_of_a_buffer_that_the_step_writes(plan):
    torch.manual_seed(0)
    report = plait.verify(Queue(), lambda m, b: m(b["x"]).logsumexp(1).mean(), batch(), plan)
    assert report.ok, report


def test_momentum_encoders_are_verified_saved_and_loaded(tmp_path):
    model, loss_fn = Momentum("lerp_"), lambda m, b: m(b["x"])
    before = copy.deepcopy(model.state_dict())
    report = plait.verify(model, loss_fn, batch(), "data=2 zero=3", steps=3)
    assert report.ok and {d.name for d in report.buffers} == {n for n in before if n.startswith("k.")}
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    trainer = plait.Trainer(model, loss_fn, SGD, "")
    trainer.step(batch())
    trainer.save(tmp_path)
    after = trainer.step(batch())
    again = plait.Trainer(Momentum("lerp_"), loss_fn, SGD, "")
    again.prepare(batch())
    again.load(tmp_path)
    assert float(again.step(batch())) == float(after)
    moved = again.full_state_dict()
    assert not torch.equal(moved["k.0.weight"], before["k.0.weight"])


def test_a_parameter_that_trains_is_not_changed_by_the_step():
    def loss_fn(model, rows):
        with torch.no_grad():
            model[0].weight.mul_(0.9)
        return model(rows["x"]).mean()

    with pytest.raises(plait.CaptureError, match="changes the parameter 0.weight in place, and trains it"):
        plait.verify(net(), loss_fn, batch(), "data=2")


# freezing and unfreezing


def unfreezing(*flags):
    def make():
        model = net()
        model[0].requires_grad_(flags[0])

        def change(model, step):
            model[0].requires_grad_(flags[min(step + 1, len(flags) - 1)])

        return model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), change

    return make


@pytest.mark.parametrize("plan", [*PLANS, "data=2 zero=1", "data=2 zero=2"])
def test_unfreezing(plan):
    check(unfreezing(False, False, True), plan, steps=5)


@pytest.mark.parametrize("plan", ["data=2 zero=1", "pipeline=2 micro=2"])
def test_freezing(plan):
    check(unfreezing(True, False, False, True), plan, steps=5)


def test_unfreezing_keeps_the_schedule_and_loads(tmp_path):
    def trainer(frozen):
        model = net()
        model[0].requires_grad_(not frozen)
        decay = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        made = plait.Trainer(model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), SGD, "", scheduler=decay)
        made.prepare(batch())
        return model, made

    model, one = trainer(frozen=True)
    one.step(batch())
    model[0].requires_grad_(True)
    one.step(batch())
    assert one.optimizer.param_groups[0]["lr"] == 0.1 * 0.25 and len(one.optimizer.state) == 4
    one.save(tmp_path)
    _, other = trainer(frozen=False)
    other.load(tmp_path)
    assert float(other.step(batch())) == float(one.step(batch()))


# the user's objects are as they were


class Frozen(collections.OrderedDict):
    """As the configuration of a diffusers model."""

    def __init__(self, *args):
        super().__init__(*args)
        self.closed = True

    def __setitem__(self, key, value):
        if getattr(self, "closed", False):
            raise TypeError("frozen")
        super().__setitem__(key, value)

    def clear(self):
        raise TypeError("frozen")

    update = clear


class Closing(nn.Module):
    """A lambda that closes over submodules, a list of parameters, and a frozen configuration."""

    def __init__(self):
        super().__init__()
        self.inner, self.config = net(), Frozen({"width": 16})
        inner = self.inner
        self.call = lambda x: inner(x)
        self.listed = [inner[0].weight]

    def forward(self, x):
        return self.call(x) * self.listed[0].mean()


def test_closures_over_submodules_and_frozen_configurations():
    model = Closing()
    before = {name: p for name, p in model.named_parameters()}
    values = copy.deepcopy(model.inner.state_dict())
    for plan in ("data=2", "pipeline=2 micro=2", "data=2 sync=2"):
        assert plait.verify(model, lambda m, b: m(b["x"]).pow(2).mean(), batch(), plan, steps=3).ok
    assert all(p is before[name] and p.grad is None for name, p in model.named_parameters())
    assert all(torch.equal(v, values[n]) for n, v in model.inner.state_dict().items())
    assert dict(model.config) == {"width": 16} and model.listed[0] is model.inner[0].weight


def test_lazy_modules_are_refused_and_left_as_they_are():
    model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(4))
    for use in (
        lambda: plait.Trainer(model, lambda m, b: m(b["x"]).mean(), SGD, "").step(batch()),
        lambda: plait.verify(model, lambda m, b: m(b["x"]).mean(), batch(), "data=2"),
    ):
        with pytest.raises(plait.PlanError, match="0.weight has no shape yet.*run the model once"):
            use()
    assert isinstance(model[0].weight, nn.UninitializedParameter)


@pytest.mark.parametrize("where", ["buffer", "attribute", "batch"])
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "mkldnn", "quantized", "nested"])
@pytest.mark.filterwarnings("ignore")  # torch calls some of these formats a prototype
def test_tensors_that_are_not_dense_are_refused_by_name(kind, where):
    whole = torch.eye(16)
    odd = {
        "sparse_coo": whole.to_sparse, "sparse_csr": whole.to_sparse_csr, "mkldnn": whole.to_mkldnn,
        "quantized": lambda: torch.quantize_per_tensor(whole, 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([whole, whole[1:]]),
    }[kind]()  # fmt: skip
    model, given = nn.Linear(16, 4), {"x": torch.randn(8, 16)}
    if where == "buffer":
        model.register_buffer("odd", odd)
    elif where == "attribute":
        model.odd = odd
    else:
        given["odd"] = odd

    def loss_fn(m, b):
        return (m(b["x"]) + torch.add(b["odd"] if where == "batch" else m.odd, 1)).mean()

    with pytest.raises(plait.PlaitError, match=rf"odd.* is a {kind} tensor, and plait computes with dense ones"):
        plait.verify(model, loss_fn, given, "data=2 micro=2")
    if where == "attribute":  # which the step does not read
        assert plait.verify(model, lambda m, b: m(b["x"]).mean(), given, "data=2 micro=2").ok


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(make):
    model = nn.Sequential(make(30, 4, sparse=True, padding_idx=0))
    with pytest.raises(plait.PlanError, match="the gradient of 0.weight is sparse.*without sparse=True"):
        plait.verify(model, lambda m, b: m(b[:, None]).mean(), torch.arange(8), "data=2")


def test_what_a_distribution_computes_on_its_first_use_is_refused_and_undone_or_kept_from_before():
    prior = torch.distributions.Categorical(logits=torch.arange(16.0).double())

    def loss_fn(model, b):
        return (model(b["x"]).square() * prior.probs).mean()

    with pytest.raises(plait.CaptureError, match="leaves a tensor at loss_fn:prior.probs .* or read it once"):
        plait.verify(net(), loss_fn, batch(), "data=2")
    assert "probs" not in vars(prior)
    prior.probs  # noqa: B018
    assert plait.verify(net(), loss_fn, batch(), "data=2").ok


def test_a_scripted_module_is_named():
    model = nn.Sequential(torch.jit.script(nn.Linear(16, 4)))
    with pytest.raises(plait.CaptureError, match="the module 0 is compiled by TorchScript"):
        plait.verify(model, lambda m, b: m(b["x"].float()).mean(), batch(), "data=2")
    assert not any(isinstance(p, torch._subclasses.FakeTensor) for p in model.parameters())


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


def test_no_gradient_is_lost_without_a_word():
    model, other = net(), nn.Linear(16, 16).double()
    weight = model[2].bias
    with pytest.raises(plait.CaptureError, match=r"the tensor 2.bias reaches an autograd.Function"):
        plait.verify(model, lambda m, b: Product.apply(m(b["x"]), weight).mean(), batch(), "data=2")
    with pytest.warns(UserWarning, match=r"reads loss_fn:other.weight, which requires gradients"):
        plait.Trainer(model, lambda m, b: other(m(b["x"])).mean(), SGD, "").step(batch())


def changed_between_steps(how):
    """What a training loop does to the model between its steps."""
    model = net()
    model.register_buffer("scale", torch.ones((), dtype=torch.float64))
    handles = [model[1].register_forward_hook(lambda module, args, out: out * 2)] if how == "hook taken out" else []

    class Act(nn.Module):
        def forward(self, x):
            return x.tanh()

    model[1] = Act() if how == "method" else model[1]

    def change(model, step):
        if how == "buffer":
            model.scale = model.scale * 1.5
        elif how == "weights":
            with torch.no_grad():
                model[0].weight.clamp_(-0.05, 0.05)
        elif step != 1:
            return
        elif how == "gradient hook":
            model[0].weight.register_hook(lambda gradient: gradient * 2)
        elif how == "hook taken out":
            handles[0].remove()
        elif how == "hook":
            model[1].register_forward_hook(lambda module, args, out: out * 2)
        elif how == "method":
            Act.forward = lambda self, x: x.relu()

    return model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]) * m.scale, change


@pytest.mark.parametrize("how", ["buffer", "weights", "gradient hook", "hook taken out", "hook", "method"])
def test_what_the_loop_changes_on_the_model_between_steps(how):
    expected, _ = plain(lambda: changed_between_steps(how), "")
    model, loss_fn, change = changed_between_steps(how)
    trainer = plait.Trainer(model, loss_fn, SGD, "")
    for step, loss in enumerate(expected):
        assert float(trainer.step(batch())) == pytest.approx(loss, rel=1e-10)
        change(model, step)


def test_another_parameter_in_the_place_of_one_is_refused():
    model = net()
    trainer = plait.Trainer(model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), SGD, "")
    trainer.step(batch())
    with trainer.gathered():
        model[0].weight.detach().mul_(0.5)
    trainer.step(batch())
    model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)
    with pytest.raises(plait.PlanError, match="the parameter 0.weight was exchanged"):
        trainer.step(batch())
