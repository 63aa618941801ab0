"""What a plan says of a transformer's step, as numbers: how many ranks share each part of the work and of the memory.

Closed forms of memory and time (cost/transformer_step.py) read this, and no keys of a plan. It also has what published
runs used and plait has no key for: selective recomputation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.errors import PlanError
from plait.plan.axes import AXES
from plait.plan.plan import Plan
from plait.plan.sharding_plan import ZERO_STAGES, ZeroStage

# Kinds of recomputation: nothing; the attention's scores; all but every other product and attention; whole layers.
NONE, SELECTIVE, ALTERNATE, FULL = "none", "selective", "alternate", "full"


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
        recompute: `none`, `selective`, `alternate` or `full`.
        sequence: whether ranks of `weights` also split what lies between the weights (sequence parallelism).
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

    @property
    def num_ranks(self) -> int:
        return self.batch * self.weights * self.context * self.pipeline

    @classmethod
    def of(cls, plan: Plan) -> Parallelism:
        """The numbers of a plan. Raises PlanError for a plan that closed forms do not describe."""
        if plan.stages or plan.workers or any(copies > 1 for copies in plan.copies):
            raise PlanError(
                f"the plan {plan.title!r} has stages that differ, or workers, which closed forms do not have"
            )
        mesh = plan.mesh
        sizes = {kind: mesh.axis_size(kind.name) for kind in AXES}
        recompute = {"none": NONE, "layer": FULL}.get(plan.recompute.kind)
        if recompute is None:
            raise PlanError(
                f"recompute={plan.recompute.kind} depends on the model's ops; write recompute=layer or none"
            )
        return cls(
            batch=math.prod(size for kind, size in sizes.items() if kind.cuts_rows),
            weights=math.prod(size for kind, size in sizes.items() if kind.cuts_weights),
            context=math.prod(size for kind, size in sizes.items() if kind.cuts_sequence),
            pipeline=math.prod(size for kind, size in sizes.items() if kind.has_stages),
            chunks=plan.chunks,
            num_micro=plan.micro,
            cuts=ZERO_STAGES[plan.zero],
            sharded=math.prod(size for kind, size in sizes.items() if kind.cuts_states) if plan.zero else 1,
            recompute=recompute,
            sequence=plan.sequence == "yes",
        )
