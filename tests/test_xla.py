"""backend=xla: XLA runs the step on 8 virtual devices of a CPU.

A process of its own, tests/xla_ranks.py, runs the cases: virtual devices must be asked for before jax starts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from device_library import CACHE
from torch import nn
from torch.torch_version import TorchVersion

import plait
from plait.engine import engines
from plait.errors import PlanError
from plait.plan.plan import Plan

RANKS = Path(__file__).with_name("xla_ranks.py")
PLANS = (
    "replica=2 data=2 zero=3 tensor=2 precision=bf16", "data=2 context=3 zero=2 micro=2 precision=fp16",
    "data=2 tensor=2 sequence=yes precision=bf16-params",
)  # fmt: skip
# Of float64. A graph of torch 2.11 has the sums of fused attention in float32 there, which its kernel does not.
EXACT = 1e-10 if TorchVersion(torch.__version__) >= (2, 12) else 1e-7

with_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed: plait[xla]")
pytestmark = [pytest.mark.xdist_group("xla"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What each case found, by name."""
    # Programs run a few times, so that XLA need not optimise them; equal programs are compiled once.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    flags += " --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(CACHE / "xla")}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    run = subprocess.run([sys.executable, RANKS], env=env, capture_output=True, text=True, timeout=560, check=False)
    assert run.returncode == 0, run.stderr
    lines = {line["case"]: line for line in map(json.loads, run.stdout.splitlines())}
    for line in lines.values():
        assert "error" not in line or "trace" not in line, line["trace"]
    return lines


@with_jax
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_equals_one_device(plan: str, found: dict[str, Any]) -> None:
    assert found[plan]["ok"], found[plan]["report"]


@with_jax
def test_training_is_that_of_one_device_in_one_program(found: dict[str, Any]) -> None:
    line = found["trained"]
    assert max(line[key] for key in ("losses", "values", "most", "score", "right")) < EXACT, line
    assert line["said"], "rows come in the order of the batch"
    assert line["programs"] == 1, "a learning rate that changes, and AdamW's count of steps, are inputs of a program"


@with_jax
def test_pytorchs_optimizers_are_compiled(found: dict[str, Any]) -> None:
    line = {name: value for name, value in found["optimizers"].items() if name not in ("case", "seconds")}
    assert len(line) == 10 and max(line.values()) < 1e-6, line  # ASGD and NAdam count in float32


@with_jax
def test_checkpoints_are_read_both_ways(found: dict[str, Any]) -> None:
    line = found["checkpoints"]
    assert line["apart"] < EXACT and line["again"] == 0, line


@with_jax
def test_steps_by_halves_and_weights_that_are_lent(found: dict[str, Any]) -> None:
    assert max(found["halves"]["apart"]) < EXACT, found["halves"]
    assert "is not in the model now" in found["halves"]["away"]


@with_jax
def test_a_parameter_begins_to_train(found: dict[str, Any]) -> None:
    assert found["thawed"]["apart"] < EXACT, found["thawed"]


@with_jax
def test_a_loss_that_is_not_finite_changes_nothing(found: dict[str, Any]) -> None:
    line = found["not_finite"]
    assert line["apart"] == 0 and line["step"] == 2 and "the loss of step 2 is nan" in line["error"], line


@with_jax
def test_random_numbers_are_those_of_every_plan(found: dict[str, Any]) -> None:
    assert found["draws"]["differ"] == []


@with_jax
def test_lowerings_compute_what_pytorch_computes(found: dict[str, Any]) -> None:
    line = found["lowerings"]
    assert line["differ"] == {} and line["num"] > 400, line


@with_jax
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("devices", "is for 16 devices, and jax has 8 (cpu); give a plan for 8, or, to try it out, start Python with"),
        ("optimizer", "for each element by itself, and Norms uses aten.linalg_vector_norm.default; use SGD, Adam"),
        ("muon", "for each element by itself, and Muon uses"),
        ("hooks", "SGD has hooks around it; call them after trainer.step"),
        ("op", "has no lowering for the op aten._linalg_svd.default, which 1 calls"),
        ("layout", "on one rank of tensor, and XLA's shardings have all devices; leave the annotation out"),
        ("graph", "cannot be captured"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(case: str, text: str, found: dict[str, Any]) -> None:
    assert found["refused"][case].startswith("PlanError: ") and text in found["refused"][case], found["refused"][case]


@with_jax
def test_where_memory_ends_it_is_said_what_takes_how_much(found: dict[str, Any]) -> None:
    said = found["memory_ends"]["said"]
    assert "DeviceMemoryError: the memory of the devices of jax ran out in forward and backward of step 1" in said
    assert "parameters 80 B, gradients 0 B, optimizer 80 B; add zero=2, or zero=3, or micro=2 to the plan (XLA" in said


@pytest.mark.parametrize(
    "key",
    [
        "pipeline=2 micro=2", "home.parameters=host", "home.activations=disk", "home.optimizer=disk", "central=host",
        "sync=4", "compress=int8", "expert=2", "compile=inductor", "workers=2 servers=1",
        "recompute=layer", "batchnorm=local", "allreduce=ring", "reduce=bf16", "bucket=1MiB",
    ],
)  # fmt: skip
def test_keys_that_xla_cannot_have_are_refused_by_name(key: str) -> None:
    name = key.partition("=")[0]
    with pytest.raises(PlanError, match=f"backend=xla does not go with {name}="):
        Plan.parse(f"data=2 {key} backend=xla")


@with_jax
def test_sequence_parallel_cuts_activations_of_the_program(found: dict[str, Any]) -> None:
    """The residual stream is [8, 6, 8]; a device has half of its positions, or all of them."""
    line = found["sequence"]
    assert line["parts"] > 10 * line["whole"], line


def test_explain_leaves_the_collectives_to_xla() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8)
    found, of_torch = (
        plait.explain(model, lambda m, x: m(x).square().mean(), x, f"data=2 zero=1 tensor=2{backend}")
        for backend in (" backend=xla", "")
    )
    assert found.program.layouts == of_torch.program.layouts
    assert str(found).endswith(
        "collectives\n  XLA's partitioner inserts them from these layouts when it compiles the step"
    )
    assert found.collectives == () and of_torch.collectives and found.sent_bytes == {}
    one = found.tensor("0.weight").splitlines()
    assert "  gradient  summed over data, as XLA's partitioner chooses" in one
    assert any(line.startswith("  state     f32[8@tensor") for line in one) and "all_reduce" not in "".join(one)
    assert "bucket" in of_torch.tensor("0.weight") and "bucket" not in found.passes()


def test_one_process_has_all_devices() -> None:
    plan = Plan.parse("data=4 tensor=2 backend=xla")
    assert str(plan) == "data=4 tensor=2 backend=xla" and plan.num_processes == 1 and plan.mesh.size == 8
    plan.check_processes(1)
    with pytest.raises(PlanError, match="has all 8 devices in one process, and there are 8; start one"):
        plan.check_processes(8)


def test_without_jax_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None if name == "jax" else real(name))
    with pytest.raises(PlanError, match="jax, which is not installed; pip install 'plait.xla.'"):
        plait.Trainer(nn.Linear(2, 2), lambda m, x: m(x).mean(), torch.optim.SGD, "data=2 backend=xla")


def test_a_jax_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "plait.engine.xla_engine", None)
    with pytest.raises(PlanError, match="jax 0.10 or later, and what is installed cannot be imported: .*upgrade"):
        plait.Trainer(nn.Linear(2, 2), lambda m, x: m(x).mean(), torch.optim.SGD, "data=2 backend=xla")


@with_jax
@pytest.mark.parametrize(
    ("named", "text"),
    [("tpu", "change JAX_PLATFORMS=tpu, or leave it out, or leave backend"), ("", "set JAX_PLATFORMS=cpu to try it")],
)
def test_a_jax_without_devices_is_refused(named: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.backends.xla import mesh_shardings

    def devices() -> Any:
        raise RuntimeError("Unable to initialize backend 'tpu'.")

    monkeypatch.setattr(mesh_shardings.jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", named)
    with pytest.raises(PlanError, match=f"on the devices of jax, which finds none: Unable to .* 'tpu'; {text}"):
        mesh_shardings.MeshShardings(Plan.parse("data=2 backend=xla"))


def test_other_plans_do_not_import_jax() -> None:
    code = "import sys, plait; plait.Plan.parse('data=2'); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
