"""compile=inductor on a device: on a GPU compiled, and recorded as CUDA graphs; on one that is not there with regions
that run call by call, which shows all but what Inductor itself does."""

from __future__ import annotations

from typing import Any

import host_gpu
import pytest
from device_training import on_cpu, train

from plait.backends.inductor import inductor_backend
from plait.backends.inductor.region_compiler import CompileReport
from plait.engine import setup_checks

PLANS = {  # each with the plan of one rank that has its numbers
    "data=2": "data=1",
    "data=2 zero=3 micro=2": "micro=2",
    "tensor=2": "data=1",
    "micro=2 recompute=layer": "micro=2",
    "micro=2 home.activations=host": "micro=2",
    "pipeline=2 micro=4 schedule=zb-h1": "micro=4",
}


@pytest.fixture(autouse=True)
def _call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no Triton regions run their calls one by one."""
    if host_gpu.is_here():
        monkeypatch.setattr(inductor_backend, "compile_regions", lambda functions, plan: CompileReport(0, 0, 0, 0.0))
        monkeypatch.setattr(setup_checks, "missing_compiler", lambda kind: "")


@pytest.mark.parametrize("plan", PLANS)
def test_compiled_steps_have_the_numbers_of_a_cpu_and_the_host_does_not_wait(plan: str) -> None:
    found = train(f"{plan} compile=inductor")
    assert found.apart(on_cpu(PLANS[plan])) < 1e-6
    assert (found.places, found.waits) == ({"cuda"}, [])


@pytest.mark.skipif(host_gpu.is_here(), reason="CUDA graphs are recorded by a GPU's driver")
@pytest.mark.parametrize("plan", ["data=1", "micro=2", "micro=2 recompute=layer"])
def test_steps_are_recorded_as_cuda_graphs(plan: str) -> None:
    found: Any = train(f"{plan} compile=inductor cudagraphs=yes", steps=6)
    assert found.apart(train(plan, "cpu", steps=6)) < 1e-6
