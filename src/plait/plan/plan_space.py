"""All plans that a search looks through: what divides ranks, rows, layers and heads, within limits that a user sets.

    PlanSpace(...).outlines()          how ranks are spread, microbatches, recomputation, precision
        .states(outline)               what ZeRO cuts over how many ranks, replicas that agree later
        .homes                         where states and activations are kept
        .schedules(outline)            the order of a pipeline, and its chunks
    plan_of(parallelism)               the plan that says so

These are apart because the time of a layer depends on the first alone, and sums of gradients on the first two. An axis
that is worth a search has a line in `_meshes`; a key has its values in one of the functions below.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from plait.errors import PlanError
from plait.plan.key_values import Bytes, Recompute
from plait.plan.parallelism import BUDGET, FULL, NONE, ON_DEVICE, Homes, LaterSync, Parallelism
from plait.plan.plan import Plan
from plait.plan.sharding_plan import DISK, HOST, ZERO_STAGES, ZeroStage

# The keys that a search chooses, in the order in which messages list them.
SEARCHED_KEYS = (
    "data", "replica", "expert", "expert.capacity", "tensor", "sequence", "context", "pipeline", "schedule", "chunks",
    "zero", "micro", "recompute", "precision", "bucket", "home.parameters", "home.activations", "home.optimizer",
    "sync", "compress",
)  # fmt: skip

SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
_CHUNKS = {"interleaved": (2, 3, 4, 5, 6, 8), "looped-bfs": (2, 4), "zb-v": (2,), "dualpipe-v": (2,)}
_MOST_CHUNKS = 16
SYNC_STEPS = (8, 16, 32, 64, 128, 256, 512)  # DiLoCo's is 500 (Douillard et al. 2023)
_HOMES = (
    ON_DEVICE,
    Homes(activations=HOST),
    Homes(optimizer=HOST),
    Homes(activations=HOST, optimizer=HOST),
    Homes(parameters=HOST, optimizer=HOST),
    Homes(HOST, HOST, HOST),
    Homes(parameters=HOST, optimizer=DISK),
    Homes(HOST, HOST, DISK),
)
_PER_ELEMENT = {"none": (4.0, 8.0), "int8": (1 + 4 / 256, 12.0), "int4": (0.5 + 4 / 256, 12.0)}  # sent, and kept

_MICRO_A_RANK = 64  # microbatches for each rank of a pipeline, unless they have few rows
_FEW_ROWS = 8
MOST_ROWS = 10**9  # of a global batch; more is a slip
_MOST_SIZES = 10  # of the batch

# Keys of which fewer words are searched than a plan may have.
_SEARCHED_WORDS = {"schedule": SCHEDULES, "recompute": ("none", "layer", "budget"), "compress": tuple(_PER_ELEMENT)}


@dataclass(frozen=True)
class Limits:
    """What a user allows of the values of keys: `tensor=1..8 zero=1,3 sync=1`.

    `values` has, by key, words and ranges; a key that is not there may have any value.
    """

    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Read limits. Raises PlanError for a word that cannot be read, a key or a word that is not searched, a value
        that no plan has, and a key that is given twice."""
        found: dict[str, tuple[str, ...]] = {}
        for word in text.split():
            key, equals, value = word.partition("=")
            if not equals or not value:
                raise PlanError(
                    f"cannot read {word!r} of the limits {text!r}; a limit is a key with its values, like tensor=1..8"
                    " or zero=1,3"
                )
            if key not in SEARCHED_KEYS:
                near = difflib.get_close_matches(key, SEARCHED_KEYS, n=2)
                hint = f"did you mean {' or '.join(near)}? " if near else ""
                raise PlanError(f"{key!r} is not searched; {hint}the keys are {', '.join(SEARCHED_KEYS)}")
            if key in found:
                raise PlanError(f"{key} is given twice in the limits {text!r}; give it once, like {key}=1,2")
            found[key] = tuple(value.split(","))
            for each in found[key]:
                low, dots, high = each.partition("..")
                if dots and not (low.isdecimal() and high.isdecimal() and int(low) <= int(high)):
                    raise PlanError(f"cannot read {word!r}; a range is like {key}=1..8")
                if not dots:
                    _check_value(key, each, word)
        made = cls(found)
        made.sizes("bucket")
        made.numbers("expert.capacity")
        return made

    def allow(self, key: str, value: object) -> bool:
        """Whether the key may have this value."""
        if key not in self.values:
            return True
        shown = str(value)
        for each in self.values[key]:
            low, dots, high = each.partition("..")
            if shown == each or (dots and shown.isdecimal() and int(low) <= int(shown) <= int(high)):
                return True
        return False

    def __str__(self) -> str:
        return " ".join(f"{key}={','.join(words)}" for key, words in self.values.items())

    def fixes(self, key: str, value: object) -> bool:
        """Whether the key may have this value alone."""
        return self.values.get(key) == (str(value),)

    def numbers(self, key: str) -> tuple[float, ...]:
        """The named values of a key that are numbers. Raises PlanError for another one."""
        try:
            return tuple(float(word) for word in self.names(key))
        except ValueError:
            raise PlanError(f"cannot read the limit {key}={','.join(self.names(key))}: it is a number") from None

    def names(self, key: str) -> tuple[str, ...]:
        """The values of a key that are named; () if it may have any."""
        return self.values.get(key, ())

    def sizes(self, key: str) -> tuple[int, ...]:
        """The named values of a key, in bytes. Raises PlanError for one that is no size."""
        try:
            return tuple(int(Bytes().parse(word)) for word in self.names(key))
        except ValueError as error:
            raise PlanError(f"cannot read the limit {key}={','.join(self.names(key))}: {error}") from None


NO_LIMITS = Limits()


class ProbePlans(NamedTuple):
    """Plans of two ranks, one for each way to spread a model, by which a search learns what that way splits and sends.

    A field is None if the limits rule the way out. `rows` splits rows alone, to compare with.
    """

    weights: Plan | None
    sequence: Plan | None
    context: Plan | None
    stages: Plan | None
    experts: Plan | None
    rows: Plan


def probe_plans(limits: Limits, num_ranks: int) -> ProbePlans:
    """The plans of two ranks that the limits, and a cluster of so many ranks, allow."""

    def two(key: str, more: str = "") -> Plan | None:
        return None if num_ranks == 1 or limits.fixes(key, 1) else Plan.parse(f"{key}=2{more}")

    sequence = None if limits.fixes("sequence", "no") else two("tensor", " sequence=yes")
    return ProbePlans(two("tensor"), sequence, two("context"), two("pipeline"), two("expert"), Plan.parse("data=2"))


def _check_value(key: str, value: str, word: str) -> None:
    """Raise PlanError for a value of a limit that no plan of a search has."""
    searched = _SEARCHED_WORDS.get(key)
    if searched is not None:
        if value not in searched:
            raise PlanError(f"{value!r} of the limit {word!r} is not searched; {key} is one of {', '.join(searched)}")
        return
    try:
        Plan.check_value(key, value)
    except ValueError as error:
        raise PlanError(f"bad value {value!r} of the limit {word!r}: {error}") from None


class StateOption(NamedTuple):
    """How states are cut: by ZeRO over how many ranks; and replicas that agree later."""

    cuts: ZeroStage = ZERO_STAGES[0]
    sharded: int = 1
    later: LaterSync | None = None


class PlanChoice(NamedTuple):
    """One plan of a space, in the parts that were chosen one after the other."""

    outline: Parallelism
    states: StateOption
    homes: Homes
    schedule: str
    chunks: int

    @property
    def how(self) -> Parallelism:
        """The plan as numbers."""
        states = self.states
        return self.outline.having(
            cuts=states.cuts, sharded=states.sharded, later=states.later, homes=self.homes, schedule=self.schedule,
            chunks=self.chunks,
        )  # fmt: skip


@dataclass(frozen=True)
class PlanSpace:
    """What decides which plans are legal, as plain values.

    Attributes:
        num_ranks: of the plan.
        rows: sizes of the global batch to try.
        domains: ranks in a domain of each level of links, innermost first.
        layers: which a pipeline cuts.
        heads: which ranks that split weights divide, of queries and of keys.
        sequence: positions, which ranks of a context divide; 1 if there is no sequence.
        experts: of a layer, which ranks of experts divide; 1 if there are none.
        precisions: words of precision= to try.
        has_host: whether values can be kept outside the device.
        limits: what a user allows.
        splits_sequence: whether ranks that split weights can split sequences between them.
        repeats_layers: whether there are layers to recompute.
    """

    num_ranks: int
    rows: tuple[int, ...]
    domains: tuple[int, ...]
    layers: int
    heads: tuple[int, ...]
    sequence: int = 1
    precisions: tuple[str, ...] = ("fp32",)
    has_host: bool = False
    limits: Limits = NO_LIMITS
    experts: int = 1
    splits_sequence: bool = True
    repeats_layers: bool = True

    def outlines(self) -> Iterator[tuple[int, Parallelism]]:
        """(rows, how ranks are spread), without ZeRO, homes, replicas and schedules."""
        limits = self.limits
        precisions = limits.names("precision") or self.precisions
        kinds = [kind for word, kind in (("none", NONE), ("layer", FULL)) if limits.allow("recompute", word)]
        if not self.repeats_layers:
            kinds = [kind for kind in kinds if kind == NONE]
        elif "budget" in limits.names("recompute") and not kinds:
            kinds = [FULL]  # of which a candidate may get a budget
        for rows in self.rows:
            for mesh in self._meshes:
                if rows % mesh.batch:
                    continue
                for num_micro in self._micro(rows // mesh.batch, mesh.pipeline):
                    for recompute in kinds:
                        for precision in precisions:
                            yield (
                                rows,
                                mesh.having(num_micro=num_micro, recompute=recompute, precision=precision),
                            )

    def _micro(self, rows: int, pipeline: int) -> list[int]:
        """Numbers of microbatches for so many rows of a rank. More than 64 for each rank of a pipeline leave less than
        1/64 of a bubble, and are worth it only where a microbatch of few rows is what fits."""
        found = [num for num in divisors(rows) if self.limits.allow("micro", num)]
        if self.limits.names("micro"):
            return [num for num in found if pipeline > 1 or num <= _MICRO_A_RANK]
        few = _FEW_ROWS if pipeline > 1 else 0
        return [num for num in found if num <= _MICRO_A_RANK * pipeline or rows <= few * num]

    def allows_budget(self, outline: Parallelism) -> bool:
        """Whether a plan that repeats whole layers may get a budget instead."""
        return outline.recompute == FULL and self.limits.allow("recompute", "budget")

    @cached_property
    def _meshes(self) -> tuple[Parallelism, ...]:
        limits, found = self.limits, []
        for pipeline in divisors(self.num_ranks):
            if pipeline > self.layers or not limits.allow("pipeline", pipeline):
                continue
            for weights in divisors(self.num_ranks // pipeline):
                if any(heads % weights for heads in self.heads) or not limits.allow("tensor", weights):
                    continue
                for context in divisors(self.num_ranks // pipeline // weights):
                    if self.sequence % context or not limits.allow("context", context):
                        continue
                    batch = self.num_ranks // pipeline // weights // context
                    cut = self.splits_sequence and weights > 1 and self.sequence % weights == 0
                    for sequence in (False, True) if cut else (False,):
                        if limits.allow("sequence", "yes" if sequence else "no"):
                            mesh = Parallelism(batch, weights, context, pipeline, sequence=sequence)
                            found += [mesh.having(**each) for each in self._experts(batch)]
        return tuple(found)

    def _experts(self, batch: int) -> list[dict[str, Any]]:
        """Among how many ranks experts are spread, and with which room."""
        capacities = self.limits.numbers("expert.capacity") or (0.0,)
        return [
            {"experts": size, "capacity": room if size > 1 else 0.0}
            for size in divisors(math.gcd(batch, self.experts))
            if self.limits.allow("expert", size)
            for room in (capacities if size > 1 else (0.0,))
        ]

    @cached_property
    def homes(self) -> tuple[Homes, ...]:
        """Where values may be kept; the device first, if all may be there."""
        return tuple(each for each in (_HOMES if self.has_host else _HOMES[:1]) if self._allows_homes(each))

    def states(self, outline: Parallelism) -> list[StateOption]:
        """The ways to cut states over the ranks of an outline, and to agree, whatever their homes."""
        limits, found = self.limits, []
        for replicas, later in self._replicas(outline):
            synchronous = outline.batch // replicas
            for data in divisors(synchronous):
                if data % outline.experts:
                    continue  # ranks of experts are ranks of data
                if later is not None and data != synchronous:
                    continue  # the axis of replicas is taken
                if not limits.allow("data", replicas if later and synchronous == 1 else data):
                    continue
                if not limits.allow("replica", replicas if later and synchronous > 1 else synchronous // data):
                    continue
                for stage in range(4):
                    if stage and (data * outline.context == 1 or (later is not None and synchronous == 1)):
                        continue  # no ranks have the same, or those of data are replicas
                    if (stage == 0 and data != synchronous) or not limits.allow("zero", stage):
                        continue  # without ZeRO all ranks that cut rows are alike
                    found.append(StateOption(ZERO_STAGES[stage], data * outline.context if stage else 1, later))
        return found

    def _allows_homes(self, homes: Homes) -> bool:
        named = {"parameters": homes.parameters, "activations": homes.activations, "optimizer": homes.optimizer}
        return all(self.limits.allow(f"home.{key}", value) for key, value in named.items())

    def _replicas(self, outline: Parallelism) -> Iterator[tuple[int, LaterSync | None]]:
        """Numbers of replicas, and how they agree later: each domain of a level is a replica."""
        limits = self.limits
        if limits.allow("sync", 1) and limits.allow("compress", "none"):
            yield 1, None
        counts = {self.num_ranks // below for below in (1, *self.domains) if below < self.num_ranks}
        for replicas in sorted(counts):
            if outline.batch % replicas:
                continue
            for kind in limits.names("compress") or ("none",):
                if kind in _PER_ELEMENT and self.sync_steps:
                    yield replicas, LaterSync(replicas, self.sync_steps[-1], 0, *_PER_ELEMENT[kind])

    @cached_property
    def sync_steps(self) -> tuple[int, ...]:
        """The steps between two exchanges that replicas may have, ascending."""
        return tuple(steps for steps in SYNC_STEPS if self.limits.allow("sync", steps))

    def schedules(self, outline: Parallelism) -> list[tuple[str, int]]:
        """(schedule, chunks) for the pipeline of an outline."""
        if outline.pipeline == 1:
            return [("1f1b", 1)]
        limits, found = self.limits, []
        for name in SCHEDULES:
            if limits.allow("schedule", name):
                for chunks in self._chunks(name, outline.pipeline):
                    if outline.pipeline * chunks <= self.layers and limits.allow("chunks", chunks):
                        found.append((name, chunks))
        return found

    def _chunks(self, schedule: str, pipeline: int) -> tuple[int, ...]:
        """The chunks that a schedule may have on each rank; those of one layer each too, if they are not too many."""
        found = _CHUNKS.get(schedule, (1,))
        single = self.layers // pipeline if self.layers % pipeline == 0 else 0
        return (*found, single) if schedule == "interleaved" and found[-1] < single <= _MOST_CHUNKS else found


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def batch_sizes(low: int, high: int) -> tuple[int, ...]:
    """Sizes of the batch to try: the lower one, doubled while it is below the upper one, and that.

    The steps of a range whose ends are more than 512 times apart are larger powers of two: there are ten sizes at most.
    """
    factor = 2
    while low * factor ** (_MOST_SIZES - 2) * 2 < high:
        factor *= 2
    found = [low]
    while found[-1] * factor <= high:
        found.append(found[-1] * factor)
    return tuple(dict.fromkeys([*found, high]))


def plan_of(how: Parallelism) -> Plan:
    """The plan that a Parallelism describes. Raises PlanError, with a Refusal, for one that cannot be had."""
    synchronous = how.synchronous
    words: dict[str, object] = {
        "pipeline": how.pipeline,
        "tensor": how.weights,
        "micro": how.num_micro,
        "expert": how.experts,
        "expert_capacity": how.capacity or None,
        "zero": ZERO_STAGES_BY_CUTS[how.cuts],
        "precision": how.precision,
        "bucket_bytes": how.bucket,
        "recompute": _recompute(how),
        "sequence": "yes" if how.sequence else "no",
        "home_parameters": how.homes.parameters,
        "home_activations": how.homes.activations,
        "home_optimizer": how.homes.optimizer,
    }
    if how.context > 1:
        words["other_axes"] = (("context", how.context),)
    if how.pipeline > 1:
        words |= {"schedule": how.schedule}
        if how.schedule in ("interleaved", "looped-bfs"):
            words["chunks"] = how.chunks
    data = how.sharded // how.context if how.cuts.optimizer else synchronous
    words |= {"data": data, "replica": synchronous // data}
    if how.later is not None:
        kind = next(kind for kind, (sent, _) in _PER_ELEMENT.items() if sent == how.later.sent_bytes)
        words |= {"sync": how.later.steps, "outer": "nesterov", "overlap": how.later.overlap}
        words |= (
            {"data": how.later.replicas} if synchronous == 1 else {"replica": how.later.replicas, "data": synchronous}
        )
        parsed = Plan.parse(f"data=2 compress={kind}").compress
        words["compress"] = parsed
    return Plan(**words)  # type: ignore[arg-type]


ZERO_STAGES_BY_CUTS = {cuts: stage for stage, cuts in ZERO_STAGES.items()}


def _recompute(how: Parallelism) -> Recompute:
    if how.recompute == BUDGET:
        return Recompute("budget", budget_bytes=how.budget)
    return Recompute("layer" if how.recompute == FULL else "none")


def memory_of(text: str) -> int:
    """The bytes of a text such as 70GiB. Raises PlanError for another text."""
    try:
        return int(Bytes().parse(text))
    except ValueError as error:
        raise PlanError(f"--memory {text}: {error}") from None


def batches_of(text: str) -> tuple[int, ...]:
    """The sizes of the batch that a text such as 512..2048 allows. Raises PlanError for another text."""
    low, dots, high = text.partition("..")
    ends = [int(end) if end.isdecimal() and len(end) < 20 else 0 for end in ((low, high) if dots else (low,))]
    if not 1 <= ends[0] <= ends[-1] <= MOST_ROWS:
        raise PlanError(
            f"--batch {text[:40]}: it is a number of rows of the global batch, up to {MOST_ROWS}, or a range like"
            " 512..2048"
        )
    return batch_sizes(ends[0], ends[-1])
