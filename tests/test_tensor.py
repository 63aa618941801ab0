"""tensor=: what it splits in models nobody prepared, and that the split step has the numbers of one device."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.comm.threads import run_ranks
from plait.graph import ops
from plait.graph.lowered import Lowered
from plait.run.compiler import Captures, Compiler, LossFn
from plait.spec.mesh import Mesh
from plait.spec.plan import Plan

WIDTH, HEADS, VOCAB = 32, 4, 48


def turned(x: Tensor) -> Tensor:
    """Rotary positions, the two halves of each head turned against each other; x [batch, heads, length, size]."""
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] / 8 ** torch.linspace(0, 1, x.shape[3] // 2, dtype=x.dtype)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Separate query, key and value; fewer heads of keys and values are repeated, as transformers does."""

    def __init__(self, kv_heads: int, normed: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH) if normed else nn.Identity()  # over all heads together
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, kv_heads * WIDTH // HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        size = WIDTH // HEADS
        projected = self.norm(self.query(x)), self.key(x), self.value(x)
        query, key, value = (y.unflatten(-1, (-1, size)).transpose(1, 2) for y in projected)
        repeats = HEADS // key.shape[1]
        key, value = turned(key).repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return self.out(F.scaled_dot_product_attention(turned(query), key, value).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A language model of two layers around the block that is given."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.symbols, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.symbols(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def text(rows: int, length: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, VOCAB, (rows, length), generator=generator) for name in ("x", "y")}


@pytest.mark.parametrize(
    ("kv_heads", "rows", "plan"),
    [
        (2, 6, "tensor=4"),
        (1, 5, "tensor=4"),
        (2, 12, "tensor=4 micro=2"),
        (2, 6, "data=2 tensor=4"),
        (2, 6, "tensor=4 pipeline=2 micro=2"),
    ],
)
def test_fewer_key_value_heads_than_ranks(kv_heads: int, rows: int, plan: str) -> None:
    torch.manual_seed(0)
    model = Decoder(Attention(kv_heads), Attention(kv_heads)).double()
    report = plait.verify(model, loss_fn, text(rows), plan, tolerance=1e-6)
    assert report.ok, report


def test_what_changes_its_placement_is_dense() -> None:
    """The backward of a layer norm reads the memory of the statistics it is given, whatever their strides are."""
    whole = torch.randn(4, 8, 6)
    frame = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)

    def rank(world: object) -> list[Tensor]:
        part = ops.shard(world, whole, "tensor", 1, 2)
        column = ops.shard(world, whole, "tensor", 2, 1)[:, :, :1].contiguous()
        gathered = ops.all_gather(world, column, "tensor", 2, 1)
        return [part, gathered, ops.shard(world, frame, "tensor", 1, 1)]

    for part, gathered, channels in run_ranks(Mesh((("tensor", 2),)), rank):
        assert part.is_contiguous() and gathered.is_contiguous()
        assert channels.is_contiguous(memory_format=torch.channels_last)


class Fused(nn.Module):
    """Query, key and value of grouped heads in one weight, taken apart by slices and turned; a gate and what it gates
    side by side (gpt-oss)."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gated, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.fused(x)
        parts = fused[..., :WIDTH], fused[..., WIDTH : 3 * WIDTH // 2], fused[..., 3 * WIDTH // 2 :]
        query, key, value = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(turned(query), turned(key), value, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gated = self.gated(x)
        return self.down(F.silu(gated[..., ::2]) * gated[..., 1::2])


@pytest.mark.parametrize("plan", ["tensor=2", "data=2 tensor=2 zero=3", "tensor=2 pipeline=2 micro=2"])
def test_fused_weights_of_unequal_blocks(plan: str) -> None:
    torch.manual_seed(0)
    report = plait.verify(Decoder(Fused(), Fused()).double(), loss_fn, text(4), plan, tolerance=1e-6)
    assert report.ok, report


def test_fused_weights_are_split_without_gathers() -> None:
    found = lowered(Decoder(Fused()), "tensor=2")
    assert whole_weights(found) == []
    assert str(found.layouts["blocks.0.fused.weight"]) == "f32[64@tensor/2+1+1, 32]"
    assert count(found, ops.all_gather) == 0


class Complex(nn.Module):
    """Rotary positions as a product of complex numbers, as torchtitan writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        angle = torch.outer(torch.arange(8.0), 0.5 ** torch.arange(4.0))
        self.register_buffer("turns", torch.polar(torch.ones_like(angle), angle))

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (HEADS, -1)) for part in self.fused(x).chunk(3, -1))
        query, key, value = (part.transpose(1, 2) for part in parts)
        query, key = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * self.turns).flatten(-2)
            for y in (query, key)
        )
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("plan", ["data=2", "tensor=2"])
def test_complex_rotary_positions_gather_nothing(plan: str) -> None:
    found = lowered(Decoder(Complex()), plan)
    assert not found.without_rule and count(found, ops.all_gather) == 0
    torch.manual_seed(0)
    report = plait.verify(Decoder(Complex()), loss_fn, text(4), plan)
    assert report.ok, report


def lowered(model: nn.Module, plan: str, loss: LossFn = loss_fn, rows: int = 4) -> Lowered:
    return Compiler(Captures(model, loss), Plan.parse(plan)).lowered(text(rows))


def whole_weights(found: Lowered) -> list[str]:
    """Names of the matrices and tables of which every rank has all."""
    here = found.plan.mesh.coordinates(0)
    parameters = {i.name for i in found.captured.inputs if i.kind == "parameter"}
    layouts = {name: layout for name, layout in found.layouts.items() if name in parameters and len(layout.shape) > 1}
    return [name for name, each in layouts.items() if each.local_shape(found.plan.mesh, here) == each.shape]


def count(found: Lowered, op: object) -> int:
    return sum(node.target is op for node in found.graph.nodes)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_keys_that_are_turned_are_split(kv_heads: int) -> None:
    found = lowered(Decoder(Attention(kv_heads), Attention(kv_heads)), "tensor=2")
    assert whole_weights(found) == []
    assert count(found, ops.all_gather) == 0
    sums = count(found, ops.all_reduce) + count(found, ops.all_reduce_start)
    assert sums <= 2 * 2 + 6  # two a block; the table, the head, and the loss over the vocabulary


def test_a_norm_over_all_heads_is_a_small_sum() -> None:
    found = lowered(Decoder(Attention(4, normed=True)), "tensor=2")
    assert whole_weights(found) == []
    assert count(found, ops.all_gather) == 0
    torch.manual_seed(0)
    model = Decoder(Attention(4, normed=True)).double()
    report = plait.verify(model, loss_fn, text(4), "tensor=4", tolerance=1e-6)
    assert report.ok, report


def hf_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(input_ids=batch["x"]).logits.flatten(0, 1), batch["y"].flatten())


def test_fused_weights_of_few_key_value_heads_stay_whole() -> None:
    config = hf.Phi3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    found = lowered(hf.Phi3ForCausalLM._from_config(config).train(), "tensor=4", hf_loss)
    assert "model.layers.0.self_attn.qkv_proj.weight" in whole_weights(found)


def experts() -> nn.Module:
    torch.manual_seed(0)
    config = hf.MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return hf.MixtralForCausalLM._from_config(config).train()


def test_experts_are_split_inside() -> None:
    found = lowered(experts(), "tensor=2", hf_loss)
    assert whole_weights(found) == ["model.layers.0.mlp.gate.weight"]
    assert str(found.layouts["model.layers.0.mlp.experts.gate_up_proj"]) == "f32[4, 96@tensor/2, 32]"
    assert str(found.layouts["model.layers.0.mlp.experts.down_proj"]) == "f32[4, 32, 48@tensor]"
    for plan in ("tensor=4", "data=2 tensor=2 zero=3"):
        report = plait.verify(experts(), hf_loss, text(4), plan)
        assert report.ok, report


# At their real widths, one layer each, as on any number of layers; on the meta device.
FAMILIES: dict[str, dict[str, object]] = {
    "Llama": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "Qwen2": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
    "Qwen3": {"hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8},
    "Mistral": {},
    "Gemma2": {},
    "Phi": {},
    "GPTJ": {"n_layer": 1},
    "GPTNeoX": {},
    "Olmo2": {},
    "Cohere": {},
    "StableLm": {},
    "SmolLM3": {"pad_token_id": 0},
    "Falcon": {"hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True},
    "Glm": {"pad_token_id": 0},
    "Mixtral": {},
    "Qwen2Moe": {},
    "GptOss": {"num_local_experts": 8},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_almost_all_of_real_models_is_split(name: str) -> None:
    layers = {} if "n_layer" in FAMILIES[name] else {"num_hidden_layers": 1}
    config = getattr(hf, f"{name}Config")(**{"vocab_size": 32000, "use_cache": False, **layers, **FAMILIES[name]})
    with torch.device("meta"):
        model = getattr(hf, f"{name}ForCausalLM")._from_config(config).train()
    share = lowered(model, "tensor=2", hf_loss, rows=2).share
    assert share is not None and share.parameters > 0.99 and share.flops > 0.95, share


class Unsplit(nn.Module):
    """Every width of what the first layer gives goes through a sort."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).sort(-1).values)


def test_the_user_is_told_what_stays_whole_and_why() -> None:
    found = lowered(Decoder(Unsplit(), Unsplit(), Attention(4)), "tensor=2")
    assert found.share is not None
    assert 0.3 < found.share.parameters < 0.8
    assert found.share.whole[0].name == "blocks.*.wide.weight" and found.share.whole[0].num == 2
    page = str(plait.explain(Decoder(Unsplit(), Attention(4)), loss_fn, text(4), "tensor=2"))
    line = next(line for line in page.splitlines() if line.startswith("tensor=2 splits"))
    assert "% of the parameters and " in line and "blocks.0.wide.weight (" in line
    assert "aten.sort.default in blocks.0 needs what it gives whole" in line
