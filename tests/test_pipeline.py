"""Pipelines: any model, any schedule, with every other axis; what crosses, what is held, and what is refused."""

from __future__ import annotations

import functools
import re
import signal
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import process_ranks as ranks
import pytest
import torch
from comm_worlds import run, start_scripts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verify import BatchNorm, image_batch, image_loss
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import ZOO

import plait
from plait.api.job.gpt import BytesGPT
from plait.api.trainer import Trainer
from plait.backends.eager.pipeline_program import CellRunner
from plait.comm.protocol import World
from plait.comm.thread_world import run_ranks
from plait.compile.rank_program import RankProgram
from plait.engine.compiler import Captures, Compiler
from plait.engine.local_batch import microbatches
from plait.engine.rank_executor import RankExecutor
from plait.errors import BatchError, PlanError, RankFailed, ScheduleError
from plait.plan.key_values import SCHEDULE_NAMES
from plait.plan.plan import Plan
from plait.schedule.families import make_schedule

pytestmark = pytest.mark.xdist_group("pipeline")  # plans share what is captured

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
SYNCHRONOUS = [name for name in SCHEDULE_NAMES if not make_schedule(name, 2, 2).asynchronous]


@functools.cache
def verifier(family: str) -> plait.Verifier:
    model, loss, batch = ZOO[family].make()
    return plait.Verifier(model, loss, batch)


def check(plan: str, verifier: plait.Verifier) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="plait has no rule")
        report = verifier.verify(plan)
    assert report.ok, report


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_long_skips_and_batch_norm_under_every_schedule(schedule: str) -> None:
    check(f"pipeline=3 micro={1 if schedule == 'naive' else 4} schedule={schedule}", verifier("unet"))


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("gpt2", "pipeline=4 micro=6 schedule=zb-v"),
        ("gpt2", "pipeline=2 micro=3 data=2 zero=3 schedule=zb-h1"),
        ("t5", "pipeline=3 micro=3 schedule=interleaved"),
        ("mixtral", "pipeline=2 micro=3 data=2 tensor=2 zero=2"),
        ("whisper", "pipeline=2 micro=2 tensor=2 recompute=layer"),
        ("inception", "pipeline=2 micro=3 tensor=2 schedule=zb-h1"),
        ("resnet", "pipeline=2 micro=3 data=2 zero=1 batchnorm=local"),
        ("llama", "pipeline=2 micro=3 data=2 zero=2 precision=bf16 recompute=layer schedule=dualpipe-v"),
        ("lstm", "pipeline=4 micro=3 schedule=zb-h2"),
        ("llama", "pipeline=2 micro=4 precision=fp16 schedule=gpipe"),
    ],
)
def test_families_with_other_axes(family: str, plan: str) -> None:
    check(plan, verifier(family))


def text_batch(rows: int = 12, sequence: int = 8) -> dict[str, Tensor]:
    symbols = torch.randint(0, 256, (rows, sequence + 1), generator=torch.Generator().manual_seed(7))
    return {"x": symbols[:, :-1].contiguous(), "y": symbols[:, 1:].contiguous()}


class Tied(BytesGPT):
    """With dropout, and weights that the first and the last stage have in common."""

    def __init__(self) -> None:
        super().__init__(layers=2, width=64, heads=4, sequence=8, dropout=0.1)
        self.head.weight = self.symbols.weight


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over bytes below 100 and their number."""
    keep = batch["y"] < 100
    losses = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none")
    return plait.Weighted((losses * keep.flatten()).sum(), keep.sum())


@functools.cache
def tied() -> plait.Verifier:
    torch.manual_seed(0)
    return plait.Verifier(Tied(), masked_loss, text_batch(), clip_norm=0.05, optimizer=SGD)


@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 micro=3 data=2 central=host",
        "pipeline=2 micro=3 home.parameters=host home.optimizer=disk",
        "pipeline=2 micro=3 data=2 zero=3 home.parameters=disk",
        "pipeline=2 micro=3 data=2 zero=1 precision=bf16",
        "pipeline=2 micro=3 recompute=budget=400KiB",
    ],
)
def test_tied_weights_clipping_and_masked_tokens(plan: str) -> None:
    check(plan, tied())


MIXED = ("stages=[tensor=2|data=2]", "stages=[data=2|tensor=2]")


@st.composite
def plans(draw: st.DrawFn) -> str:
    pipeline, tensor = draw(st.sampled_from([2, 2, 3, 4])), draw(st.sampled_from([1, 1, 2]))
    data, replica = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]))
    micro = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if 12 % (n * data * replica) == 0]))
    schedule = draw(st.sampled_from([name for name in SYNCHRONOUS if micro == 1 or name != "naive"]))
    words = [f"pipeline={pipeline} tensor={tensor} data={data} replica={replica} micro={micro} schedule={schedule}"]
    if pipeline == 2 and tensor == 2 and 12 % (2 * micro * data * replica) == 0:
        words = [words[0].replace("pipeline=2 tensor=2", draw(st.sampled_from(["pipeline=2 tensor=2", *MIXED])))]
    if schedule in ("interleaved", "looped-bfs"):
        words.append(f"chunks={draw(st.integers(1, 3))}")
    words.append(draw(st.sampled_from(["", "zero=1", "zero=2", "zero=3", "central=host"])))
    words.append(draw(st.sampled_from(["", "recompute=layer", "recompute=*.up"])))
    words.append(
        draw(st.sampled_from(["", "bucket=1KiB", "allreduce=ring", "precision=bf16", "home.activations=disk"]))
    )
    return " ".join(words)


@settings(max_examples=8)
@given(plans())
def test_plans_at_random(plan: str) -> None:
    check(plan, tied())


def compiled(model: nn.Module, loss: Any, batch: Any, plan: str) -> RankProgram:
    found = Plan.parse(plan)
    return Compiler(Captures(model, loss), found).compiled(microbatches(batch, found.micro)[0]).program


def on(plan: str, fn: Any) -> list[Any]:
    return run_ranks(Plan.parse(plan).mesh, fn)


def trained(captures: Captures, plan: str, steps: Any) -> list[Any]:
    """What `steps(trainer)` gives on each rank."""
    compiler = Compiler(captures, Plan.parse(plan))

    def rank(world: World) -> Any:
        options: dict[str, Any] = {"world": world, "compiler": compiler}
        return steps(Trainer(compiler.model, compiler.loss_fn, SGD, compiler.plan, **options))

    return on(plan, rank)


def test_evaluation_and_batches_of_other_shapes() -> None:
    torch.manual_seed(0)
    captures = Captures(Tied(), masked_loss)

    def losses(trainer: Trainer) -> list[float]:
        found = [float(trainer.step(text_batch())), trainer.evaluate(text_batch())]
        return [*found, float(trainer.step(text_batch(6, 5))), trainer.evaluate(text_batch(5, 5))]

    (expected,) = trained(captures, "micro=3", losses)
    for plan in ("micro=3 pipeline=2 schedule=dualpipe-v", "micro=3 pipeline=4"):
        for found in trained(captures, plan, losses):
            assert found == pytest.approx(expected, rel=1e-5)


def test_evaluation_keeps_the_ranks_busy_where_rows_allow() -> None:
    compiler = Compiler(Captures(Tied(), masked_loss), Plan.parse("pipeline=2 micro=3 schedule=zb-h1"))
    for rows, num_micro in ((12, 3), (5, 1)):
        trained_on = [
            (program.pipeline.schedule.name, program.pipeline.schedule.num_micro)
            for each in on(str(compiler.plan), lambda world, rows=rows: evaluated(compiler, world, rows))
            for program in each
            if program.pipeline is not None
        ]
        assert trained_on == [("forward-only", num_micro)] * 2


def evaluated(compiler: Compiler, world: World, rows: int) -> list[RankProgram]:
    """The programs by which a rank evaluates."""
    trainer = Trainer(compiler.model, compiler.loss_fn, SGD, compiler.plan, world=world, compiler=compiler)
    trainer.evaluate(text_batch(rows))
    assert isinstance(trainer.executor, RankExecutor)
    return [program.program for (_, train, _), program in trainer.executor._executables.items() if not train]


def test_every_rank_has_the_same_buffers_and_those_of_one_device() -> None:
    torch.manual_seed(0)
    captures = Captures(BatchNorm(), image_loss)

    def state(trainer: Trainer) -> tuple[float, dict[str, Tensor]]:
        trainer.step(image_batch())
        return trainer.evaluate(image_batch()), {name: b.clone() for name, b in trainer.executor.buffers.items()}

    ((loss, expected),) = trained(captures, "micro=4", state)
    for found, buffers in trained(captures, "pipeline=3 micro=4 schedule=zb-v", state):
        assert found == pytest.approx(loss, rel=1e-4)
        for name, value in expected.items():
            torch.testing.assert_close(buffers[name], value, rtol=1e-4, atol=1e-6)


class Skips(nn.Module):
    """Four layers; the last reads what the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        y = self.third(self.second(x).tanh()).tanh()
        return self.fourth(y) * x


def rows(num: int) -> Tensor:
    return torch.randn(num, 8, generator=torch.Generator().manual_seed(3))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


SKIPS = "pipeline=4 micro=2 cut=second,third,fourth"


def test_a_long_skip_goes_straight_to_the_stage_that_reads_it() -> None:
    pipeline = compiled(Skips(), squares, rows(4), SKIPS).pipeline
    assert pipeline is not None
    ends = {(v.source, v.stages()) for v in pipeline.cells.values if v.stages()}
    assert {stages for (kind, stage), stages in ends if (kind, stage) == ("F", 0)} == {(1, 3)}
    assert {stages for (kind, stage), stages in ends if (kind, stage) == ("B", 3)} == {(2,), (0,)}
    actions = [str(action) for action in pipeline.schedule.ranks[0] if action.kind == "SEND"]
    assert actions == ["SEND:F0>1", "SEND:F0>3", "SEND:F1>1", "SEND:F1>3"]

    def count(world: World) -> dict[int, int]:
        trainer = Trainer(compiler.model, squares, SGD, SKIPS, world=world, compiler=compiler)
        trainer.prepare(rows(4))
        links = world.comm("pipeline").links
        links.reset()
        trainer.step(rows(4))
        return dict(links.sent)

    compiler = Compiler(Captures(Skips(), squares), Plan.parse(SKIPS))
    value = 2 * 8 * 4  # two rows of a microbatch
    sent = on(SKIPS, count)
    for source, target in ((0, 1), (0, 3), (1, 2), (2, 3), (3, 0)):  # besides the values the losses, to all
        assert 2 * value <= sent[source][target] < 3 * value
    assert sent[0].get(2, 0) < value and sent[2].get(0, 0) < value


def test_1f1b_holds_no_more_microbatches_than_ranks_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[int, int] = defaultdict(int)
    saved: dict[Any, Any] = {}
    original = CellRunner.run_cell

    def watched(self: CellRunner, cell: Any, micro: int, box: Any) -> Any:
        saved[cell[1], micro] = box
        now = {m for (stage, m), each in saved.items() if stage == cell[1] and (each or m == micro)}
        held[cell[1]] = max(held[cell[1]], len(now))
        return original(self, cell, micro, box)

    monkeypatch.setattr(CellRunner, "run_cell", watched)
    compiler = Compiler(Captures(Skips(), squares), Plan.parse("pipeline=4 micro=8"))

    def step(world: World) -> None:
        Trainer(compiler.model, squares, SGD, compiler.plan, world=world, compiler=compiler).step(rows(8))

    on("pipeline=4", step)
    assert dict(held) == {0: 4, 1: 3, 2: 2, 3: 1}


def test_a_stage_without_parameters_trains_and_is_saved(tmp_path: Path) -> None:
    """The last stage has none; of the one before it one is frozen."""

    class Bare(Skips):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh()).cos()

    model = Bare()
    model.second.weight.requires_grad_(False)
    model.third, model.fourth = nn.Identity(), nn.Identity()
    plan = Plan.parse("pipeline=3 micro=2 schedule=zb-h1")
    optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
    compiler = Compiler(Captures(model, squares), plan)

    def step(world: World) -> list[str]:
        trainer = Trainer(model, squares, optimizer, plan, world=world, compiler=compiler)
        trainer.step(rows(4))
        state = trainer.state_dict()
        trainer.save(tmp_path)
        trainer.load(tmp_path)
        assert bool(trainer.executor.parameters) == (world.rank < 2)
        return sorted(state["optimizer"]["state"])

    assert plait.verify(model, squares, rows(4), plan, optimizer=optimizer, clip_norm=0.1).ok
    assert on("pipeline=3", step) == [["first.bias", "first.weight", "second.bias"]] * 3


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("pipeline=16 micro=2", r"the step has \d+ calls that a stage can begin with, and 16 stages"),
        ("pipeline=2 micro=2 cut=thrid", "cut=thrid: the model calls no module of this name; did you mean third"),
        ("pipeline=2 micro=2 cut=first", "cut=first leaves a stage empty"),
        ("pipeline=3 micro=2 cut=second", "names 1 module, but 3 stages begin with 2 besides the first"),
        ("pipeline=3 micro=2 cut=third,second", "names modules in another order than they run"),
        ("pipeline=2 micro=2 chunks=3", "chunks=3: the schedule 1f1b has 1 on each rank"),
        ("pipeline=2 micro=2 schedule=/nowhere/mine.txt", "cannot read the file: No such file"),
    ],
)
def test_what_a_pipeline_cannot_be(plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        compiled(Skips(), squares, rows(4), plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("cut=third", "cut=third configures a pipeline, and the plan has none; give pipeline=N"),
        ("data=2 chunks=2", "chunks=2 configures a pipeline"),
        ("micro=2 schedule=gpipe", "schedule=gpipe configures a pipeline"),
    ],
)
def test_plans_that_say_what_they_do_not_have(plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.parse(plan)


def test_a_batch_that_microbatches_do_not_divide() -> None:
    with pytest.raises(BatchError, match="micro=4 does not divide the batch of 2 rows; give a multiple of 4"):
        plait.verify(Skips(), squares, rows(2), "pipeline=2 micro=4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: F0 F1 B0 B1\n1: F0 B0 F1", "B1"),
        ("0: F0 B0 F1 B1\n1: F1 B1 F0 B0", "F1"),
    ],
)
def test_a_users_schedule_that_cannot_run_shows_where(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(f"name=mine micro=2\n{text}\n")
    with pytest.raises(ScheduleError) as caught:
        compiled(Skips(), squares, rows(4), f"pipeline=2 micro=2 schedule={path}")
    assert message in str(caught.value) and "rank 1" in str(caught.value), caught.value


def test_a_users_schedule_runs(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("name=mine micro=3\n0: F0 F1 B0 F2 B1 B2\n1: F0 B0 F1 B1 F2 B2\n")
    check(f"pipeline=2 micro=3 schedule={path}", tied())


def test_a_model_without_a_graph_is_refused() -> None:
    def step(world: World) -> None:
        Trainer(ranks.Stops(), ranks.stops_loss, SGD, "pipeline=2 micro=2", world=world).step(ranks.stops_batch())

    with pytest.raises(RankFailed, match=r"needs the graph of the step for pipeline=2(.|\n)*process_ranks.py:"):
        on("pipeline=2", step)


def test_explain_shows_the_stages() -> None:
    found = plait.explain(Tied(), masked_loss, text_batch(), "pipeline=2 micro=3 data=2 zero=1 cut=blocks.1")
    page = str(found)
    for line in (
        r"0   pipeline=0 +[\d.]+%  +\d+ parameters .* symbols .. blocks.0",
        r"1   pipeline=1 +[\d.]+%  +\d+ parameters .* blocks.1.* .. the loss",
        r"forward   0 -> 1     4.0 KiB  1 value",
        r"backward  1 -> 0     4.0 KiB  1 value",
        r"schedule 1f1b, micro=3",
        r"0: F0 F1 B0 F2 B1 B2",
        r"update   all_gather     data .* stage 1",
    ):
        assert re.search(line, page), (line, page)
    one = found.tensor("symbols.weight")
    assert "only:pipeline=0,1" in one or "stage     0, 1" in one
    assert "added up over the ranks of the pipeline" in one
    assert "stage     0\n" in found.tensor("blocks.0.up.weight")


# Processes.


def test_processes_train_as_one_device(tmp_path: Path) -> None:
    """Two stages of two data ranks each; saved, and loaded by one process."""
    plan = "pipeline=2 data=2 zero=3 micro=2 schedule=zb-h1"
    saved = run("shm", Plan.parse(plan).mesh, functools.partial(ranks.save_state, plan=plan, path=tmp_path / "first"))
    load = functools.partial(ranks.load_state, plan="", path=tmp_path / "first", again=tmp_path / "second")
    (loaded,) = run("threads", Plan().mesh, load)
    for found in saved:
        assert found.keys() == loaded.keys()
        assert all(np.array_equal(found[name], loaded[name]) for name in loaded)


def test_a_killed_stage_stops_all_with_one_message_and_leaves_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    source = f"import process_ranks; process_ranks.train_guarded({str(folder)!r}, 'pipeline=3 micro=2')"
    scripts = start_scripts(source, 3, tmp_path)
    for script in scripts:
        script.wait_ready()
    scripts[1].process.kill()
    outcomes = [script.outcome() for script in scripts]
    assert [status for status, _, _ in outcomes] == [1, -signal.SIGKILL, 1]
    complaints = "".join(text for _, _, text in outcomes)
    assert complaints.count("plait: rank 1 failed: its process ended without a word") == 1
    assert "Traceback" not in complaints
    load = functools.partial(ranks.load_state, plan="", path=folder, again=tmp_path / "again")
    (found,) = run("threads", Plan().mesh, load)
    assert found["step"] == 2
