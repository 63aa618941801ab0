"""expert=N: ranks of data that each have a part of the experts, to which rows travel and from which they come back."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import memory_ranks
import pytest
import torch
from checkpointing import ADAMW, assert_same_state, on, whole_state
from torch import Tensor, nn

import plait
from bench.experts import count_all_to_alls
from plait.api.job.gpt import loss_fn as text_loss
from plait.api.job.report_command import write_report
from plait.api.verify import verify
from plait.comm.protocol import World
from plait.comm.thread_world import run_ranks
from plait.compile.ir.node_info import phase_of
from plait.compile.ops import comm_ops
from plait.compile.ops.experts import (
    arrived_order,
    expert_mm,
    expert_order,
    expert_rows,
    expert_slots,
    pair_rows,
    rank_counts,
    return_rows,
)
from plait.engine.compiler import Captures, Compiler
from plait.engine.trace_folder import Recorded, read_trace
from plait.errors import PlanError
from plait.plan.plan import Plan
from plait.spec.trace import ExpertLoad

pytestmark = pytest.mark.xdist_group("expert_parallel")  # plans share what is captured

WIDTH, INNER, EXPERTS, TOP, ROWS = 8, 12, 4, 2, 16


class Experts(nn.Module):
    """Gated MLPs with biases, one for each expert."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num, WIDTH, 2 * INNER) * 0.3)
        self.up_bias = nn.Parameter(torch.randn(num, 2 * INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(num, INNER, WIDTH) * 0.3)
        self.down_bias = nn.Parameter(torch.randn(num, WIDTH) * 0.3)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        expert = ids.reshape(-1)
        rows = x.unsqueeze(1).expand(*ids.shape, WIDTH).reshape(-1, WIDTH)
        gate, value = (expert_mm(rows, self.up, expert) + expert_rows(self.up_bias, expert)).chunk(2, -1)
        y = expert_mm(nn.functional.silu(gate) * value, self.down, expert) + expert_rows(self.down_bias, expert)
        return (y * weights.reshape(-1, 1)).view(*ids.shape, WIDTH).sum(1)


class Block(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, num, bias=False)
        self.experts = Experts(num)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights, ids = self.gate(h).softmax(-1).topk(TOP, -1)
        return x + self.experts(h, ids, weights / weights.sum(-1, keepdim=True))  # type: ignore[no-any-return]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * value)  # type: ignore[no-any-return]


class ListOfExperts(nn.ModuleList):
    """Experts that are modules of their own, in a loop over all."""

    def __init__(self, num: int) -> None:
        super().__init__(Expert() for _ in range(num))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self):
            token, place = torch.where(ids == number)
            if token.numel() == 0:
                continue
            out[token] += weights[token, place, None] * expert(x[token])
        return out


class Net(nn.Module):
    def __init__(self, num: int = EXPERTS, experts: type[nn.Module] = Experts) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList([Block(num), Block(num)])
        for layer in self.layers if experts is not Experts else ():
            layer.experts = experts(num)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    some = torch.Generator().manual_seed(3)
    return {name: torch.randn(rows, n, generator=some).double() for name, n in (("x", 6), ("y", 3))}


@functools.cache
def verifier() -> plait.Verifier:
    torch.manual_seed(0)
    return plait.Verifier(Net().double(), loss_fn, batch(), clip_norm=0.5)


@functools.cache
def of_modules() -> plait.Verifier:
    torch.manual_seed(0)
    return plait.Verifier(Net(experts=ListOfExperts).double(), loss_fn, batch(), clip_norm=0.5)


def collectives(plan: str, of: plait.Verifier | None = None, given: Any = None) -> dict[tuple[str, str], list[Any]]:
    """The collectives of one step along the axis expert, by phase and op."""
    compiled = Compiler((of or verifier()).captures, Plan.parse(plan)).compiled(given or batch())
    (graph,) = [each.graph for each in compiled.program.graphs.values()]
    found: dict[tuple[str, str], list[Any]] = {}
    for node in graph.nodes:
        if isinstance(node.target, comm_ops.CommOp) and "expert" in node.args:
            found.setdefault((phase_of(node), node.target.__name__), []).append(node)
    return found


@pytest.mark.parametrize(
    "plan",
    [
        "expert=2",
        "expert=4",
        "data=4 expert=2",
        "data=2 tensor=2",
        "expert=2 tensor=2 zero=1",
        "data=4 expert=2 zero=1 micro=2",
        "data=4 expert=2 zero=2 precision=bf16",
        "data=4 expert=2 zero=3 recompute=layer",
        "expert=2 pipeline=2 micro=2 schedule=zb-h1",
        "replica=2 expert=2 sync=2",
        "expert=2 expert.capacity=4 micro=2",
        "expert=2 precision=bf16-params",
        "expert=2 home.optimizer=disk",
        "expert=2 home.activations=host",
    ],
)
def test_the_numbers_are_those_of_one_device(plan: str) -> None:
    report = verifier().verify(plan)
    assert report.ok, report


@pytest.mark.parametrize(
    "plan",
    [
        "expert=4 zero=1",
        "data=4 expert=2 zero=2 micro=2",
        "data=4 expert=2 zero=3 micro=2 recompute=layer precision=bf16",
        "data=4 expert=2 pipeline=2 micro=2 schedule=zb-h1 zero=1",
        "replica=2 expert=2 sync=2",
        "expert=2 expert.capacity=2 precision=bf16-params",
        "expert=2 home.parameters=disk",
    ],
)
def test_experts_that_are_modules_have_the_numbers_of_one_device(plan: str) -> None:
    report = of_modules().verify(plan)
    assert report.ok, report


def test_an_expert_that_all_rows_have_besides() -> None:
    class Shared(ListOfExperts):
        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return super().forward(x, ids, weights) + self[1](x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    report = plait.verify(Net(experts=Shared).double(), loss_fn, batch(), "expert=2")
    assert report.ok, report


def test_a_rank_has_the_modules_of_its_experts() -> None:
    plan = Plan.parse("data=4 expert=2 zero=1")
    sharding = Compiler(of_modules().captures, plan).compiled(batch()).program.sharding
    for name, held in sharding.parameters.items():
        number = re.search(r"experts\.(\d)", name)
        if number is not None:
            owner = int(number[1]) // 2
            shape = ", ".join(map(str, held.compute.shape[1:]))
            cut = f"f64[{held.compute.shape[0]}@data{shape and ', '}{shape}] only:expert={owner}"
            assert str(held.compute).endswith(f" only:expert={owner}") and str(held.state) == cut
            assert held.reduce_axes == ("data",)
    assert {kind for _, kind in collectives("expert=2", of_modules())} == {"exchange", "exchange_rows", "all_reduce"}


def test_rows_travel_there_and_back_once_in_each_pass() -> None:
    found = collectives("expert=2")
    rows = ROWS // 2 * TOP  # of a rank
    for phase in ("forward", "backward"):
        sent = found[phase, "exchange_rows"]
        assert len(sent) == 2 * len(Net().layers)
        assert all(tuple(node.meta["val"].shape) == (rows, WIDTH) for node in sent)  # if experts get the same number
    counts = found["forward", "exchange"]
    assert [tuple(node.meta["val"].shape) for node in counts] == [(EXPERTS,)] * len(Net().layers)
    assert {kind for _, kind in found} == {"exchange", "exchange_rows", "all_reduce"}  # the last of other gradients


def test_rows_stay_where_they_are_while_parts_of_sequences_are_gathered() -> None:
    """Ranks of weights gather sequences that they split, of rows that ranks of experts split: that a rank of the latter
    has whole blocks of the former's is known, or attention would be cut in other ways, for twice the bytes."""
    of = plait.Verifier(memory_ranks.mixture().double(), text_loss, text := memory_ranks.batch())
    found = collectives("expert=2 tensor=2 sequence=yes", of, text)
    sent = {kind for phase, kind in found if phase == "forward"}
    assert sent == {"exchange", "exchange_rows", "all_reduce"}
    assert {node.meta["val"].numel() for node in found["forward", "all_reduce"]} == {1}  # those of the loss
    assert of.verify("expert=2 tensor=2 sequence=yes zero=1").ok


@pytest.mark.parametrize("plan", ["expert=2 expert.capacity=2", "expert=2 home.activations=host"])
def test_rows_travel_in_equal_parts_where_their_number_must_be_known(plan: str) -> None:
    found = collectives(plan)
    rows = ROWS // 2 * TOP
    for phase in ("forward", "backward"):
        sent = [node for node in found[phase, "exchange"] if node.meta["val"].ndim == 2]
        assert len(sent) == 2 * len(Net().layers)
        assert all(tuple(node.meta["val"].shape) == (2 * rows, WIDTH) for node in sent)


@pytest.mark.parametrize("plan", ["expert=2", "expert=4", "data=4 expert=2", "expert=2 tensor=2"])
def test_all_to_alls_send_the_rows_that_routers_send_elsewhere(plan: str) -> None:
    """Four times each row whose expert is on another rank, and the numbers of rows, as links between ranks count."""
    chosen = Plan.parse(plan)
    compiler = Compiler(Captures(verifier().captures.model, loss_fn), chosen)

    def rank(world: World) -> int:
        trainer = plait.Trainer(compiler.model, loss_fn, ADAMW, chosen, world=world, compiler=compiler)
        sent = count_all_to_alls(world.comm("expert"))
        trainer.step(batch())
        return sent()

    size, mesh = chosen.mesh.axis_size("expert"), chosen.mesh
    groups, tensor = mesh.axis_size("data"), mesh.axis_size("tensor")
    expected = 0
    for ids in choices():
        for part, rows in enumerate(ids.chunk(groups * size)):
            away = int((rows // (EXPERTS // size) != part % size).sum())
            expected += tensor * (4 * away * WIDTH * 8 + EXPERTS * 8 * (size - 1) // size)
    assert sum(run_ranks(mesh, rank)) == expected


def test_ranks_to_which_no_row_goes() -> None:
    torch.manual_seed(0)
    model = Net().double()
    for layer in model.layers:
        nn.init.zeros_(layer.gate.weight)  # all tokens choose the same two experts
    assert verify(model, loss_fn, batch(), "expert=4").ok
    assert verify(model, loss_fn, batch(), "data=4 expert=2 micro=2 pipeline=2").ok


def test_a_capacity_makes_what_is_sent_as_small() -> None:
    rows = ROWS // 2 * TOP
    sent = [node for node in collectives("expert=2 expert.capacity=1.25")["forward", "exchange"]]
    assert {node.meta["val"].shape[0] for node in sent} == {2 * pair_rows(rows, 2, 1.25)} == {20}
    assert [pair_rows(96, 4, c) for c in (0.0, 1.0, 1.1, 8.0)] == [96, 24, 27, 96]


def test_rows_beyond_the_capacity_are_dropped_and_verify_sees_it() -> None:
    report = verifier().verify("expert=2 expert.capacity=0.5")
    assert not report.ok
    rows = 2 * len(Net().layers) * ROWS * TOP  # of two steps
    assert 0 < report.dropped < report.rows == rows
    said = f"{report.dropped} of {rows} rows that had an expert, by expert.capacity=0.5; give a larger one"
    assert said in str(report)
    whole = verifier().verify("data=4 expert=2 tensor=2 expert.capacity=2")
    assert whole.ok and (whole.rows, whole.dropped) == (rows, 0) and "dropped" not in str(whole)


def choices() -> list[Tensor]:
    """The experts that each row of the batch has in each layer, before any update."""
    torch.manual_seed(0)
    model, found = Net().double(), []
    for layer in model.layers:
        layer.gate.register_forward_hook(lambda _, given, out: found.append(out.softmax(-1).topk(TOP, -1)[1]))
    model(batch()["x"])
    return found


def traced(plan: str, folder: Path) -> list[Recorded]:
    """The trace of two steps, with ranks as threads."""
    torch.manual_seed(0)
    chosen, model = Plan.parse(plan), Net().double()
    compiler = Compiler(Captures(model, loss_fn), chosen)

    def rank(world: World) -> None:
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        trainer = plait.Trainer(model, loss_fn, sgd, chosen, trace=folder, world=world, compiler=compiler)
        for _ in range(2):
            trainer.step(batch())
        trainer.evaluate(batch())
        trainer.close()

    run_ranks(chosen.mesh, rank)
    return read_trace(folder, chosen.mesh)


@pytest.mark.parametrize(
    "plan",
    [
        "expert=2 recompute=layer",
        "data=2 tensor=2 micro=2",
        "data=4 expert=2 pipeline=2 micro=2 schedule=zb-h1",
        "expert=4 expert.capacity=4",
    ],
)
def test_a_trace_has_the_rows_of_each_expert(plan: str, tmp_path: Path) -> None:
    (first, second) = traced(plan, tmp_path)
    expected = [torch.bincount(ids.flatten(), minlength=EXPERTS).tolist() for ids in choices()]
    assert first.experts == {f"layers.{i}.experts": ExpertLoad(tuple(rows)) for i, rows in enumerate(expected)}
    assert [sum(load.rows) for load in second.experts.values()] == [ROWS * TOP] * 2


def test_a_trace_has_the_rows_that_are_dropped(tmp_path: Path) -> None:
    load = traced("expert=2 expert.capacity=0.5", tmp_path)[0].experts["layers.0.experts"]
    room = pair_rows(ROWS // 2 * TOP, 2, 0.5)
    of_ranks = [(ids // (EXPERTS // 2)).flatten() for ids in choices()[0].chunk(2)]
    sent = [int((targets == part).sum()) for targets in of_ranks for part in range(2)]
    assert load.dropped == sum(max(num - room, 0) for num in sent) > 0
    message = write_report(tmp_path, tmp_path / "page.html")
    assert message.startswith("wrote")
    page = (tmp_path / "page.html").read_text()
    assert f"of {2 * ROWS * TOP} rows dropped (" in page and "layers.1.experts: the fullest of 4 gets" in page
    assert "rows of each expert, relative to the mean of its mixture" in page


def test_slots_by_hand() -> None:
    slots, rows, local = expert_slots(torch.tensor([0, 3, 1, 2, 2, 4]), 2, 2, 2)  # experts 0, 1 and 2, 3; 4 is none
    assert slots.tolist() == [0, 2, 1, 3, 4, 4]  # no room for the last row of expert 2
    assert rows.tolist() == [0, 2, 1, 3] and local.tolist() == [0, 1, 1, 0]
    order, places, ends = expert_order(torch.tensor([1, 0, 2, 1]), 2)
    assert (order.tolist(), places.tolist(), ends.tolist()) == ([1, 0, 3, 2], [1, 0, 3, 2], [1, 3])


@pytest.mark.parametrize(("of", "other"), [(verifier, "tensor=2"), (of_modules, "pipeline=2 micro=2")])
def test_a_checkpoint_goes_from_each_plan_to_the_next(tmp_path: Path, of: Any, other: str) -> None:
    expected: list[Any] = []
    for index, plan in enumerate(["", "data=4 expert=2 zero=3", f"expert=2 {other}", "expert=4 zero=1", "data=2"]):
        compiler = Compiler(of().captures, Plan.parse(plan))

        def run(world: Any, index: int = index, compiler: Compiler = compiler) -> None:
            trainer = plait.Trainer(
                compiler.model, loss_fn, ADAMW, compiler.plan, world=world, compiler=compiler, seed=index
            )
            trainer.prepare(batch())
            if index:
                trainer.load(tmp_path / str(index - 1))
                assert_same_state(whole_state(trainer), expected[0])
            else:
                trainer.step(batch())
                expected.append(whole_state(trainer))
            trainer.save(tmp_path / str(index))

        on(plan, run)


class WithCapacity(nn.Module):
    """Switch Transformer's form: each expert takes the first tokens that chose it, by products with one-hot masks."""

    def __init__(self, capacity: int = 6) -> None:
        super().__init__()
        self.capacity = capacity
        self.gate = nn.Linear(6, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 6, INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, 3) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.gate(x).softmax(-1).max(-1)
        chosen = nn.functional.one_hot(ids, EXPERTS)
        place = (chosen.cumsum(0) - 1) * chosen
        kept = (place < self.capacity) & (chosen > 0)
        sent = nn.functional.one_hot(place.clamp(max=self.capacity - 1), self.capacity) * kept.unsqueeze(-1)
        rows = torch.einsum("tec,tw->ecw", sent.to(x.dtype), x)
        found = torch.bmm(torch.bmm(rows, self.up).relu(), self.down)
        return torch.einsum("tec,ecw->tw", sent * top[:, None, None], found)


class Balanced(nn.Module):
    """A router that a bias balances, which follows the counts of the whole batch (DeepSeek-V3)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 6, 3) * 0.3)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        ids = (scores + self.bias).topk(TOP, -1)[1]
        with torch.no_grad():
            counts = nn.functional.one_hot(ids, EXPERTS).sum((0, 1)).to(self.bias.dtype)
            self.bias += 0.1 * torch.sign(counts.mean() - counts)
        y = torch.bmm(x.repeat_interleave(TOP, 0).unsqueeze(1), self.up[ids.flatten()]).squeeze(1)
        return (y * scores.gather(1, ids).reshape(-1, 1)).view(-1, TOP, 3).sum(1)


class Dense(nn.Module):
    """Every expert computes every token, by products in which experts are no dim of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 6, 3) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("te,tew->tw", self.gate(x).softmax(-1), torch.einsum("th,ehw->tew", x, self.up))


@pytest.mark.parametrize("make", [WithCapacity, Balanced])
def test_other_mixtures(make: type[nn.Module]) -> None:
    torch.manual_seed(1)
    each = plait.Verifier(make().double(), loss_fn, batch(), steps=3)
    for plan in ("expert=2", "data=4 expert=2 zero=1", "expert=4 micro=2" if make is Balanced else "expert=2 tensor=2"):
        report = each.verify(plan)
        assert report.ok, (plan, report)


def test_experts_that_are_not_found_are_named() -> None:
    each = plait.Verifier(Dense().double(), loss_fn, batch())
    with pytest.raises(PlanError, match=re.escape("layouts=, such as {'*.experts.*': 'expert, -, -'}")):
        each.verify("expert=2")
    assert each.verify("expert=2", layouts={"up": "expert, -, -"}).ok


def test_rows_that_are_counted_by_hand() -> None:
    # Two ranks with experts 0 and 1; rank 0 sends one row for its expert 0 and two for 1, rank 1 one for expert 1.
    sent, received = torch.tensor([1, 2, 0, 0]), torch.tensor([1, 2, 0, 1])
    counts = rank_counts(sent, received, 2)
    assert counts.tolist() == [[3, 0], [3, 1]]
    order, places, ends = arrived_order(received, counts, 99)
    assert (order.tolist(), places.tolist(), ends.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3], [1, 4])
    nothing = rank_counts(torch.zeros(4), torch.zeros(4), 2)
    assert [each.numel() for each in arrived_order(torch.zeros(4).long(), nothing, 99)] == [0, 0, 2]
    rows = torch.tensor([[5.0], [7.0]])
    assert return_rows(rows, torch.tensor([1, 2, 0])).tolist() == [[7.0], [0.0], [5.0]]
    assert return_rows(rows[:0], torch.tensor([0, 1])).tolist() == [[0.0], [0.0]]


def test_experts_that_the_axis_does_not_divide() -> None:
    model = Net(3).double()
    with pytest.raises(PlanError, match=re.escape("expert=2 does not divide the 3 experts of layers.0.experts.up")):
        verify(model, loss_fn, batch(), "expert=2")
    of_six = Net(6, ListOfExperts).double()
    with pytest.raises(PlanError, match=r"expert=4 does not divide the 6 experts of layers.0.experts.*; use expert=2$"):
        verify(of_six, loss_fn, batch(), "data=4 expert=4")  # 3 would divide them, and not the ranks of data
    assert verify(of_six, loss_fn, batch(), "data=4 expert=2").ok


def test_a_model_without_experts() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    with pytest.raises(PlanError, match=r"expert=2 finds no experts in the model.*name weights of all experts in one"):
        verify(model, loss_fn, batch(), "expert=2")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("expert=2 sync=4", "add replica=N"),
        ("expert=2 central=host", "use zero=2"),
        ("expert=2 backend=xla", "backend=xla does not go with expert=2"),
        ("data=2 expert.capacity=2", "give expert=N with it"),
        ("expert=2 stages=[tensor=2|data=2]", "use pipeline=N with expert="),
        ("expert=2 expert.capacity=0", "0.01 or more"),
    ],
)
def test_keys_that_do_not_go_with_experts(plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.parse(plan)
