"""tensor=: what it splits in models nobody prepared, and that the split step has the numbers of one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.backends.eager import collectives
from plait.backends.eager.passes import eager_graphs
from plait.comm.thread_world import run_ranks
from plait.compile.compiled import Compiled
from plait.engine.compiler import Captures, Compiler, LossFn
from plait.plan.plan import Plan
from plait.spec.mesh import Mesh

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
    check(of_few_heads(kv_heads, rows), plan)


@functools.cache
def of_few_heads(kv_heads: int, rows: int) -> plait.Verifier:
    torch.manual_seed(0)
    return plait.Verifier(Decoder(Attention(kv_heads), Attention(kv_heads)).double(), loss_fn, text(rows))


def check(verifier: plait.Verifier, *plans: str) -> None:
    for plan in plans:
        report = verifier.verify(plan, tolerance=1e-6)
        assert report.ok, report


def test_what_changes_its_placement_is_dense() -> None:
    """The backward of a layer norm reads the memory of the statistics it is given, whatever their strides are."""
    whole = torch.randn(4, 8, 6)
    frame = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)

    def rank(world: object) -> list[Tensor]:
        part = collectives.own_shard(world, whole, "tensor", 1, 2)
        column = collectives.own_shard(world, whole, "tensor", 2, 1)[:, :, :1].contiguous()
        gathered = collectives.all_gather(world, column, "tensor", 2, 1)
        return [part, gathered, collectives.own_shard(world, frame, "tensor", 1, 1)]

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


def test_fused_weights_of_unequal_blocks() -> None:
    torch.manual_seed(0)
    verifier = plait.Verifier(Decoder(Fused(), Fused()).double(), loss_fn, text(4))
    check(verifier, "tensor=2", "data=2 tensor=2 zero=3", "tensor=2 pipeline=2 micro=2")


def test_fused_weights_are_split_without_gathers() -> None:
    found = compiled(Decoder(Fused()), "tensor=2")
    assert whole_weights(found) == []
    assert str(found.program.layouts["blocks.0.fused.weight"]) == "f32[64@tensor/2+1+1, 32]"
    assert count(found, collectives.all_gather) + count(found, collectives.all_gather_start) == 0


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


def test_complex_rotary_positions_gather_nothing() -> None:
    torch.manual_seed(0)
    verifier = plait.Verifier(Decoder(Complex()), loss_fn, text(4))
    for plan in ("data=2", "tensor=2"):
        found = compiled_of(verifier, plan)
        assert (
            not found.without_rule
            and count(found, collectives.all_gather) + count(found, collectives.all_gather_start) == 0
        )
        report = verifier.verify(plan)
        assert report.ok, report


def compiled(model: nn.Module, plan: str, loss: LossFn = loss_fn, rows: int = 4) -> Compiled:
    return Compiler(Captures(model, loss), Plan.parse(plan)).compiled(text(rows))


def compiled_of(verifier: plait.Verifier, plan: str) -> Compiled:
    """What `verify` runs under the plan; one capture serves both."""
    return Compiler(verifier.captures, Plan.parse(plan)).compiled(verifier.batch)


def whole_weights(found: Compiled) -> list[str]:
    """Names of the matrices and tables of which every rank has all."""
    here = found.program.plan.mesh.coordinates(0)
    parameters = {i.name for i in found.program.captured.inputs if i.kind == "parameter"}
    layouts = {
        name: layout for name, layout in found.program.layouts.items() if name in parameters and len(layout.shape) > 1
    }
    return [name for name, each in layouts.items() if each.local_shape(found.program.plan.mesh, here) == each.shape]


def count(found: Compiled, op: object) -> int:
    return sum(node.target is op for node in eager_graphs(found.program)["alone"].nodes)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_keys_that_are_turned_are_split(kv_heads: int) -> None:
    found = compiled(Decoder(Attention(kv_heads), Attention(kv_heads)), "tensor=2")
    assert whole_weights(found) == []
    assert count(found, collectives.all_gather) + count(found, collectives.all_gather_start) == 0
    sums = count(found, collectives.all_reduce) + count(found, collectives.all_reduce_start)
    assert sums <= 2 * 2 + 6  # two a block; the table, the head, and the loss over the vocabulary


def test_a_norm_over_all_heads_is_a_small_sum() -> None:
    torch.manual_seed(0)
    verifier = plait.Verifier(Decoder(Attention(4, normed=True)).double(), loss_fn, text(4))
    found = compiled_of(verifier, "tensor=2")
    assert whole_weights(found) == []
    assert count(found, collectives.all_gather) + count(found, collectives.all_gather_start) == 0
    check(verifier, "tensor=4")


def hf_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(input_ids=batch["x"]).logits.flatten(0, 1), batch["y"].flatten())


def test_few_key_value_heads_of_a_fused_weight_are_gathered() -> None:
    config = hf.Phi3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    verifier = plait.Verifier(hf.Phi3ForCausalLM._from_config(config).train().double(), hf_loss, text(4))
    found = compiled_of(verifier, "tensor=4")
    assert str(found.program.layouts["model.layers.0.self_attn.qkv_proj.weight"]) == "f64[96@tensor/4+1+1, 64]"
    assert whole_weights(found) == [] and gathered_columns(found) == [16, 16]
    check(verifier, "tensor=4")


def gathered_columns(found: Compiled) -> list[int]:
    """The widths of the values that are gathered."""
    nodes = eager_graphs(found.program)["alone"].nodes
    whole = [node for node in nodes if node.target is collectives.all_gather]
    ended = [wait for node in nodes if node.target is collectives.all_gather_start for wait in node.users]
    return [node.meta["val"].shape[-1] for node in whole + ended]


class MultiQuery(nn.Module):
    """Queries of all heads, and keys and values of one, in one weight; taken apart by a split or by slices."""

    def __init__(self, slices: bool) -> None:
        super().__init__()
        self.slices, self.size = slices, WIDTH // HEADS
        self.fused, self.out = nn.Linear(WIDTH, WIDTH + 2 * self.size), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.fused(x)
        if self.slices:
            query, key, value = (
                fused[..., : -2 * self.size],
                fused[..., -2 * self.size : -self.size],
                fused[..., -self.size :],
            )
        else:
            query, key, value = fused.split([WIDTH, self.size, self.size], -1)
        query, key, value = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (query, key, value))
        scores = turned(query) @ turned(key).transpose(-1, -2)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("slices", [True, False])
def test_the_one_key_value_head_of_a_fused_weight_is_gathered(slices: bool) -> None:
    torch.manual_seed(0)
    verifier = plait.Verifier(Decoder(MultiQuery(slices), MultiQuery(slices)).double(), loss_fn, text(4))
    found = compiled_of(verifier, "tensor=4")
    assert whole_weights(found) == [] and gathered_columns(found) == [WIDTH // HEADS] * 4
    check(verifier, "tensor=4", "data=2 tensor=2 zero=3", "tensor=2 pipeline=2 micro=2")


def test_a_later_shape_of_batch_gathers_the_same() -> None:
    compiler = Compiler(Captures(Decoder(MultiQuery(False)), loss_fn), Plan.parse("tensor=4"))
    for length in (8, 6):
        assert gathered_columns(compiler.compiled(text(4, length))) == [WIDTH // HEADS] * 2


def test_a_table_of_odd_rows_is_cut_along_its_width() -> None:
    model = Decoder(Attention(HEADS)).double()
    model.symbols = nn.Embedding(VOCAB + 1, WIDTH).double()
    found = compiled(model, "tensor=4")
    assert str(found.program.layouts["symbols.weight"]) == f"f64[{VOCAB + 1}, {WIDTH}@tensor]"
    report = plait.verify(model, loss_fn, text(4), "tensor=4", tolerance=1e-6)
    assert report.ok, report
    model.head.weight = model.symbols.weight  # logits would be summed whole
    found = compiled(model, "tensor=4")
    assert found.share is not None
    assert found.share.whole[0].why == f"tensor=4 does not divide its {VOCAB + 1} rows"


class Conditioned(nn.Module):
    """Blocks whose scale, shift and gate come from one number of the sample (DiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.changes = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH)) for _ in range(2))
        self.attention = nn.ModuleList(Attention(HEADS) for _ in range(2))
        self.inner = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x, condition = self.start(x), condition[:, None] * torch.ones(WIDTH, dtype=x.dtype)
        for change, attention, inner, outer in zip(self.changes, self.attention, self.inner, self.outer, strict=True):
            shift, scale, gate, shift2, scale2, gate2 = change(condition)[:, None].chunk(6, -1)
            x = x + gate * attention(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)
            x = x + gate2 * outer(F.gelu(inner(F.layer_norm(x, (WIDTH,)) * (1 + scale2) + shift2)))
        return self.head(x)


def conditioned_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"], batch["t"]).square().mean()


def test_what_a_condition_changes_is_gathered_once() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 16, WIDTH).double(), "t": torch.rand(4).double()}
    verifier = plait.Verifier(Conditioned().double(), conditioned_loss, batch)
    found = compiled_of(verifier, "tensor=4")
    assert [name for name in whole_weights(found) if name not in ("start.weight", "head.weight")] == []
    assert gathered_columns(found) == [6 * WIDTH] * 2
    check(verifier, "tensor=4", "data=2 tensor=2", "tensor=2 pipeline=2 micro=2")


def mamba(groups: int) -> nn.Module:
    torch.manual_seed(0)
    config = hf.Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, num_heads=8, head_dim=8, state_size=4, n_groups=groups, chunk_size=4,
        num_hidden_layers=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return hf.Mamba2ForCausalLM._from_config(config).train()


@pytest.mark.parametrize(("groups", "plan"), [(4, "tensor=4"), (1, "tensor=2")])
def test_the_fused_projection_of_a_state_space_is_split(groups: int, plan: str) -> None:
    verifier = plait.Verifier(mamba(groups).double(), hf_loss, text(4))
    found = compiled_of(verifier, plan)
    assert "backbone.layers.0.mixer.in_proj.weight" not in whole_weights(found)
    check(verifier, plan)


def experts() -> nn.Module:
    torch.manual_seed(0)
    config = hf.MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return hf.MixtralForCausalLM._from_config(config).train()


def test_experts_are_split_inside() -> None:
    verifier = plait.Verifier(experts(), hf_loss, text(4))
    found = compiled_of(verifier, "tensor=2")
    assert whole_weights(found) == ["model.layers.0.mlp.gate.weight"]
    assert str(found.program.layouts["model.layers.0.mlp.experts.gate_up_proj"]) == "f32[4, 96@tensor/2, 32]"
    assert str(found.program.layouts["model.layers.0.mlp.experts.down_proj"]) == "f32[4, 32, 48@tensor]"
    for plan in ("tensor=4", "data=2 tensor=2 zero=3"):
        report = verifier.verify(plan)
        assert report.ok, report
    model = experts().double()
    model.set_experts_implementation("batched_mm")  # the grouped product has no float64
    report = plait.verify(model, hf_loss, text(4), "tensor=4", tolerance=1e-6)
    assert report.ok, report


def test_experts_of_few_columns_a_rank_are_split() -> None:
    """PyTorch's grouped product wants rows of 16 bytes, which 48 columns in bfloat16 cut by four have not."""
    verifier = plait.Verifier(experts().bfloat16(), hf_loss, text(4))
    report = verifier.verify("tensor=4")
    assert report.ok, report
    assert "model.layers.0.mlp.experts.gate_up_proj" not in whole_weights(compiled_of(verifier, "tensor=4"))


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
    "GPTBigCode": {"vocab_size": 49152, "n_embd": 6144, "n_head": 48, "n_layer": 1},
    "Bert": {"vocab_size": 30522},
    "Mamba2": {"n_groups": 8},
    "DeepseekV3": {"first_k_dense_replace": 0, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    "Mixtral": {},
    "Qwen2Moe": {},
    "GptOss": {"num_local_experts": 8},
}

MEGATRON_KEEPS = (
    "_a_proj",
    "position_embeddings",
    "wpe",
    "transform.dense",
)  # whole: low ranks, positions, BERT's head


@pytest.mark.parametrize("name", FAMILIES)
def test_almost_all_of_real_models_is_split(name: str) -> None:
    layers = {} if "n_layer" in FAMILIES[name] else {"num_hidden_layers": 1}
    config = getattr(hf, f"{name}Config")(**{"vocab_size": 32000, "use_cache": False, **layers, **FAMILIES[name]})
    with torch.device("meta"):
        model = getattr(hf, f"{name}For{'MaskedLM' if name == 'Bert' else 'CausalLM'}")._from_config(config).train()
    share = compiled(model, "tensor=2", hf_loss, rows=2).share
    assert share is not None and share.flops > 0.95, share
    assert sum(each.share for each in share.whole if not any(name in each.name for name in MEGATRON_KEEPS)) < 0.01, (
        share
    )


class Odd(nn.Module):
    """Attention over heads that are the inner dim of what the fused weight gives, normed over all heads together."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.fused(x).split(WIDTH, -1)
        projected = self.norms[0](query), self.norms[1](key), value
        heads = (part.unflatten(-1, (-1, HEADS)).permute(0, 3, 1, 2) for part in projected)
        return self.out(F.scaled_dot_product_attention(*heads).permute(0, 2, 3, 1).flatten(2))


def test_inner_heads_and_layer_norms_over_all_of_them() -> None:
    torch.manual_seed(0)
    verifier = plait.Verifier(Decoder(Odd()).double(), loss_fn, text(4))
    found = compiled_of(verifier, "tensor=4")
    assert whole_weights(found) == []
    assert max(gathered_columns(found), default=0) <= WIDTH  # gradients of the norms
    check(verifier, "tensor=4", "data=2 tensor=2")


class Unsplit(nn.Module):
    """Every width of what the first layer gives goes through a sort."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).sort(-1).values)


def test_the_user_is_told_what_stays_whole_and_why() -> None:
    found = compiled(Decoder(Unsplit(), Unsplit(), Attention(4)), "tensor=2")
    assert found.share is not None
    assert 0.3 < found.share.parameters < 0.8
    assert found.share.whole[0].name == "blocks.*.wide.weight" and found.share.whole[0].num == 2
    page = str(plait.explain(Decoder(Unsplit(), Attention(4)), loss_fn, text(4), "tensor=2"))
    line = next(line for line in page.splitlines() if line.startswith("tensor=2 splits"))
    assert "% of the parameters and " in line and "blocks.0.wide.weight (" in line
    assert "aten.sort.default in blocks.0 needs its whole output" in line


class Delta(nn.Module):
    """A state that each position decays, corrects and adds to, as in RWKV-7, in a loop over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(5))
        self.norm, self.out = nn.GroupNorm(4, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, positions, width = x.shape
        read, key, value, decay, rate = (one(x).view(rows, positions, 4, 8) for one in self.given)
        unit, decay, rate = F.normalize(key, dim=-1), decay.sigmoid(), rate.sigmoid()
        key = key * (1 + (rate - 1) * 0.5)
        state, found = x.new_zeros(rows, 4, 8, 8), []
        for t in range(positions):
            corrected = state @ (-unit[:, t])[..., None] @ (unit[:, t] * rate[:, t])[..., None, :]
            state = state * decay[:, t, :, None, :] + corrected + value[:, t][..., None] @ key[:, t][..., None, :]
            found.append((state @ read[:, t][..., None]).squeeze(-1))
        y = self.norm(torch.stack(found, 1).reshape(-1, width)).view(x.shape)
        return self.out(y + ((read * key).sum(-1, keepdim=True) * value).reshape(x.shape))  # type: ignore[no-any-return]


def test_a_search_through_a_long_loop_ends() -> None:
    """Each of its values may be sharded because a reader wants it so, and whole again because another does not."""
    model = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), Delta()) for _ in range(2))

    def loss(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = x + layer(x)
        return x.square().mean()

    found = Compiler(Captures(model, loss), Plan.parse("tensor=2")).compiled(torch.randn(2, 16, 32))
    assert found.share is not None and found.share.parameters > 0


BAGS = ({"mode": "max", "padding_idx": 2}, {"mode": "mean", "padding_idx": -3}, {"mode": "sum"})


@pytest.mark.parametrize("options", BAGS, ids=str)
@pytest.mark.parametrize("by_offsets", [False, True])
def test_bags_are_split_over_rows_columns_and_tables(options: dict[str, Any], by_offsets: bool) -> None:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(6, 4, dtype=torch.float64, **options)
    ids = torch.tensor([[2, 2, 3], [1, 2, 5], [4, 4, 0], [3, 2, 1]])
    batch = {"ids": ids.view(-1), "offsets": torch.tensor([0, 2, 2, 5])} if by_offsets else {"ids": ids}
    verifier = plait.Verifier(model, lambda m, b: m(b["ids"], b.get("offsets")).square().mean(), batch, steps=1)
    if by_offsets and options["mode"] == "max":
        with pytest.warns(UserWarning, match="no rule for aten._embedding_bag"):
            assert verifier.verify("data=2").ok
        return
    for plan, layout in (("data=2 tensor=2", "-, tensor"), ("tensor=2", "tensor, -")):
        assert verifier.verify(plan, layouts={"weight": layout}).ok
