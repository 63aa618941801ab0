"""The plan: one line of text that says how a training step is spread.

    data=2 tensor=2 batchnorm=local allreduce=ring bucket=25MiB

Each key is a field of `Plan`. The kind of the field reads, checks and prints its value. Defaults are left out of the
text.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from plait.errors import PlanError, Refusal
from plait.plan import axes
from plait.plan.compression import NO_COMPRESSION, Compression
from plait.plan.key_values import (
    NO_RECOMPUTE,
    Axis,
    AxisSizes,
    Buckets,
    Bytes,
    Choice,
    Compressions,
    Family,
    Interval,
    Kind,
    Maybe,
    Names,
    Number,
    Places,
    Real,
    Recompute,
    Recomputes,
    ScheduleName,
    StagePlans,
)
from plait.plan.refused_keys import OF_RELAXED, refused_together
from plait.spec.mesh import JOIN, Mesh

_OTHER_AXES = "axes."  # stands for the keys of axes with a row in plan/axes.py but no field below
_HOME = Choice(("device", "host", "disk"))
OF_PARAMETERS = "-params"  # ends the words of precision= by which the model reads its parameters in half precision


def _key(kind: Kind, default: object, doc: str, name: str = "") -> Any:
    """A field of the plan. `name` is the text of its key, if that is not the name of the field."""
    return field(default=default, metadata={"kind": kind, "doc": doc, "name": name})


@dataclass(frozen=True)
class Plan:
    """How a training step is spread over ranks. `Plan()` is one device.

    >>> str(Plan.parse("tensor=2 data=4 bucket=25MiB"))
    'data=4 tensor=2'
    """

    pipeline: int | tuple[int, ...] = _key(
        Places(), 1, "ranks that each take a stage of the layers, or several; [1,2,1] gives the middle one two ranks"
    )
    replica: int = _key(Axis(), 1, "copies of the data ranks, each with its part of the batch and all that zero splits")
    data: int = _key(Axis(), 1, "ranks that each take a part of the batch")
    expert: int = _key(Axis(), 1, "ranks of data that each take a part of the experts; without data=, data is as large")
    expert_capacity: float | None = _key(
        Real(0.01),
        None,
        "room for the rows of a rank at each rank with experts, as a multiple of what a balanced router sends; rows"
        " beyond it are dropped; by default there is room for all",
        name="expert.capacity",
    )
    tensor: int = _key(Axis(), 1, "ranks that each take a part of the weights")
    stages: tuple[tuple[str, int], ...] = _key(
        StagePlans(), (), "how the ranks of each stage split it; [tensor=2 | data=2] has two stages, of two ranks each"
    )
    other_axes: tuple[tuple[str, int], ...] = _key(AxisSizes(_OTHER_AXES), (), "sizes of axes that have no field here")
    sequence: str = _key(
        Choice(("no", "yes")),
        "no",
        "whether ranks of tensor also split the sequence of activations between split weights",
    )
    context_kind: str = _key(
        Choice(("auto", "ulysses", "ring", "gather")),
        "auto",
        "how attention reads the positions of other ranks of context: exchanged for heads (ulysses), around a ring, or"
        " gathered; auto takes what sends the fewest bytes",
        name="context.kind",
    )
    zero: int = _key(Number(0, 3), 0, "split over data: 1 optimizer state, 2 and gradients, 3 and parameters")
    micro: int = _key(Number(1), 1, "parts of the batch that run one after the other, with one update at the end")
    shapes: int = _key(
        Buckets(), 0, "bucket:N pads the sequences of each batch to a multiple of N, so that few shapes are captured"
    )
    shapes_limit: int = _key(
        Number(1), 16, "shapes after which a batch is padded to one that was captured before", name="shapes.limit"
    )
    schedule: str = _key(ScheduleName(), "1f1b", "the order in which a pipeline's ranks take microbatches, or a file")
    chunks: int = _key(Number(1), 1, "stages that each rank of a pipeline has, where the schedule leaves it open")
    cut: tuple[str, ...] = _key(
        Names(), (), "modules with which the stages of a pipeline begin, except the first stage"
    )
    recompute: Recompute = _key(Recomputes(), NO_RECOMPUTE, "activations that are dropped and recomputed")
    precision: str = _key(
        Choice(("fp32", "bf16", "fp16", "bf16-params", "fp16-params")),
        "fp32",
        "the precision of matrix products, by autocast; with -params that of all that the model computes",
    )
    exceptions: tuple[tuple[str, str], ...] = _key(
        Family("precision.", Choice(("fp32", "bf16", "fp16"))), (), "precision of modules, by name pattern"
    )
    reduce: str = _key(
        Choice(("fp32", "bf16")), "fp32", "the precision in which gradients of float32 parameters are sent and summed"
    )
    home_parameters: str = _key(_HOME, "device", "where parameters and gradients are kept", name="home.parameters")
    home_activations: str = _key(_HOME, "device", "where activations are kept for backward", name="home.activations")
    home_optimizer: str = _key(_HOME, "device", "where the optimizer's state is kept", name="home.optimizer")
    central: str = _key(
        Choice(("none", "host")), "none", "one copy of parameters and optimizer state for all data ranks of a host"
    )
    backend: str = _key(
        Choice(("torch", "xla")), "torch", "what runs the step: ranks of PyTorch, or XLA on all devices of one process"
    )
    batchnorm: str = _key(Choice(("global", "local")), "global", "batch statistics over all ranks, or over each alone")
    allreduce: str = _key(Choice(("backend", "ring", "naive")), "backend", "the algorithm that sums gradients")
    sync: int | tuple[int, int] = _key(
        Interval(), 1, "steps between synchronisations of the replicas; 4..64 begins with 4 and doubles up to 64"
    )
    outer: str = _key(
        Choice(("none", "sgd", "nesterov")), "none", "the outer optimizer, which takes the mean change of the replicas"
    )
    outer_lr: float | None = _key(
        Real(0.0), None, "its learning rate: by default 0.7 with nesterov, 1 with sgd", name="outer.lr"
    )
    outer_momentum: float | None = _key(
        Real(0.0, 1.0), None, "its momentum: by default 0.9 with nesterov, none with sgd", name="outer.momentum"
    )
    moments: str = _key(
        Choice(("kept", "averaged", "reset")),
        "kept",
        "what happens to the optimizer's moments when replicas synchronise",
    )
    streaming: int = _key(Number(1), 1, "parts of the model that synchronise one after the other within an interval")
    overlap: int = _key(Number(0), 0, "steps that run while replicas exchange, or a worker and its servers do")
    compress: Compression = _key(Compressions(), NO_COMPRESSION, "compression of what replicas exchange")
    uncompressed: tuple[tuple[str, str], ...] = _key(
        Family("compress.", Choice(("none",))), (), "parameters, by name pattern, that are not compressed"
    )
    workers: int = _key(Number(0), 0, "workers that train against parameter servers; each may be any plan itself")
    servers: int = _key(Number(0), 0, "parameter servers, each of which keeps and updates some of the variables")
    staleness: int | None = _key(
        Maybe(0), None, "steps that a worker may be ahead of the slowest; 0 is synchronous, none is no bound"
    )
    backup: int = _key(Number(0), 0, "workers whose gradients a step does not wait for")
    bucket_bytes: int = _key(Bytes(), 25 * 2**20, "size of the buckets in which gradients are summed", name="bucket")
    compile: str = _key(Choice(("none", "inductor")), "none", "the compiler of what runs between collectives")
    uncompiled: tuple[tuple[str, str], ...] = _key(
        Family("compile.", Choice(("none",))), (), "modules, by name pattern, that are not compiled"
    )
    cudagraphs: str = _key(
        Choice(("no", "yes")), "no", "whether compiled regions are recorded as CUDA graphs, and replayed"
    )

    def __post_init__(self) -> None:
        for key in plan_keys():
            if (value := getattr(self, key.field)) is key.default:
                continue
            try:
                key.kind.check(value)
            except ValueError as error:
                raise PlanError(f"{key.name}={value}: {error}") from None
        if self.stages and self.pipeline != len(self.stages):
            raise PlanError(
                f"stages={StagePlans().show(self.stages)} has {len(self.stages)} stages, but the plan has"
                f" pipeline={Places().show(self.pipeline)}; make them agree, or leave pipeline= out"
            )
        self._fit_within()
        given = {key.name: key.kind.show(getattr(self, key.field)) for key in self._given()}
        for refusal in refused_together(_defaults() | given, given.keys()):
            raise PlanError(refusal)

    def _given(self) -> list[PlanKey]:
        """The keys whose value is not the default."""
        return [key for key in plan_keys() if getattr(self, key.field) != key.default]

    def _fit_within(self) -> None:
        """Give an axis that another subdivides the size of that other, if it has none. PlanError if it is not a
        multiple."""
        for kind in axes.AXES:
            if not kind.within or (size := getattr(self, kind.name)) == 1:
                continue
            whole = getattr(self, kind.within)
            if whole == 1:
                object.__setattr__(self, kind.within, size)
            elif whole % size:
                raise PlanError(
                    Refusal(
                        f"{kind.name}={size} does not divide {kind.within}={whole}",
                        f"the ranks of {kind.name} are ranks of {kind.within}, which it subdivides",
                        f"give a {kind.within}= that it divides, such as {kind.within}={-(-whole // size) * size}",
                    )
                )

    @classmethod
    def of(cls, given: Any) -> Plan:
        """The plan that a user gives, as one or as its text. Raises PlanError for anything else."""
        return given if isinstance(given, Plan) else cls.parse(given)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read a plan. Keys may be in any order; an empty text is one device.

        Raises:
            PlanError: a word cannot be read, or the values do not go together.
        """
        if not isinstance(text, str):
            raise PlanError(f"the plan is a {type(text).__name__}; give a Plan or its text, such as 'data=2 tensor=2'")
        keys = {key.name: key for key in plan_keys()}
        found: dict[str, Any] = {}
        for number, word in enumerate(_split(text), start=1):
            place = f"word {number} of the plan {text!r}"
            key, equals, value = word.partition("=")
            if not equals or not key or not value:
                raise PlanError(f"cannot read {word!r} ({place}): a word of a plan is key=value, like data=2")
            if "." in key and (family := key.partition(".")[0] + ".") in keys.keys() - {_OTHER_AXES}:
                key, value = family, word.removeprefix(family)
            elif key in _axes_without_field():
                key = _OTHER_AXES
            if key not in keys:
                raise PlanError(f"unknown key {key!r} ({place}); {_hint(key, keys)}")
            row = keys[key]
            kind = row.kind
            try:
                read: Any = kind.parse(word if isinstance(kind, AxisSizes) else value)
                kind.check(read)
            except ValueError as error:
                spaces = "; separate the words of a plan with spaces" if "," in value and "=" in value else ""
                raise PlanError(f"bad value {value!r} in {word!r} ({place}): {error}{spaces}") from None
            earlier = found.get(row.field)
            name = "" if isinstance(kind, AxisSizes) else key
            if isinstance(kind, Family):
                name += read[0][0]
                earlier = dict(found.get(row.field, ())).get(read[0][0])
                read = (*found.get(row.field, ()), *read)
            if earlier is not None:
                raise PlanError(f"{name} is given twice, the second time as {word!r} ({place}); give it once")
            found[row.field] = read
        if "stages" in found:
            found.setdefault("pipeline", len(found["stages"]))
        return cls(**found)

    @classmethod
    def check_value(cls, key: str, value: str) -> None:
        """Raise ValueError for text that a key of a plan cannot have as its value, whatever other keys have."""
        keys = {each.name: each for each in plan_keys()}
        kind = keys[_OTHER_AXES if key in _axes_without_field() else key].kind
        kind.check(kind.parse(f"{key}={value}" if isinstance(kind, AxisSizes) else value))

    @classmethod
    def for_processes(cls, num_processes: int) -> Plan:
        """The default plan for a number of processes: data parallel over all of them."""
        return cls(data=num_processes)

    def __str__(self) -> str:
        return " ".join(_words(key, getattr(self, key.field)) for key in self._given())

    @property
    def title(self) -> str:
        """The text of the plan for messages; "one device" for the empty plan."""
        return str(self) or "one device"

    @property
    def mesh(self) -> Mesh:
        """The mesh with every axis, outermost first; also axes of size 1, which layouts may name."""
        sizes = {
            kind.axis or key.name: kind.num_ranks(getattr(self, key.field))
            for key in plan_keys()
            if isinstance(kind := key.kind, Axis)
        } | dict(self.other_axes)
        for each in axes.AXES:
            if each.within:
                sizes[each.within] //= sizes.get(each.name, 1)
        dense = [name for name in axes.state_axes() if sizes.get(name, 1) > 1]
        expert = [name for name in dense if not axes.axis_kind(name).cuts_experts]
        joined = dict.fromkeys(JOIN.join(each) for each in (dense, expert) if len(each) > 1)
        return Mesh(tuple((kind.name, sizes.get(kind.name, 1)) for kind in axes.AXES), tuple(joined))

    @property
    def process_mesh(self) -> Mesh:
        """The mesh of the processes, or threads, that run the plan: with backend=xla one has the devices of `mesh`."""
        return self.mesh if self.backend == "torch" else Mesh(tuple((name, 1) for name in self.mesh.names))

    @property
    def num_processes(self) -> int:
        """The number of ranks: the product of the sizes of all axes, or 1 where one process has all devices."""
        return self.process_mesh.size

    @property
    def copies(self) -> tuple[int, ...]:
        """For each place of the pipeline, the number of ranks that share its microbatches."""
        return self.pipeline if isinstance(self.pipeline, tuple) else (1,) * self.pipeline

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that the plan names, for the model or for some modules: fp32, bf16, fp16."""
        names = (self.precision, *(name for _, name in self.exceptions))
        return tuple(dict.fromkeys(name.removesuffix(OF_PARAMETERS) for name in names))

    @property
    def uses_disk(self) -> bool:
        """Whether anything is kept on disk."""
        return "disk" in (self.home_optimizer, self.home_parameters, self.home_activations)

    @property
    def fixed_rows(self) -> bool:
        """Whether a fixed number of rows travels to each expert's rank, and not the number that the router gives.

        It is fixed by a capacity in the plan, and for compiled code or activations that are offloaded."""
        return self.expert_capacity is not None or self.compile != "none" or self.home_activations != "device"

    @property
    def shares_parameters(self) -> bool:
        """Whether several ranks share the memory of parameters, of which each updates its part."""
        return self.central == "host" and self.mesh.axis_size(axes.zero_axis()) > 1

    def with_own_parameters(self) -> Plan:
        """The plan with the same cuts but without shared memory: each rank has parameters of its own."""
        return self if self.central == "none" else replace(self, central="none", zero=2)

    def cutting_more(self) -> list[Plan]:
        """Plans that cut more states over the same ranks, in the order in which to try them."""
        over = [name for name in axes.state_axes() if self.mesh.axis_size(name) > 1]
        if not over or self.central != "none" or self.relaxed_axis in over:
            return []
        return [replace(self, zero=stage) for stage in range(self.zero + 1, 4)]

    @property
    def num_batch_parts(self) -> int:
        """The number of parts into which each microbatch is cut: the product of the sizes of the batch axes."""
        return axes.num_batch_parts(self.mesh)

    @property
    def num_process_parts(self) -> int:
        """The number of parts into which each microbatch is cut before processes get them; 1 where one has it whole."""
        return axes.num_batch_parts(self.process_mesh)

    @property
    def num_stage_parts(self) -> int:
        """The number of parts into which a stage may cut each part of a microbatch again, with `stages=`."""
        return self.stages[0][1] if self.stages else 1

    def batch_part(self, coordinates: Mapping[str, int]) -> int:
        """The index of the part of each microbatch that the rank at `coordinates` has."""
        return axes.batch_part(self.mesh, coordinates)

    @property
    def relaxed_axis(self) -> str:
        """The axis whose ranks synchronise less often than every step, or compressed; empty if there is none.

        With several replicas it is `replica`; the ranks of `data` then synchronise at every step.
        """
        if self.workers or (self.sync == 1 and self.compress == NO_COMPRESSION):
            return ""
        return "replica" if self.replica > 1 else "data"

    @property
    def outer_rates(self) -> tuple[float, float]:
        """The learning rate and momentum of the outer optimizer; by default those of DiLoCo (Douillard et al. 2023)."""
        lr, momentum = (0.7, 0.9) if self.outer == "nesterov" else (1.0, 0.0)
        return (
            lr if self.outer_lr is None else self.outer_lr,
            momentum if self.outer_momentum is None else self.outer_momentum,
        )

    @property
    def keeps_agreed(self) -> bool:
        """Whether replicas keep the weights of the last synchronisation, so that they exchange changes of weights."""
        return self.sync != 1 and (self.outer != "none" or self.compress != NO_COMPRESSION)

    @property
    def exempt(self) -> tuple[str, ...]:
        """Name patterns of the parameters that are not compressed."""
        return tuple(pattern for pattern, _ in self.uncompressed)

    @property
    def inner_plan(self) -> Plan:
        """The plan of one replica of `sync=` or `compress=`, or of one worker."""
        if not self.relaxed_axis and not self.workers:
            return self
        kept = {key.field: getattr(self, key.field) for key in self._given() if key.name not in OF_RELAXED}
        return Plan(**(kept | {self.relaxed_axis: 1} if self.relaxed_axis else kept))

    def check_processes(self, num_processes: int) -> None:
        """Raise PlanError unless the axes multiply to the number of processes."""
        if (need := self.num_processes) == num_processes:
            return
        if self.backend != "torch":
            raise PlanError(
                f"the plan {self.title!r} has all {self.mesh.size} devices in one process, and there are"
                f" {num_processes}; start one (--processes 1), or leave backend={self.backend} out"
            )
        product = " x ".join(f"{name}={size}" for name, size in self.mesh.axes if size > 1)
        sum_text = f"{product} = {need}" if " x " in product else f"{need}"
        raise PlanError(
            f"the plan {self.title!r} is for {sum_text} {'process' if need == 1 else 'processes'}, not {num_processes};"
            f" start {need} (--processes {need}), or give a plan whose sizes multiply to {num_processes}, such as"
            f" data={num_processes}"
        )


def _split(text: str) -> list[str]:
    """The words of a plan. Spaces within brackets do not separate words."""
    return re.sub(r"\[[^\]]*\]", lambda found: "".join(found[0].split()), text).split()


class PlanKey(NamedTuple):
    """A key of a plan: the field that has its value, its name in the text, and what reads, checks and prints it."""

    field: str
    name: str
    kind: Kind
    default: object
    doc: str


@functools.cache
def plan_keys() -> tuple[PlanKey, ...]:
    """All keys, in the order in which a plan prints them. The keys of a family of names are one, its prefix."""
    found = []
    for row in fields(Plan):
        kind: Kind = row.metadata["kind"]
        name = kind.prefix if isinstance(kind, Family) else row.metadata["name"] or row.name
        found.append(PlanKey(row.name, name, kind, row.default, row.metadata["doc"]))
    return tuple(found)


@functools.cache
def _defaults() -> dict[str, str]:
    """The default of every key, as text."""
    return {key.name: key.kind.show(key.default) for key in plan_keys()}


def _words(key: PlanKey, value: Any) -> str:
    return key.kind.show(value) if isinstance(key.kind, Family) else f"{key.name}={key.kind.show(value)}"


def describe_keys() -> list[tuple[str, str, str]]:
    """(name, default as text, meaning) of every key, in the order in which a plan prints them."""
    found = []
    for key in plan_keys():
        if isinstance(key.kind, AxisSizes):
            found += [(name, "1", axes.axis_kind(name).doc) for name in _axes_without_field()]
        else:
            found.append((key.name, _defaults()[key.name], key.doc))
    return found


def _axes_without_field() -> list[str]:
    """The axes that have a row in plan/axes.py but no field in `Plan`."""
    have = {key.kind.axis or key.name for key in plan_keys() if isinstance(key.kind, Axis)}
    return [kind.name for kind in axes.AXES if kind.name not in have]


def _hint(key: str, names: Iterable[str]) -> str:
    known = [*(name for name in names if name != _OTHER_AXES), *_axes_without_field()]
    near = difflib.get_close_matches(key.lower(), known, n=2, cutoff=0.6)
    return (f"did you mean {' or '.join(near)}? " if near else "") + f"the keys are {', '.join(known)}"
