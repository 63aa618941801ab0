"""What a plan says of a transformer's step, as numbers: how many ranks share each part of the work and of the memory.

Closed forms of memory and time (cost/transformer_step.py) read this, and no keys of a plan. It also has what published
runs used and plait has no key for: selective recomputation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from plait.errors import PlanError, Refusal
from plait.plan.axes import AXES, state_axes
from plait.plan.plan import Plan
from plait.plan.sharding_plan import DEVICE, DISK, ZERO_STAGES, ZeroStage

# Kinds of recomputation: nothing; the attention's scores; all but every other product and attention; whole layers; as
# much as a budget of bytes needs.
NONE, SELECTIVE, ALTERNATE, FULL, BUDGET = "none", "selective", "alternate", "full", "budget"

# Bytes of an element as replicas send it, by the kind of compression; codes of 8 and 4 bits have a scale for 256.
_SENT_BYTES = {"none": 4.0, "bf16": 2.0, "fp8": 1 + 4 / 256, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 256}


class Homes(NamedTuple):
    """The kinds of memory that keep parameters with their gradients, activations, and the optimizer's state."""

    parameters: str = DEVICE
    activations: str = DEVICE
    optimizer: str = DEVICE

    @property
    def any_on_disk(self) -> bool:
        """Whether anything is kept on disk."""
        return DISK in (self.parameters, self.activations, self.optimizer)

    @property
    def any_away(self) -> bool:
        """Whether anything is kept outside the device."""
        return not self.parameters == self.activations == self.optimizer == DEVICE


ON_DEVICE = Homes()


class LaterSync(NamedTuple):
    """Replicas that train by themselves and exchange their weights every `steps` steps.

    Attributes:
        replicas: how many there are.
        steps: steps between two exchanges; the longest, where the interval grows.
        overlap: steps that run during an exchange.
        sent_bytes: bytes of an element as it is sent.
        kept_bytes: bytes that a rank keeps beside each element that it trains.
    """

    replicas: int
    steps: int
    overlap: int = 0
    sent_bytes: float = 4.0
    kept_bytes: float = 0.0


@dataclass(frozen=True)
class Parallelism:
    """How a step is spread. Ranks lie on the mesh pipeline x batch x context x weights, outermost first.

    Attributes:
        batch: ranks that each have some rows.
        weights: ranks that each have a part of every weight (tensor parallelism).
        context: ranks that each have a part of every sequence.
        pipeline: ranks that each have some layers.
        chunks: stages on each of these ranks.
        num_micro: microbatches of a step.
        cuts: what the ranks of `sharded` have parts of.
        sharded: ranks over which the states of a parameter are cut, within `batch` and `context`; 1 without ZeRO.
        recompute: `none`, `selective`, `alternate`, `full` or `budget`.
        sequence: whether ranks of `weights` also split what lies between the weights (sequence parallelism).
        budget: with `budget`, the bytes that a microbatch may keep for its backward, on all stages together.
        homes: where states and activations are kept.
        later: replicas that agree later than at every step. They are the outer part of `batch`.
        bucket: bytes of the buckets in which gradients are summed.
        schedule: the order in which a pipeline's ranks take microbatches.
        precision: of products and activations, by its word in a plan.
        experts: ranks that each have a part of the experts, the inner part of `batch`.
        capacity: room for rows at the ranks of experts, as a multiple of what a balanced router sends; 0 if only rows
            travel that there are.
        context_kind: how ranks of `context` see positions of others: ulysses, ring, gather, or auto, what sends least.
    """

    batch: int = 1
    weights: int = 1
    context: int = 1
    pipeline: int = 1
    chunks: int = 1
    num_micro: int = 1
    cuts: ZeroStage = ZERO_STAGES[0]
    sharded: int = 1
    recompute: str = NONE
    sequence: bool = False
    budget: int = 0
    homes: Homes = ON_DEVICE
    later: LaterSync | None = None
    bucket: int = 25 * 2**20
    schedule: str = "1f1b"
    precision: str = "fp32"
    experts: int = 1
    capacity: float = 0.0
    context_kind: str = "auto"

    def having(self, **changes: object) -> Parallelism:
        """The same with other fields, as `dataclasses.replace` gives it, but ten times as fast, for searches."""
        made = object.__new__(Parallelism)
        made.__dict__.update(self.__dict__, **changes)
        return made

    @property
    def num_ranks(self) -> int:
        return self.batch * self.weights * self.context * self.pipeline

    @property
    def order(self) -> str:
        """The schedule; chunks of a 1F1B are interleaved."""
        return "interleaved" if self.chunks > 1 and self.schedule == "1f1b" else self.schedule

    @property
    def holds_gradient_parts(self) -> bool:
        """Whether a rank holds its part of the gradients alone. With zero=1 they are summed over ranks once a step, so
        that the sums of several microbatches are whole until the last one is added to them."""
        return self.cuts.gradients or (self.cuts.optimizer and self.num_micro == 1)

    @property
    def sent_rows(self) -> float:
        """Rows that travel to experts, as a multiple of those that a balanced router sends. Offloaded activations have
        fixed lengths, with room for all rows."""
        most = float(self.experts)
        return min(self.capacity, most) if self.capacity else 1.0 if self.homes.activations == DEVICE else most

    @property
    def num_replicas(self) -> int:
        """Replicas that agree later than at every step; 1 if all ranks agree at every step."""
        return 1 if self.later is None else self.later.replicas

    @property
    def synchronous(self) -> int:
        """Ranks that cut the rows and agree at every step."""
        return self.batch // self.num_replicas

    @classmethod
    def of(cls, plan: Plan) -> Parallelism:
        """The numbers of a plan. Raises PlanError for a plan that closed forms do not describe."""
        if plan.stages or plan.workers or any(copies > 1 for copies in plan.copies):
            raise PlanError(
                f"the plan {plan.title!r} has stages that differ, or workers, which closed forms do not have"
            )
        if plan.shares_parameters:
            raise PlanError(
                Refusal(f"the plan {plan.title!r}", "closed forms have no parameters that ranks share",
                        "write zero=2 in place of central=host")
            )  # fmt: skip
        mesh, inner = plan.mesh, plan.inner_plan.mesh
        sizes = {kind: mesh.axis_size(kind.name) for kind in AXES}
        recompute = {"none": NONE, "layer": FULL, "budget": BUDGET}.get(plan.recompute.kind)
        if recompute is None:
            raise PlanError(
                f"recompute={plan.recompute.kind} depends on the model's ops; write recompute=layer, a budget or none"
            )
        experts = math.prod(size for kind, size in sizes.items() if kind.cuts_experts)
        return cls(
            batch=math.prod(size for kind, size in sizes.items() if kind.cuts_rows),
            weights=math.prod(size for kind, size in sizes.items() if kind.cuts_weights),
            context=math.prod(size for kind, size in sizes.items() if kind.cuts_sequence),
            pipeline=math.prod(size for kind, size in sizes.items() if kind.has_stages),
            chunks=plan.chunks,
            num_micro=plan.micro,
            cuts=ZERO_STAGES[plan.zero],
            sharded=math.prod(inner.axis_size(name) for name in state_axes()) if plan.zero else 1,
            recompute=recompute,
            sequence=plan.sequence == "yes",
            budget=plan.recompute.budget_bytes,
            homes=Homes(plan.home_parameters, plan.home_activations, plan.home_optimizer),
            later=_later(plan),
            bucket=plan.bucket_bytes,
            schedule=plan.schedule,
            precision=plan.precision,
            experts=experts,
            capacity=plan.expert_capacity or (float(experts) if plan.compile != "none" and experts > 1 else 0.0),
            context_kind=plan.context_kind,
        )


def _later(plan: Plan) -> LaterSync | None:
    """What replicas exchange that agree later than at every step, or in fewer bits."""
    if not plan.relaxed_axis:
        return None
    kind = plan.compress.kind
    if kind not in _SENT_BYTES:
        raise PlanError(
            Refusal(f"compress={plan.compress}", "what it sends depends on the shapes of tensors",
                    f"write compress={' or '.join(_SENT_BYTES)}")
        )  # fmt: skip
    steps = plan.sync if isinstance(plan.sync, int) else plan.sync[1]
    kept = 8.0 * plan.keeps_agreed + 4.0 * (kind != "none")
    return LaterSync(plan.mesh.axis_size(plan.relaxed_axis), steps, plan.overlap, _SENT_BYTES[kind], kept)
