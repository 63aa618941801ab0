"""Mixtures of experts in the forms that models write them: found, with their rows in the order of the tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from oracle import check
from rule_samples import expert_samples
from torch import Tensor, nn
from torch.fx import Graph

import plait
from plait.backends.eager.passes import eager_graphs
from plait.compile.capture.capture import capture
from plait.compile.ir.calls import copy_graph, op_spec_of, placeholders
from plait.compile.ir.node_info import set_info
from plait.compile.ops import OP_SPECS
from plait.compile.ops.experts import grouped_addmm, with_bias
from plait.compile.passes.find_experts import expert_weights, find_experts
from plait.compile.passes.sorted_rows import access_of
from plait.compile.step_collectives import step_collectives
from plait.engine.compiler import Compiler
from plait.errors import CaptureError
from plait.plan.plan import Plan

WIDTH, INNER, EXPERTS, CHOSEN = 16, 24, 4, 2


@pytest.mark.parametrize("op", expert_samples(), ids=str)
def test_rows_and_columns_may_be_cut(op: Any) -> None:
    for sample in expert_samples()[op]:
        assert check(sample, OP_SPECS[op]) > 1


def test_a_bias_as_a_row_of_the_weights() -> None:
    bias, x, weight = torch.randn(3, 16), torch.randn(6, 8), torch.randn(3, 8, 16)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    rows, weights = with_bias(bias, x, weight)
    assert rows.shape == (6, 16) and weights.shape == (3, 16, 16)  # still aligned
    found, expected = torch._grouped_mm(rows, weights, ends), grouped_addmm(bias, x, weight, ends)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(expected[3], bias[2] + x[3] @ weight[2])


# ---- one layer, in many forms ----


class Layer(nn.Module):
    """A router, and experts of two weights each with a bias in between."""

    def __init__(self, form: Callable[..., Tensor], bias: bool = True, experts: int = EXPERTS) -> None:
        super().__init__()
        self.form = form
        self.before, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, INNER) * 0.3)
        self.bias = nn.Parameter(torch.randn(experts, INNER) * 0.3) if bias else None
        self.down = nn.Parameter(torch.randn(experts, INNER, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        flat = x.flatten(0, -2)
        top, ids = self.gate(flat).softmax(-1).topk(CHOSEN, -1)
        return self.form(self, flat, top, ids).view(x.shape)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(form: Callable[..., Tensor], dtype: torch.dtype = torch.float64, **options: Any) -> Layer:
    torch.manual_seed(0)
    return Layer(form, **options).to(dtype)


def rows(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def looked_up(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """Weights as a matrix for each row, multiplied from the left and from the right."""
    x, ids = x.repeat_interleave(CHOSEN, 0), ids.reshape(-1)
    inner = torch.bmm(x.unsqueeze(1), m.up[ids]).squeeze(1)
    inner = inner if m.bias is None else inner + m.bias[ids]
    out = torch.bmm(m.down.transpose(1, 2)[ids], F.silu(inner).unsqueeze(-1)).squeeze(-1)
    return (out * top.reshape(-1, 1)).view(-1, CHOSEN, WIDTH).sum(1)


def einsums(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """Weights as several matrices for each token."""
    inner = torch.einsum("tw,tkwi->tki", x, m.up[ids])
    inner = inner if m.bias is None else inner + m.bias[ids]
    return torch.einsum("tki,tkiw,tk->tw", F.silu(inner), m.down[ids], top)


def products(m: Layer, rows: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
    inner = torch._grouped_mm(rows, m.up, offs=ends)
    inner = inner if m.bias is None else inner + m.bias[ids]
    return torch._grouped_mm(F.silu(inner), m.down, offs=ends)


def grouped(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """As transformers writes it."""
    ids, order = torch.sort(ids.reshape(-1))
    ends = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
    out = products(m, x[order // CHOSEN], ends, ids) * top.reshape(-1)[order].unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return out[places].view(-1, CHOSEN, WIDTH).sum(1)


def argsorted(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """As DeepSeek-V3 and many others write it."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = F.one_hot(flat, EXPERTS).sum(0).cumsum(0).to(torch.int32)
    token = torch.arange(len(x)).repeat_interleave(CHOSEN)[order]
    out = products(m, x[token], ends, flat[order]) * top.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, out)


def gathered(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """As torchtitan writes it, and brought back by a second sort."""
    order = torch.argsort(ids.view(-1), stable=True)
    counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, ids.view(-1), torch.ones_like(order))
    token = (order // CHOSEN).reshape(-1, 1).expand(-1, WIDTH)
    out = products(m, torch.gather(x, 0, token), counts.cumsum(0).to(torch.int32), ids.view(-1)[order])
    out = out * top.view(-1)[order].reshape(-1, 1)
    half = torch.zeros_like(x).scatter_add(0, token, out * 0.5)
    return half + 0.5 * out[order.argsort()].view(-1, CHOSEN, WIDTH).sum(1)


def mask_of(ids: Tensor, num: int = EXPERTS + 1) -> tuple[Tensor, Tensor]:
    mask = F.one_hot(ids, num).permute(2, 1, 0)
    return mask, torch.greater(mask.sum((-1, -2)), 0).nonzero()


def body(m: Layer, x: Tensor, expert: Any) -> Tensor:
    inner = x @ m.up[expert]
    inner = inner if m.bias is None else inner + m.bias[expert]
    return F.linear(F.silu(inner), m.down[expert].t())


def loop(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """As transformers writes it, where rows may have no expert."""
    out = torch.zeros_like(x)
    mask, hit = mask_of(ids)
    for expert in hit:
        expert = expert[0]
        if expert == EXPERTS:
            continue
        place, token = torch.where(mask[expert])
        out.index_add_(0, token, body(m, x[token], expert) * top[token, place, None])
    return out


def added(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """Rows added where they were read, by a mask with the tokens first."""
    out = torch.zeros_like(x)
    mask = (ids == torch.arange(EXPERTS)[:, None, None]).int()
    for expert in mask.sum((1, 2)).nonzero().squeeze(-1):
        token, place = torch.where(mask[expert])
        out[token] += body(m, x[token], expert) * top[token, place].unsqueeze(-1)
    return out


FORMS = [looked_up, einsums, grouped, argsorted, gathered, loop, added]
HALVES = (grouped, argsorted, gathered)  # the grouped product has no float64


def dtype_of(form: Callable[..., Tensor]) -> torch.dtype:
    return torch.float32 if form in HALVES else torch.float64


def graph_of(model: nn.Module, batch: Tensor) -> Graph:
    """The step with its experts found."""
    captured = capture(model, loss_fn, batch)
    graph, inputs = copy_graph(captured.graph), {i.node: i for i in captured.inputs}
    for node in placeholders(graph):
        set_info(node, kind=inputs[node.name].kind, name=inputs[node.name].name)
    return find_experts(graph)


def calls(graph: Graph) -> Counter[str]:
    """How often the graph has calls of experts, and calls that read or write rows by numbers or their order."""
    found = Counter(str(node.target).split(".")[1] for node in graph.nodes if "plait.expert" in str(node.target))
    found["by number"] = sum(access_of(node) is not None for node in graph.nodes)
    found["in order"] = sum(op_spec_of(node).role in ("sort", "grouped product") for node in graph.nodes)
    return +found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_found(form: Callable[..., Tensor], bias: bool) -> None:
    """Forward and backward of two products; nothing is left that sorts rows or looks them up."""
    graph = graph_of(made(form, dtype_of(form), bias=bias), rows(dtype_of(form)))
    graph.lint()
    expected = Counter(expert_mm=4, expert_outer=2)
    assert calls(graph) == (expected + Counter(expert_rows=1, expert_sums=1) if bias else expected)
    tables = {"parameter_up": EXPERTS, "parameter_down": EXPERTS, **({"parameter_bias": EXPERTS} if bias else {})}
    assert expert_weights(graph) == tables


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_what_it_was(form: Callable[..., Tensor]) -> None:
    verifier = plait.Verifier(made(form, dtype_of(form)), loss_fn, rows(dtype_of(form)))
    for plan in ("data=2", "data=2 tensor=2 micro=2"):
        report = verifier.verify(plan)
        assert report.ok, report


@pytest.mark.parametrize("form", [looked_up, grouped])
def test_a_layer_that_a_model_has_twice(form: Callable[..., Tensor]) -> None:
    """Its second use comes first in the backward pass, which reads the weights transposed."""
    layer = made(form, dtype_of(form))
    report = plait.verify(nn.Sequential(layer, layer), loss_fn, rows(dtype_of(form)), "data=2")
    assert report.ok, report


def test_forms_under_autocast() -> None:
    for form in (looked_up, loop):
        report = plait.verify(made(form, torch.float32), loss_fn, rows(torch.float32), "data=2 precision=bf16")
        assert report.ok, report


def test_ids_of_the_batch_may_count_from_the_end() -> None:
    class Given(Layer):
        def forward(self, x: Any) -> Tensor:
            return looked_up(self, self.before(x[0]), torch.ones_like(x[1], dtype=torch.float64), x[1])

    torch.manual_seed(0)
    ids = torch.tensor([[0, -1], [3, 1], [-4, 2], [1, -2]])
    verifier = plait.Verifier(Given(looked_up).double(), loss_fn, (torch.randn(4, WIDTH).double(), ids))
    assert verifier.verify("data=2").ok


class Divided(Layer):
    """As DBRX has them: the weights of all experts as one matrix, which is viewed."""

    def __init__(self) -> None:
        super().__init__(looked_up, bias=False)
        self.flat = nn.Parameter(self.up.detach().reshape(-1, INNER))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.before(x).flatten(0, -2)
        top, ids = self.gate(flat).softmax(-1).topk(CHOSEN, -1)
        out = torch.zeros_like(flat)
        mask, hit = mask_of(ids, EXPERTS)
        for expert in hit:
            place, token = torch.where(mask[expert[0]])
            inner = flat[token].matmul(self.flat.view(-1, WIDTH, INNER)[expert[0]])
            out.index_add_(0, token, F.silu(inner).matmul(self.down[expert[0]]) * top[token, place, None])
        return out.view(x.shape)


def test_weights_of_all_experts_as_one_matrix() -> None:
    torch.manual_seed(0)
    model = Divided().double()
    del model.up
    assert expert_weights(graph_of(model, rows())) == {"parameter_flat": EXPERTS, "parameter_down": EXPERTS}
    verifier = plait.Verifier(model, loss_fn, rows())
    for plan in ("expert=2", "data=4 expert=4 zero=1"):
        report = verifier.verify(plan)
        assert report.ok, report


# ---- what depends on the order stays as it was ----


def by_place(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """Rows in sorted order get a weight by their place in it."""
    ids, order = torch.sort(ids.reshape(-1))
    ends = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
    out = products(m, x[order // CHOSEN], ends, ids) * torch.linspace(0, 1, len(order)).unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // CHOSEN, out)


def cumulated(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    ids, order = torch.sort(ids.reshape(-1))
    ends = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
    out = products(m, x[order // CHOSEN], ends, ids).cumsum(0) * 0.1
    return torch.zeros_like(x).index_add(0, order // CHOSEN, out)


def other_ends(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """No expert takes more than five rows; the others go to the next one."""
    ids, order = torch.sort(ids.reshape(-1))
    counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).clamp(max=5)
    ends = counts.cumsum(0, dtype=torch.int32).where(torch.arange(EXPERTS) < EXPERTS - 1, len(order)).to(torch.int32)
    return torch.zeros_like(x).index_add(0, order // CHOSEN, products(m, x[order // CHOSEN], ends, ids))


def falling(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """Experts in the order of their numbers, and rows against it."""
    ids, order = torch.sort(ids.reshape(-1), descending=True)
    ends = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
    return torch.zeros_like(x).index_add(0, order // CHOSEN, products(m, x[order // CHOSEN], ends, ids))


@pytest.mark.parametrize("form", [by_place, cumulated, other_ends, falling])
def test_rows_of_which_the_order_counts_stay_sorted(form: Callable[..., Tensor]) -> None:
    model, batch = made(form, torch.float32), rows(torch.float32)
    found = calls(graph_of(model, batch))
    assert found["in order"] == 7 and not found["expert_mm"]  # a sort, and three products for each weight
    assert plait.verify(model, loss_fn, batch, "data=2").ok


def test_a_permutation_without_experts_is_left_alone() -> None:
    class Sorted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            return super().forward(x[order])[order.argsort()]

    model = Sorted(WIDTH, WIDTH).double()
    assert calls(graph_of(model, rows()[0]))["in order"] == 2


# ---- loops ----


def shared(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """Rows without an expert go through the first layer once more."""
    ids = torch.where(top < 0.3, EXPERTS, ids)
    out = torch.zeros_like(x)
    mask, hit = mask_of(ids)
    for expert in hit:
        has_none = expert[0] == EXPERTS
        if has_none:
            _, token = torch.where(mask[expert[0]])
            out = out.index_add(0, token, m.before(x[token]))
            continue
        _, token = torch.where(mask[expert[0]])
        out = out.index_add(0, token, body(m, x[token], expert[0]))
    return out


def of_some(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """Only experts with more than a certain number of rows compute anything."""
    out = torch.zeros_like(x)
    mask, _ = mask_of(ids, EXPERTS)
    for expert in (mask.sum((1, 2)) > 8).nonzero():
        _, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, body(m, x[token], expert[0]))
    return out


@pytest.mark.parametrize("form", [shared, of_some])
def test_rows_of_a_loop_that_have_no_expert(form: Callable[..., Tensor]) -> None:
    report = plait.verify(made(form), loss_fn, rows(), "data=2")
    assert report.ok, report


def counted(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    num = 0
    for expert in hit:
        _, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, body(m, x[token], expert[0]))
        num += 1
    return out / num


def halved(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    for expert in hit:
        _, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, body(m, x[token], expert[0]))
        out.mul_(0.5)
    return out


def read_again(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    for expert in hit:
        _, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, body(m, x[token] + out[token], expert[0]))
    return out


def numbered(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    for number, expert in enumerate(hit):
        _, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, body(m, x[token], expert[0]) * number)
    return out


def overwritten(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    for expert in hit:
        _, token = torch.where(mask[expert[0]])
        out[token] = body(m, x[token], expert[0])
    return out


def averaged(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    for expert in hit:
        _, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, body(m, x[token] - x[token].mean(0), expert[0]))
    return out


def skipped(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    for expert in hit:
        _, token = torch.where(mask[expert[0]])
        if token.shape[0] > 3:
            out.index_add_(0, token, body(m, x[token], expert[0]))
    return out


def stopped(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    for expert in hit:
        if expert[0] == 2:
            break
        _, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, body(m, x[token], expert[0]))
    return out


def drawn(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    for expert in hit:
        _, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, body(m, x[token], expert[0]) * torch.rand((), dtype=x.dtype))
    return out


def kept(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    found = []
    for expert in hit:
        _, token = torch.where(mask[expert[0]])
        found.append(body(m, x[token], expert[0]))
    return out + torch.cat(found).mean(0)


def two_masks(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    for expert in hit:
        _, token = torch.where(mask[expert[0]] * (x[:, 0] > 0))
        out.index_add_(0, token, body(m, x[token], expert[0]))
    return out


def read_after(m: Layer, x: Tensor, out: Tensor, mask: Tensor, hit: Tensor) -> Tensor:
    for expert in hit:
        _, token = torch.where(mask[expert[0]])
        last = body(m, x[token], expert[0])
        out.index_add_(0, token, last)
    return out + last.sum()


LOOPS = [
    counted, halved, read_again, numbered, overwritten, averaged, skipped, stopped, drawn, kept, two_masks, read_after,
]  # fmt: skip


@pytest.mark.parametrize("run", LOOPS)
def test_a_loop_that_does_more_than_add_its_rows_is_named_with_its_line(run: Callable[..., Tensor]) -> None:
    def form(m: Layer, x: Tensor, top: Tensor, ids: Tensor) -> Tensor:
        return run(m, x, torch.zeros_like(x), *mask_of(ids))

    with pytest.raises(CaptureError, match=r"test_experts.py:\d+.*depends on the numbers") as caught:
        capture(made(form), loss_fn, rows())
    assert caught.value.data_dependent


# ---- transformers ----

SMALL = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 1, "use_cache": False,
    "output_router_logits": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4},
    "Qwen3Moe": {"moe_intermediate_size": 32, "num_experts": 4, "head_dim": 8, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8},
    "DeepseekV3": {
        "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
        "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "n_group": 2, "topk_group": 1,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip
WRITTEN = ("eager", "batched_mm", "grouped_mm")


def family(name: str, written: str) -> plait.Verifier:
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**SMALL | FAMILIES[name])
    model = getattr(hf, f"{name}ForCausalLM")._from_config(config).train()
    model.set_experts_implementation(written)
    ids = torch.randint(2, 48, (4, 8), generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, batch: Tensor) -> Any:
        return model(input_ids=batch, labels=batch).loss

    return plait.Verifier(model if written == "grouped_mm" else model.double(), loss, ids)


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_transformers(name: str, written: str) -> None:
    verifier = family(name, written)
    for plan in ("expert=2", *(["data=2", "data=4 expert=4"] if written == "batched_mm" else [])):
        report = verifier.verify(plan)
        assert report.ok, (plan, report)
    program = Compiler(verifier.captures, Plan.parse("data=2")).compiled(verifier.batch).program
    counts = [each for each in step_collectives(program, eager_graphs(program)) if each.phase == "forward"]
    assert all(each.tensor_bytes <= 64 for each in counts), counts  # what the losses divide by, and no tokens
