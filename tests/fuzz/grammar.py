"""Models drawn from a grammar: values that print, and how they are made into a model, its loss and a batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import plait
from fuzz import blocks_any, blocks_chosen, blocks_image, blocks_sequence, blocks_video
from fuzz.batches import CONTAINERS, draw_leaves, pack
from fuzz.loss import Loss
from fuzz.model import Model
from fuzz.optimizers import OPTIMIZERS
from fuzz.shape import Shape

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
HOW = ("plain", "residual", "prenorm", "twice", "skip", "checkpoint")


@dataclass(frozen=True)
class Layer:
    """One layer: its class in the block files, its options, how it is called, and whether its weights are frozen."""

    name: str
    options: tuple[tuple[str, Any], ...]
    how: str = "plain"
    frozen: bool = False


@dataclass(frozen=True)
class Spec:
    """A model, its loss and its batch."""

    source: str  # ids, floats, image, video, vector
    rows: int
    length: int  # positions of a sequence, height of an image
    width: int
    out: int
    layers: tuple[Layer, ...]
    task: str
    form: str = "mean"
    extra: str = ""
    outputs: bool = False  # beside the loss
    dtype: str = "float64"
    channels_last: bool = False
    tied: bool = False
    frozen_embed: bool = False
    all_leaves: bool = False  # leaves in the batch that nothing reads
    container: str = "dict"
    autocast: str = ""  # within the loss
    optimizer: str = "sgd"
    clip_norm: float | None = None
    seed: int = 0

    @property
    def shape(self) -> Shape:
        """What the source gives to the first layer."""
        kind = {"ids": "sequence", "floats": "sequence"}.get(self.source, self.source)
        return Shape(kind, self.width, self.length if kind != "vector" else 1)

    @property
    def words(self) -> set[str]:
        """Its layers' names and options, and what else is chosen by name."""
        found = {self.source, self.dtype, self.task, self.form, self.extra, self.optimizer, self.container}
        found |= {word for layer in self.layers for word in (layer.name, layer.how)}
        return found | {value for layer in self.layers for _, value in layer.options if isinstance(value, str)}


@dataclass(frozen=True)
class Made:
    """What `plait.Verifier` is given."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Any]
    batch: Any
    optimizer: Any  # a function of the parameters, or pairs of pattern and function


def block(name: str) -> Any:
    """The class of a layer."""
    for module in (blocks_any, blocks_sequence, blocks_image, blocks_video, blocks_chosen):
        if hasattr(module, name):
            return getattr(module, name)
    raise KeyError(name)


def make(spec: Spec) -> Made:
    """The model in training mode, its loss function, a batch and the optimizer's factory; the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        layers = [(block(layer.name), dict(layer.options), layer.how, layer.frozen) for layer in spec.layers]
        model = Model(spec.source, spec.shape, layers, spec.out, spec.tied).to(DTYPES[spec.dtype])
        if spec.frozen_embed:
            model.embed.requires_grad_(False)
        if spec.channels_last:
            model = model.to(memory_format=_channels_last(spec.source))
        loss = Loss(spec.task, spec.form, spec.extra, spec.outputs, spec.autocast)
        loss.look_at(model, spec.out, DTYPES[spec.dtype])
        batch = make_batch(spec, model)
    return Made(model.train(), loss, batch, OPTIMIZERS[spec.optimizer])


def _channels_last(source: str) -> torch.memory_format:
    return torch.channels_last_3d if source == "video" else torch.channels_last


def make_batch(spec: Spec, model: nn.Module) -> Any:
    """Leaves that the model and its loss read, or all that there are."""
    dtype, rows = DTYPES[spec.dtype], spec.rows
    leaves = draw_leaves(spec.source, rows, spec.length, spec.out, dtype)
    if spec.channels_last and spec.source in ("image", "video"):
        leaves["x"] = leaves["x"].contiguous(memory_format=_channels_last(spec.source))
    with torch.no_grad():
        state = {n: b.clone() for n, b in model.named_buffers()}
        out = model(leaves)[0]
        for name, buffer in model.named_buffers():
            buffer.data = state[name]
    if spec.task in ("classify", "smooth"):
        shape = (out.shape[0], *out.shape[2:]) if out.dim() != 3 else out.shape[:2]
        y = torch.randint(0, spec.out, shape)
        if y.dim() > 1:  # labels that do not count, unevenly over rows
            y[torch.rand(shape) < torch.linspace(0, 0.6, rows).view(-1, *(1,) * (y.dim() - 1))] = -100
            y[:, 0] = 0
    else:
        y = torch.randn(out.shape, dtype=dtype)
    leaves["y"] = y
    read = {"x", "y", "weight"} if spec.form in ("weighted", "selected") else {"x", "y"}
    read |= {name for layer in spec.layers for name in getattr(block(layer.name), "reads", ())}
    every = spec.all_leaves or spec.container == "tuple"
    return pack({name: leaf for name, leaf in leaves.items() if every or name in read}, spec.container)


def draw(rng: random.Random) -> Spec:
    """A model that runs on one device: what does not is drawn again."""
    for _ in range(50):
        spec = _draw(rng)
        if runs(spec):
            return spec
    raise AssertionError("50 drawn models do not run in plain PyTorch: the grammar is wrong")


def runs(spec: Spec) -> bool:
    """Whether a step of the model in plain PyTorch ends with finite numbers."""
    halves = spec.dtype == "bfloat16" or spec.autocast
    if halves and any(layer.name == "Quantised" for layer in spec.layers):
        return False  # the nearest entry is another one by rounding
    try:
        made = make(spec)
        loss = made.loss_fn(made.model, made.batch)
        loss = loss[0] if spec.outputs else loss
        loss = loss.mean if isinstance(loss, plait.Weighted) else loss
        loss.backward()
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return False
    gradients = [p.grad for p in made.model.parameters() if p.grad is not None]
    return bool(loss.isfinite()) and bool(gradients) and all(bool(g.isfinite().all()) for g in gradients)


def _draw(rng: random.Random) -> Spec:
    source = rng.choices(["ids", "floats", "image", "vector", "video"], [4, 2, 2.5, 2, 0.8])[0]
    width = rng.choice([8, 8, 12, 16, 16, 24, 32])
    length = rng.choice({"image": [4, 6, 8], "video": [2, 4, 4]}.get(source, [3, 4, 5, 6, 8]))
    rows = rng.choice([4, 5, 6, 8, 8, 8, 8, 12])
    shape = Spec(source, rows, length, width, 8, (), "regress").shape
    layers: list[Layer] = []
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4, 5])):
        layer = _draw_layer(rng, shape)
        try:
            out_shape = block(layer.name)(shape, **dict(layer.options)).out_shape
        except (RuntimeError, ValueError, AssertionError, ZeroDivisionError):
            continue
        if out_shape.length < 1 or out_shape.length > 40:
            continue
        layers.append(layer)
        shape = out_shape
    tasks = [
        "classify",
        "classify",
        "classify",
        "regress",
        "smooth",
        "binary",
        "distil",
        "huber",
        "contrast",
        "pairs",
        "cosine",
    ]
    extras = [""] * 8 + ["decay", "spread", "inner", "weight", "teacher", "target", "centre", "logged"]
    extras += ["penalty"] if source != "ids" else []
    dtype = rng.choices(["float64", "float32", "bfloat16"], [8, 2, 1])[0]
    return Spec(
        source, rows, length, width, rng.choice([4, 6, 8, 16]), tuple(layers),
        task=rng.choice(tasks),
        form=rng.choice(["mean", "mean", "mean", "weighted", "weighted", "selected"]),
        extra=rng.choice(extras),
        outputs=rng.random() < 0.15,
        dtype=dtype,
        channels_last=source in ("image", "video") and rng.random() < 0.4,
        tied=rng.random() < 0.3,
        frozen_embed=rng.random() < 0.1,
        all_leaves=rng.random() < 0.2,
        container=rng.choice(CONTAINERS) if rng.random() < 0.25 else "dict",
        autocast=rng.choice(["bfloat16", "float16"]) if rng.random() < (0.25 if dtype == "float32" else 0.02) else "",
        optimizer=rng.choice(list(OPTIMIZERS)) if rng.random() < 0.5 else "sgd",
        clip_norm=rng.choice([None, None, None, 0.05]),
        seed=rng.randrange(10**6),
    )  # fmt: skip


def _draw_layer(rng: random.Random, shape: Shape) -> Layer:
    table = TABLES[shape.kind]
    weights = [weight for weight, _, _ in table]
    _, name, options = rng.choices(table, weights)[0]
    how = rng.choices(HOW, [4, 4, 4, 1, 1, 0.5])[0]
    return Layer(name, tuple(options(rng, shape).items()), how, rng.random() < 0.06)


Options = Callable[[random.Random, Shape], dict[str, Any]]
Row = tuple[float, str, Options]


def _heads(rng: random.Random, shape: Shape, even: bool = False) -> int:
    fits = [h for h in (1, 2, 3, 4, 6, 8) if shape.width % h == 0 and (not even or shape.width // h % 4 == 0)]
    return rng.choice(fits or [1])


def _choices(**of: Any) -> Options:
    """Options of which each is drawn from its list."""
    return lambda rng, shape: {name: rng.choice(values) for name, values in of.items()}


def _attention(rng: random.Random, shape: Shape) -> dict[str, Any]:
    positions = rng.choice(["none", "none", "half", "pairs", "complex", "partial", "alibi", "t5"])
    heads = _heads(rng, shape, positions in ("half", "pairs", "complex", "partial"))
    kv_heads = rng.choice([h for h in (1, 2, 3, 4, 6, 8) if heads % h == 0 and h <= heads])
    spellings = ["separate", "separate", "half", "split", "grouped"]
    if kv_heads == heads:
        spellings += ["three", "by head"]
    return {
        "heads": heads, "kv_heads": kv_heads, "qkv": rng.choice(spellings), "positions": positions,
        "mask": rng.choice(["none", "causal", "causal", "buffer", "sliding", "padding", "both"]),
        "product": rng.choice(["sdpa", "sdpa", "grouped", "expand", "manual", "einsum", "softcap"]),
        "dropout": rng.choice([0.0, 0.0, 0.2]), "bias": rng.random() < 0.5, "norm": rng.random() < 0.25,
    }  # fmt: skip


def _with_heads(**of: Any) -> Options:
    return lambda rng, shape: {"heads": _heads(rng, shape), **{n: rng.choice(v) for n, v in of.items()}}


def _conv(rng: random.Random, shape: Shape) -> dict[str, Any]:
    groups = rng.choice([1, 1, 1, 2, shape.width])
    out = shape.width if groups == shape.width else rng.choice([shape.width, shape.width, 8, 16])
    return {
        "out": out, "kernel": rng.choice([1, 3, 3]), "stride": rng.choice([1, 1, 1, 2]), "groups": groups,
        "mode": rng.choice(["zeros", "zeros", "zeros", "reflect", "circular"]), "bias": rng.random() < 0.6,
        "activation": rng.choice(["relu", "gelu", "silu"]),
    }  # fmt: skip


_DROP = [0.0, 0.0, 0.2]
_MLP: Row = (3, "MLP", _choices(
    inner=[8, 16, 24, 32], activation=["gelu", "relu", "silu", "tanh", "mish"],
    gate=["none", "none", "separate", "chunk", "interleaved"], bias=[True, False], dropout=_DROP,
))  # fmt: skip
_KINDS = ["layer", "rms", "rms by hand", "group", "instance", "batch", "batch", "mean"]
ANY: list[Row] = [
    _MLP,
    (2, "Norm", _choices(kind=_KINDS, affine=[True, True, False], running=[True, True, False])),
    (1, "Linear", _choices(out=[8, 12, 16, 24], normed=["", "", "", "weight", "spectral"])),
    (0.5, "LowRank", _choices(rank=[2, 4])),
    (0.7, "Activation",
     _choices(kind=["prelu", "leaky", "hardswish", "softplus", "mish", "celu", "tanh", "softmax"])),
    (1, "Noise", _choices(kind=["rows", "bernoulli", "normal", "channels", "elements", "alpha"])),
    (1, "Memory", _choices(kind=["ema", "assigned", "largest", "lerp"], read=[True, False])),
    (0.5, "Scaled", _choices(kind=["scalar", "channels", "unused"])),
    (0.6, "Conditioned", _choices(zero=[True, False])),
    (0.4, "Variational", _choices(inner=[4, 6], aux=[True, False])),
    (0.4, "Quantised", _choices(entries=[4, 6], ema=[True, False])),
    (0.8, "Selected", _choices(kind=["index", "scatter", "add", "mean", "bias"], rows=[True, False])),
    (0.5, "Numbered", _choices(kind=["divide", "count", "both"])),
]  # fmt: skip
SEQUENCE: list[Row] = [
    *ANY,
    (7, "Attention", _attention),
    (1, "TorchAttention", _with_heads(
        cross=[True, False, False], mask=["none", "causal", "padding"], weights=[True, False], dropout=_DROP)),
    (1, "CrossAttention", _with_heads(fused=[True, False])),
    (0.7, "TorchEncoderLayer", _with_heads(norm_first=[True, False], activation=["relu", "gelu"], dropout=_DROP)),
    (0.4, "TorchDecoderLayer", _with_heads(dropout=_DROP)),
    (0.5, "LinearAttention", _with_heads()),
    (0.8, "Recurrent", _choices(
        kind=["LSTM", "GRU", "RNN"], layers=[1, 1, 2], both=[True, False, False], dropout=_DROP, first=[True, False])),
    (0.3, "RecurrentLoop", _choices(kind=["LSTMCell", "GRUCell", "RNNCell"])),
    (1.5, "Experts", lambda rng, shape: {
        "experts": rng.choice([2, 3, 4]), "chosen": rng.choice([1, 2, 2]),
        "spelling": rng.choice(["dense", "loop", "index_add", "einsum", "gather", "bmm", "batched", "hit", "hit"]),
        "balance": rng.random() < 0.4}),
    (0.7, "GroupedExperts", _choices(
        experts=[2, 3, 4], chosen=[1, 2], half=[True, False], sigmoid=[True, False])),
    (0.7, "ListedExperts", _choices(
        experts=[2, 3, 4], chosen=[1, 2], loop=["hit", "add", "index_add", "tokens", "places"],
        norm=[True, False, False], asks=[True, False])),
    (1, "Conv1d", lambda rng, shape: {
        "kernel": rng.choice([1, 2, 3]), "dilation": rng.choice([1, 1, 2]),
        "groups": rng.choice([1, 1, 2, shape.width]), "mode": rng.choice(["constant", "constant", "replicate"]),
        "causal": rng.random() < 0.5, "norm": rng.choice(["none", "none", "batch", "group"]),
        "gated": rng.random() < 0.3}),
    (1, "Positions", _choices(kind=["parameter", "embedding", "buffer", "sines"])),
    (0.4, "ClassToken", _choices(num=[1, 2], front=[True, False])),
    (1, "TokenMix", _choices(kind=["linear", "conv", "depthwise", "shift", "roll", "flip", "mean"])),
    (0.5, "Masked", _choices(kind=["zero", "fill", "token"])),
    (1, "Pool", _choices(kind=["mean", "max", "flat", "attention", "masked", "gather", "first", "last"])),
]  # fmt: skip
IMAGE: list[Row] = [
    *ANY,
    (5, "Conv", _conv),
    (0.7, "Up", _choices(kind=["transposed", "nearest", "bilinear", "shuffle"])),
    (0.7, "Down", _choices(kind=["max", "avg", "adaptive", "unshuffle"])),
    (0.5, "SqueezeExcite", _choices()),
    (0.7, "ConvNeXt", _choices()),
    (0.7, "SpatialAttention", _with_heads()),
    (1, "Bottleneck", _choices(inplace=[True, False])),
    (0.7, "Branches", _choices(join=["cat", "sum", "stack"])),
    (0.5, "InnerUNet", _choices()),
    (0.5, "ToChannelsLast", _choices(back=[True, False])),
    (1, "Patches", lambda rng, shape: {
        "kind": rng.choice(["conv", "flat", "unfold", "reshape"]), "width": rng.choice([8, 16])}),
    (1.2, "PoolImage", _choices(kind=["mean", "max", "flat", "adaptive"])),
]  # fmt: skip
VECTOR: list[Row] = [
    *ANY,
    (1, "Crossed", _choices(kind=["cross", "bilinear", "pairs", "gate"])),
    (0.7, "Bag", _choices(kind=["sum", "mean", "lookup"])),
]  # fmt: skip
VIDEO: list[Row] = [
    *ANY,
    (5, "Conv3d", lambda rng, shape: {
        "out": rng.choice([shape.width, shape.width, 8, 16]), "kernel": rng.choice([1, 3, 3]),
        "stride": rng.choice([1, 1, 2]), "groups": rng.choice([1, 1, 2]),
        "mode": rng.choice(["zeros", "zeros", "zeros", "circular"]), "apart": rng.random() < 0.25,
        "norm": rng.choice(["none", "none", "batch", "group", "instance"])}),
    (0.5, "Up3d", _choices(kind=["transposed", "nearest", "trilinear"])),
    (0.8, "Down3d", _choices(kind=["max", "avg"])),
    (0.5, "ToChannelsLast3d", _choices(back=[True, False])),
    (2, "PoolVideo", _choices(kind=["depth", "middle", "frames", "flat", "mean", "adaptive"])),
]  # fmt: skip
TABLES = {"sequence": SEQUENCE, "image": IMAGE, "video": VIDEO, "vector": VECTOR}
