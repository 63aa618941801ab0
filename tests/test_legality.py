"""What is known against a plan before any rank starts, as values."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.api.trainer import Trainer
from plait.comm import sharing
from plait.comm.sharing import can_share
from plait.engine.setup_checks import place_here
from plait.errors import BatchError, PlanError, Refusal, UnevenBatchError
from plait.plan.legality import refusals
from plait.plan.plan import Plan
from plait.plan.refused_keys import refused_together
from plait.plan.step_facts import CutTrial, OptimizerFacts, ParameterFacts, Place, StepFacts

GPU, OLD = Place("cuda"), Place("cuda", without_bf16="the Tesla V100 of compute capability 7.0")
WEIGHT = {"weight": ParameterFacts()}
COMPLEX = {"weight": ParameterFacts(dtype="complex64")}


@pytest.mark.parametrize(
    ("plan", "facts", "place", "whats"),
    [
        ("data=2 zero=3", StepFacts(WEIGHT, clip_norm=1.0), GPU, []),
        ("home.parameters=host", StepFacts(), GPU, ["home.parameters=host has parameters updated on the host"]),
        ("home.parameters=disk", StepFacts(), GPU, ["home.parameters=disk has parameters updated on the host"]),
        ("home.parameters=host home.optimizer=host", StepFacts(), GPU, []),
        ("home.parameters=host", StepFacts(), Place(), []),
        ("precision=bf16 precision.head=bf16", StepFacts(), OLD, ["precision=bf16", "precision.head=bf16"]),
        ("precision=fp16", StepFacts(), OLD, []),
        ("data=2 compress=topk:0.1", StepFacts(COMPLEX), Place(), ["compress=topk:0.1"]),
        ("data=2 sync=2", StepFacts(COMPLEX), Place(), ["sync=2"]),
        ("data=2 zero=3", StepFacts(COMPLEX), Place(), []),
        ("precision=bf16", StepFacts(), GPU, []),
        ("home.parameters=host", StepFacts(), None, []),
        ("workers=2 servers=1 home.parameters=host", StepFacts(), GPU, ["home.parameters=host has parameters updated"]),
        ("data=4 central=host", StepFacts(), Place(ranks_per_host=4), []),
        ("data=4 central=host", StepFacts(), Place(ranks_per_host=2), ["central=host keeps the parameters in memory"]),
        ("replica=2 data=2 sync=2 central=host", StepFacts(), Place(ranks_per_host=2), []),
        ("data=2 central=host", StepFacts(), Place(shares_memory=False), ["central=host keeps the parameters in"]),
        ("central=host", StepFacts(), Place(shares_memory=False), []),
        (
            "pipeline=2 micro=4 schedule=pipedream precision=fp16", StepFacts(clip_norm=1.0, updates_within=True), None,
            ["schedule=pipedream updates each stage by itself"] * 2,
        ),
        ("workers=2 servers=1 precision=fp16", StepFacts(), None, ["precision=fp16 scales the loss"]),
        ("data=2 compress=int8 compress.nope=none", StepFacts(WEIGHT), None, ["compress.nope=none"]),
        ("data=2 compress=int8 compress.wei*=none", StepFacts(WEIGHT), None, []),
        ("data=2 compress=int8 compress.nope=none", StepFacts(), None, []),
    ],
)  # fmt: skip
def test_refusals(plan: str, facts: StepFacts, place: Place | None, whats: list[str]) -> None:
    found = refusals(Plan.parse(plan), facts, place)
    assert len(found) == len(whats)
    for refusal, what in zip(found, whats, strict=True):
        assert refusal.what.startswith(what) and refusal.instead
        assert str(refusal).startswith(what) and str(refusal).endswith(f"; {refusal.instead}")


CALLED = StepFacts(called=("", "layers.0", "layers.1.up", "head"), modules=("", "layers", "head"), num_stages=2)
HALVES = StepFacts({"head.weight": ParameterFacts(dtype="float16")}, ("", "head"))
MIXING = OptimizerFacts((CutTrial("Mixing", "mixes", "head.weight", "f32[8@data]"),), wrappers=("Both",))
APART = OptimizerFacts(together=(("Mixing", "mixes"),), scattered=("pipeline", 2))


@pytest.mark.parametrize(
    ("plan", "facts", "texts"),
    [
        ("data=2", StepFacts(rows=8), []),
        ("data=3", StepFacts(rows=8), ["data=3 does not divide the batch of 8"]),
        ("data=2 micro=2", StepFacts(rows=6), ["data=2 does not divide a microbatch of 3"]),
        ("micro=4", StepFacts(rows=6), ["micro=4 does not divide the batch of 6 rows"]),
        ("data=4 sync=2", StepFacts(rows=6), ["4 replicas do not divide the batch of 6 rows"]),
        ("stages=[tensor=2|data=2]", StepFacts(rows=5), ["stages= cuts each microbatch of 5 into 1 x 2 parts"]),
        ("workers=4 servers=1 staleness=0 backup=1", StepFacts(rows=8), ["the global batch of 8 does not split over"]),
        ("workers=2 servers=1 data=3", StepFacts(rows=8), ["a worker's part of the batch, 4 rows, does not split"]),
        ("recompute=layer", CALLED, []),
        ("recompute=head", CALLED, []),
        ("recompute=heads", CALLED, ["recompute=heads matches no module of the model; it has head, layers.0"]),
        ("recompute=layer", StepFacts(called=("head",)), ["recompute=layer needs numbered layers"]),
        ("recompute=budget=1KiB", StepFacts(called=()), []),
        ("pipeline=2 cut=layers.1", CALLED, []),
        ("pipeline=2 cut=layer.1", CALLED, ["cut=layer.1: the model calls no module of this name; did you mean"]),
        ("pipeline=2 cut=layers,head", CALLED, ["cut=layers,head names 2 modules, but 2 stages begin with 1 besides"]),
        ("precision.layers=bf16", CALLED, []),
        ("precision.tail=bf16", CALLED, ["precision.tail=bf16 matches no module of the model; it has layers, head"]),
        ("precision.head=fp16", HALVES, []),
        ("precision.head=bf16", HALVES, ["precision.head=bf16 says how products of float32 weights are computed"]),
        ("data=2 sync=2", StepFacts(changed_outside=("mean",)), ["the step changes mean, a tensor outside"]),
        ("data=2", StepFacts(changed_outside=("mean",)), []),
        ("micro=2", StepFacts(unsteady="model:count"), ["the step changes model:count, and needs another graph"]),
        ("data=2", StepFacts(unsteady="model:count"), []),
        ("data=2", StepFacts(uncaptured="a branch", nearest="data=2"), []),
        ("tensor=2", StepFacts(uncaptured="a branch", nearest="data=2"), ["the plan 'tensor=2' needs the graph of"]),
        ("data=2", StepFacts(optimizer=MIXING), ["Mixing mixes, so its result might change with the cut of head"]),
        ("pipeline=2", StepFacts(optimizer=APART), ["Mixing mixes, and with pipeline=2 a rank has only some of them"]),
        ("home.optimizer=disk", StepFacts(optimizer=OptimizerFacts(wrappers=("Both",))), ["Both steps several"]),
    ],
)  # fmt: skip
def test_refusals_of_a_step(plan: str, facts: StepFacts, texts: list[str]) -> None:
    found = refusals(Plan.parse(plan), facts)
    assert len(found) == len(texts)
    for refusal, text in zip(found, texts, strict=True):
        assert str(refusal).startswith(text) and refusal.instead


def test_an_error_has_its_refusal() -> None:
    """Also in another process."""
    error = UnevenBatchError(Refusal("a=1", "it is odd", "use a=2"))
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, PlanError) and isinstance(again, BatchError)
    assert str(again) == "a=1: it is odd; use a=2" and again.refusal == error.refusal
    assert PlanError("a=1 cannot be read").refusal is None


def test_what_does_not_go_together_is_a_value_for_each() -> None:
    values = {"central": "host", "zero": "1", "home.parameters": "disk"}
    found = [one for one in refused_together(_defaults() | values, set(values))]
    assert [one.what for one in found] == [
        "central=host does not go with zero=1", "central=host does not go with home.parameters=disk"
    ]  # fmt: skip
    assert all(isinstance(one, Refusal) and one.why and one.instead for one in found)


def _defaults() -> dict[str, str]:
    from plait.plan.plan import describe_keys

    return {name: default for name, default, _ in describe_keys()}


def made(plan: str) -> Trainer:
    model = nn.Linear(2, 1)
    return Trainer(model, lambda model, batch: model(batch).sum(), torch.optim.SGD, plan)


def test_a_trainer_is_refused_before_it_meets_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on two hosts; there is nobody to meet, and it would wait for the other rank for long."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match="central=host keeps the parameters in memory that the ranks of data=2 share"):
        made("data=2 central=host")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    with pytest.raises(PlanError, match="precision=bf16: the Tesla V100 of compute capability 7.0 has no units for bf"):
        made("data=2 precision=bf16")
    with pytest.raises(PlanError, match="home.optimizer=device keeps the optimizer's state on cuda; add home.opt"):
        made("data=2 home.parameters=host")


def test_a_host_without_files_in_common_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_share() and place_here().shares_memory

    def refused(*args: Any) -> Any:
        raise PermissionError("no")

    monkeypatch.setattr(sharing.Segment, "open", refused)
    assert not can_share()
    with pytest.raises(PlanError, match="or the system lets no process open another's memory file; use replica=HOSTS"):
        made("data=2 central=host")


# Decisions against a plan that are made outside plan/, where they cannot be made by what is known of model, batch,
# captured step and optimizer: each file with the reason. A new refusal is a function in plan/, of plain values.
DECIDE_ELSEWHERE = {
    "schedule/families/__init__.py": "what schedules there are; plan/ lies below",
    "comm/agree.py": "nothing: what another rank has refused is raised here too",
    "compile/capture/precision.py": "which op has no kernel, torch says when it is called",
    "compile/capture/capture_errors.py": "whether code communicates, its run shows",
    "compile/sharding/auto_sharding.py": "what an axis divides, the search over the graph finds",
    "compile/sharding/propagate.py": "which layout a batch norm's input has, propagation finds",
    "compile/passes/recomputation.py": "the least that a budget can be, the integer program finds",
    "compile/stages/split.py": "what stages share, the cut finds; and what a schedule's file is for",
    "compile/stages/assign.py": "where the sharded step can be cut",
    "backends/inductor/region_compiler.py": "which op Inductor cannot compile, compiling shows",
    "backends/xla/graph_function.py": "which op has no lowering, the table of lowerings says",
    "backends/xla/element_update.py": "the same of an optimizer's ops",
    "backends/xla/mesh_shardings.py": "how many devices jax has, jax says; and which layouts XLA has none for",
    "engine/engines.py": "which packages are installed",
    "engine/recorded_update.py": "what an optimizer does to an element, its step on small tensors shows",
    "engine/xla_update.py": "which hooks and wrappers are around an optimizer",
    "engine/rank_optimizers.py": "what a user's optimizer is, of which the function is called",
    "engine/local_batch.py": "rows that a rank takes of a later batch",
    "engine/ddp_fallback.py": "what modules do without a graph",
    "integrations/ray_servers/server_job.py": "what servers hold, and tables, which plan/ does not know",
    "integrations/ray_servers/optimizer_shard.py": "how a user's optimizer groups what a server holds",
    "integrations/ray_servers/served_check.py": "what verify can run in one process",
    "cost/step_simulation.py": "what a cluster has, which a plan does not know",
    "api/simulate_step.py": "what simulations describe",
    "reference/differences.py": "which precision kernels take, and which rows, a run on one device shows",
    "cost/transformer_simulation.py": "what devices have room for, the simulation finds",
    "cost/transformer_states.py": "which clusters have hosts of which something is known",
    "cost/transformer_step.py": "the least that a budget can be, the shape says",
    "cost/outline_search.py": "which plans there are for a model on a cluster, the search finds",
    "cost/plan_search.py": "which of them can be had",
    "cost/found_plans.py": "which of them fit",
}

# Files with errors that are none of a plan for a model: of an argument or a file (argument), or of a job that runs and
# whose model, batch or data have changed (job), or the model is refused under every plan (model).
NO_REFUSAL = {
    "api/cli.py": "argument", "api/command.py": "argument", "api/job/prediction_commands.py": "argument",
    "api/job/this_machine.py": "argument",
    "api/plan_model.py": "model", "engine/gradient_noise.py": "argument",
    "api/memory.py": "argument", "api/verify.py": "argument", "comm/algorithms.py": "argument",
    "compile/capture/outside_tensors.py": "model", "compile/capture/fake_parameters.py": "model",
    "compile/capture/python_state.py": "model", "compile/pass_base.py": "argument",
    "compile/stages/assign.py": "job", "compile/stages/split.py": "argument", "cost/simulate.py": "argument",
    "cost/collective_time.py": "argument", "cost/transformer_step.py": "argument",
    "engine/train_state.py": "argument",
    "engine/setup_checks.py": "argument", "engine/data/loader.py": "argument", "engine/dry_run.py": "argument",
    "engine/ddp_fallback.py": "argument", "engine/engine.py": "job", "engine/gathered.py": "argument",
    "engine/local_sgd/exchange.py": "argument", "engine/rank_optimizers.py": "argument",
    "engine/rank_executor.py": "job",
    "engine/trace_folder.py": "argument", "api/trainer.py": "argument",
    "engine/frozen_parameters.py": "job", "engine/python_watch.py": "job",
    "integrations/ray_servers/ray_cluster.py": "argument", "integrations/ray_servers/server_job.py": "model",
    "integrations/ray_servers/served_check.py": "argument",
    "integrations/ray_servers/supervisor.py": "job", "integrations/ray_servers/tables/sparse_table.py": "model",
    "integrations/ray_servers/tables/table_shard.py": "argument", "report/explanation.py": "argument",
    "report/step_prediction.py": "argument",
    "report/schedule_page.py": "argument", "report/swimlane.py": "argument",
    "schedule/check.py": "argument", "schedule/consistency.py": "argument", "schedule/families/__init__.py": "argument",
    "schedule/zero_bubble_rules.py": "argument",
    "spec/mesh.py": "argument", "spec/schedule.py": "argument",
}  # fmt: skip
SOURCE = Path(plait.__file__).parent
OF_PLAN = {"refusals", "of_fewer_rows", "no_common_memory", "nothing_to_pad", "padding_changes", "padding_unchecked"}


def test_plans_are_refused_in_plan() -> None:
    """A file outside plan/ that decides against a plan, or raises a PlanError without a Refusal, is listed above."""
    decide, others = set[str](), set[str]()
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        if place.startswith("plan/") or place == "errors.py":
            continue
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name == "Refusal":
                decide.add(place)
            elif name in ("PlanError", "ScheduleError", "UnevenBatchError") and not _is_refusal(call.args[0]):
                others.add(place)
    assert decide == DECIDE_ELSEWHERE.keys()
    assert others == NO_REFUSAL.keys()


def _is_refusal(given: ast.expr) -> bool:
    """Whether what an error is made of is a Refusal, by its constructor, by a function of plan/, or by its name."""
    if isinstance(given, ast.Subscript):
        given = given.value
    if isinstance(given, ast.Call) and isinstance(given.func, ast.Name):
        return given.func.id == "Refusal" or given.func.id in OF_PLAN
    return isinstance(given, ast.Name) and given.id == "refusal"
