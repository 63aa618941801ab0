"""Plans drawn at random: every key there is, up to eight ranks, most of them legal for the model."""

from __future__ import annotations

import random

from fuzz import texts
from fuzz.grammar import Spec, make
from plait.plan.key_values import SCHEDULE_NAMES

AXES = ("tensor", "data")
_SIMPLE = (
    "data=2", "tensor=2", "data=4", "tensor=4", "data=2 tensor=2", "pipeline=2 micro=2", "data=2 zero=1",
    "data=2 zero=3", "micro=2", "data=2 micro=2", "tensor=2 micro=2", "pipeline=2 data=2 micro=2",
    "data=2 zero=2 recompute=layer",
)  # fmt: skip


def draw(rng: random.Random, spec: Spec) -> str:
    """A plan's text; a third are simple ones, which must not be lost among the rest."""
    if rng.random() < 0.3:
        return rng.choice(_SIMPLE)
    while True:
        words = _draw(rng, spec)
        if words:
            layouts = _layouts(rng, words, spec) if rng.random() < 0.12 else {}
            return texts.join(" ".join(f"{key}={value}" for key, value in words.items()), layouts)


def _layouts(rng: random.Random, words: dict[str, str], spec: Spec) -> dict[str, str]:
    """Layouts by hand of a few parameters: cut in blocks or not, whole, or on one rank; most of them divide."""
    axes = {axis: int(words[axis]) for axis in ("tensor", "tensor", "data") if axis in words}
    shapes = [(name, tuple(p.shape)) for name, p in make(spec).model.named_parameters()]
    found: dict[str, str] = {}
    for name, shape in rng.sample(shapes, min(rng.choice([1, 2, 3]), len(shapes))) if axes else ():
        axis = rng.choice(list(axes))
        size, kind = axes[axis], rng.random()
        pattern = name if rng.random() < 0.7 else f"*{name[name.find('.') :]}"
        if kind < 0.1:
            found[pattern] = f"only:{axis}={rng.randrange(size)}"
        elif kind < 0.2 or not shape:
            found[pattern] = "-"
        else:
            places = [
                (dim, blocks)
                for dim, length in enumerate(shape)
                for blocks in (1, 2, 3)
                if length % (blocks * size) == 0
            ] or [(0, 1)]
            dim, blocks = rng.choice(places)
            word = axis + (f"/{blocks}" if blocks > 1 else "")
            found[pattern] = ", ".join(word if place == dim else "-" for place in range(len(shape)))
    return found


def _draw(rng: random.Random, spec: Spec) -> dict[str, str]:
    words: dict[str, str] = {}
    kind = rng.choices(["axes", "pipeline", "stages", "replicas", "servers"], [8, 7, 1, 3, 1])[0]
    room = 8
    micro = rng.choice([1, 1, 2, 2, 3, 4])
    if kind == "servers":
        return _servers(rng, spec)
    if kind == "stages":
        inner, num = rng.choice([2, 2, 3]), rng.choice([2, 2, 3])
        words["stages"] = f"[{'|'.join(f'{rng.choice(AXES)}={inner}' for _ in range(num))}]"
        room = max(8 // (inner * num), 1)
        micro = rng.choice([1, 2, 2, 4])
    elif kind == "pipeline":
        room = _pipeline(rng, words, room)
        micro = rng.choice([1, 2, 2, 3, 4, 4, 6])
    rows = spec.rows
    for key in rng.sample(("data", "tensor", "replica"), 3):
        size = rng.choice([s for s in (1, 1, 2, 2, 3, 4, 8) if s <= room])
        if key == "tensor" and kind == "stages":
            continue
        if key != "tensor" and rows % (size * micro) and rng.random() < 0.9:
            continue
        if size > 1:
            words[key], room = str(size), room // size
            if key != "tensor":
                rows //= size
    if rng.random() < (0.6 if any("Experts" in layer.name for layer in spec.layers) else 0.03):
        _experts(rng, words)
    if rows % micro and rng.random() < 0.9:
        micro = 1
    if micro > 1:
        words["micro"] = str(micro)
    if kind == "replicas":
        _replicas(rng, words)
    if spec.source in ("ids", "floats"):
        _sequence(rng, words, spec, room)
    _memory(rng, words)
    _numbers(rng, words, spec)
    if rng.random() > 0.997:  # compiling takes seconds a region; scripts/fuzz --compiler gives it to all plans
        words["compile"] = "inductor"
        words |= rng.choice([{}, {"compile.layers.0": "none"}, {"cudagraphs": "yes"}])
    return words


def _experts(rng: random.Random, words: dict[str, str]) -> None:
    """Ranks of data that each have a part of the experts."""
    sizes = [size for size in (2, 3, 4) if int(words.get("data", "1")) % size == 0]
    if sizes:
        words["expert"] = str(rng.choice(sizes))
        if rng.random() < 0.2:
            words["expert.capacity"] = "100"  # room for all


def _sequence(rng: random.Random, words: dict[str, str], spec: Spec, room: int) -> None:
    """Keys that cut the sequence."""
    sizes = [size for size in (2, 2, 3, 4) if size <= room and (spec.length % size == 0 or rng.random() < 0.1)]
    if sizes and rng.random() < 0.2:
        words["context"] = str(rng.choice(sizes))
        if rng.random() < 0.6:
            words["context.kind"] = rng.choice(["ring", "ring", "ulysses", "gather"])
    if "tensor" in words and rng.random() < 0.35:
        words["sequence"] = "yes"
    if rng.random() < 0.12:
        words["shapes"] = f"bucket:{rng.choice([1, 4, 6, 8, spec.length])}"
        if random.Random(str(words)).random() < 0.2:  # other keys are drawn as they were without it
            words["shapes.limit"] = "1"


def _pipeline(rng: random.Random, words: dict[str, str], room: int) -> int:
    """A pipeline with its schedule; the ranks that are left for other axes."""
    stages = rng.choice([2, 2, 2, 3, 4])
    if rng.random() < 0.12:
        copies = [rng.choice([1, 2]) for _ in range(rng.choice([2, 3]))]
        words["pipeline"] = f"[{','.join(map(str, copies))}]"
        return room // sum(copies)
    words["pipeline"] = str(stages)
    if rng.random() < 0.7:
        words["schedule"] = rng.choice(SCHEDULE_NAMES)
        if rng.random() < 0.12:  # one of the user's own: of that family, in another order
            words["schedule"] = f"./{words['schedule']}~{rng.randrange(100)}"
        if words["schedule"] in ("interleaved", "looped-bfs") and rng.random() < 0.4:
            words["chunks"] = rng.choice(["1", "2", "3"])
    elif rng.random() < 0.15:
        words["cut"] = ",".join(f"layers.{place}" for place in range(1, stages))
    return room // stages


def _memory(rng: random.Random, words: dict[str, str]) -> None:
    if "data" in words and rng.random() < 0.5:
        words["zero"] = rng.choice(["1", "2", "3", "3"])
    elif "data" in words and rng.random() < 0.1:
        words["central"] = "host"
    if rng.random() < 0.25:
        words["recompute"] = rng.choice(["layer", "layer", "gathers", "layers.0", "layers.*", "*.out", "budget=2KiB"])
    if rng.random() < 0.1:
        for key in rng.sample(["home.optimizer", "home.parameters", "home.activations"], rng.choice([1, 1, 2])):
            words[key] = rng.choice(["host", "disk"])
    if rng.random() < 0.2:
        words["bucket"] = rng.choice(["64B", "1KiB", "1MiB"])
    if rng.random() < 0.15:
        words["allreduce"] = rng.choice(["ring", "naive", "backend"])


def _numbers(rng: random.Random, words: dict[str, str], spec: Spec) -> None:
    """Keys that change what is computed: precision, and whose rows batch norm sees."""
    if rng.random() < (0.25 if spec.dtype == "float32" else 0.04):
        words["precision"] = rng.choice(["bf16", "fp16", "bf16-params", "bf16-params", "fp16-params"])
        if rng.random() < 0.3:
            words[f"precision.{rng.choice(['layers.0', 'layers.*', 'head', 'norms.*'])}"] = rng.choice(
                ["fp32", "fp32", "bf16"]
            )
    elif spec.dtype == "float32" and rng.random() < 0.08:
        words["precision.layers.0"] = rng.choice(["bf16", "fp16"])
    if rng.random() < (0.3 if "precision" in words else 0.03):
        words["reduce"] = "bf16"
    draws = any(layer.name == "Noise" or dict(layer.options).get("dropout") for layer in spec.layers)
    if not draws and rng.random() < 0.06:
        words["batchnorm"] = "local"


def _replicas(rng: random.Random, words: dict[str, str]) -> None:
    """Replicas that agree later, or through a compressor."""
    if not {"data", "replica"} & words.keys():
        words["data"] = "2"
    if rng.random() < 0.7:
        words["sync"] = rng.choice(["2", "2", "3", "2..4"])
        if rng.random() < 0.6:
            words["outer"] = rng.choice(["sgd", "nesterov"])
            if rng.random() < 0.3:
                words["outer.lr"] = rng.choice(["0.5", "1"])
            if rng.random() < 0.3:
                words["outer.momentum"] = rng.choice(["0", "0.5"])
            if rng.random() < 0.3:
                words["streaming"] = rng.choice(["2", "2", "3"])
            if rng.random() < 0.3:
                words["overlap"] = rng.choice(["1", "1", "2"])
        if rng.random() < 0.3:
            words["moments"] = rng.choice(["kept", "averaged", "reset"])
    if "sync" not in words or rng.random() < 0.3:
        words["compress"] = rng.choice(
            ["bf16", "fp8", "int8", "int4", "topk:0.1", "topk:0.5", "powersgd:1", "powersgd:2"]
        )
        if rng.random() < 0.2:
            words["compress.*.bias"] = "none"


def _servers(rng: random.Random, spec: Spec) -> dict[str, str]:
    words = {"workers": rng.choice(["1", "2", "2", "3"]), "servers": rng.choice(["1", "1", "2"])}
    if rng.random() < 0.5:
        words["staleness"] = rng.choice(["0", "0", "1", "2", "none"])
    if words.get("staleness") == "0":
        if words["workers"] != "1" and rng.random() < 0.3:
            words["backup"] = "1"
        elif rng.random() < 0.4:
            words["sync"] = "2"
            if rng.random() < 0.5:
                words["outer"] = rng.choice(["sgd", "nesterov"])
    elif rng.random() < 0.3:
        words["overlap"] = "1"
    if rng.random() < 0.3:
        words["compress"] = rng.choice(["bf16", "fp8", "int8", "int4", "topk:0.1", "powersgd:1"])
        if rng.random() < 0.2:
            words["compress.*.bias"] = "none"
    if rng.random() < 0.3:
        words[rng.choice(["data", "tensor", "pipeline", "micro"])] = "2"
    return words
