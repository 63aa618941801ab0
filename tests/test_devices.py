"""Captures on a CUDA device that is not there: graphs have the kernels that a GPU takes, for which a CPU has none.

A process of its own, tests/device_ranks.py, runs the cases. What it shows of a GPU is in tests/fake_cuda.py. Steps are
in tests/device, on a device whose tensors have values.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from device_library import why_not
from fake_cuda import LIBRARY, build

RANKS = Path(__file__).with_name("device_ranks.py")
UNDER_A_PLAN = (
    "bf16 flash causal 0.0", "fp32 efficient boolean 0.0", "fp16 efficient learnt 0.0", "bf16 cudnn boolean 0.0",
    "bf16 flash causal 0.1",
)  # fmt: skip
OPTIMIZERS = (
    "AdamW fused", "AdamW foreach", "AdamW capturable", "AdamW fused capturable", "RMSprop capturable", "SGD fused",
    "Adagrad fused",
)  # fmt: skip
CUT = "data=2 tensor=2"

pytestmark = [
    pytest.mark.xdist_group("devices"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each case found, by name."""
    library = build(tmp_path_factory.mktemp("device"))
    env = os.environ | {LIBRARY: str(library)}
    run = subprocess.run([sys.executable, RANKS], env=env, capture_output=True, text=True, timeout=250, check=False)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    return {line.pop("case"): line for line in lines}


def test_a_capture_has_the_kernel_of_attention_that_a_gpu_takes(found: dict[str, dict[str, Any]]) -> None:
    """Forward and backward, in each dtype, with each mask; with dropout the op that draws masks by global position."""
    assert len(found["kernels"]) == 2 * (15 + 4 + 8), found["kernels"]  # efficient, flash, cuDNN; each with dropout too
    for case, ops in found["kernels"].items():
        name = f"aten._scaled_dot_product_{case.split()[-1]}_attention"
        name = "plait.dropped_attention" if "dropout" in case else name
        assert ops == [f"{name}.default", f"{name}_backward.default"], case


@pytest.mark.parametrize("case", UNDER_A_PLAN)
def test_attention_is_cut_over_samples_and_heads(case: str, found: dict[str, dict[str, Any]]) -> None:
    """Under data=2 tensor=2 pipeline=2 micro=2: of 8 samples and 4 heads a microbatch has 4 and 2."""
    step = found[f"attention {case}"]
    assert "error" not in step, step["trace"]
    precision, kernel, _, dropout = case.split()
    name = "plait.dropped_attention" if dropout == "0.1" else f"aten._scaled_dot_product_{kernel}_attention"
    assert (step["forward"], step["backward"]) == ([f"{name}.default"], [f"{name}_backward.default"])
    assert step["cells"] == ["B0", "B1", "F0", "F1"]
    assert step["queries"] == [[4, 2, 20, 8]] and step["without rule"] == []
    dtype = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    assert step["dtypes"] == [dtype]
    layouts = {name: text.removesuffix(" only:pipeline=0") for name, text in step["layouts"].items()}
    assert (
        layouts["blocks.0.mixer.qkv.weight"] == "f32[96@tensor/3, 32]"
        and layouts["blocks.0.out.weight"] == "f32[32, 32@tensor]"
    )
    assert layouts.get("blocks.0.mixer.bias", "f32[4@tensor, 20, 20]") == "f32[4@tensor, 20, 20]"


def test_convolutions_and_batch_norms_of_images(found: dict[str, dict[str, Any]]) -> None:
    """One device has PyTorch's own batch norm, without hidden state; of a cut batch the statistics are sums of all."""
    one, cut, stages = (found[f"images {plan}"] for plan in ("data=1", CUT, f"{CUT} pipeline=2 micro=2"))
    native = "aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm_backward.default"
    assert one["norms"] == [*native]
    assert (one["rows"], cut["rows"], stages["rows"]) == ([8], [4], [4])
    for each in (cut, stages):
        assert each["norms"] == [] and each["without rule"] == [] and each["dtypes"] == ["torch.bfloat16"]
        assert each["layouts"]["1.two.weight"].startswith("f32[8@tensor, 8, 3, 3]")
        assert each["layouts"]["1.last.weight"].startswith("f32[8@tensor]")


def test_precision_casts_what_autocast_casts_on_the_device(found: dict[str, dict[str, Any]]) -> None:
    """PyTorch's list for CUDA is longer than that for CPUs; a module's own precision holds on both."""
    wide = {"exp": ["torch.float32"], "native_layer_norm": ["torch.float32"], "_softmax": ["torch.float32"]}
    both = {"addmm": ["torch.bfloat16", "torch.float32"], "tanh": ["torch.bfloat16"]}
    half = {name: ["torch.bfloat16"] for name in wide}
    assert found["casts on cuda"] == both | wide
    assert found["casts on cpu"] == both | half


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_keep_their_states_where_their_kernels_want_them(
    name: str, found: dict[str, dict[str, Any]]
) -> None:
    case = found[f"optimizer {name}"]
    assert "error" not in case, case["trace"]
    counts = "cpu" if "foreach" in name else "cuda"
    assert case["state"] and all(where == (counts if key == "step" else "cuda") for key, where in case["state"].items())


def test_the_device_shows_what_it_is_for(found: dict[str, dict[str, Any]]) -> None:
    assert "_local_scalar_dense" in found["a wait for the device"]["error"]
    assert "two devices, cuda:0 and cpu" in found["two devices"]["error"]
