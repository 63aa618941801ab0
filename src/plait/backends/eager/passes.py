"""The order of everything that eager execution adds to a rank program: EAGER_PASSES.

    functional graphs -> calls bound to the rank's World and to the stage's saved values -> activations offloaded
                      -> collectives in buckets, begun early and waited for late -> sums written in place
                      -> parameters fetched from host or disk, gradients offloaded there

The passes change an EagerDraft. compile/pass_base.py defines a pass.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph

from plait.backends.eager.collectives import bind_world
from plait.backends.eager.rewrites.bucket_gradients import bucket_gradients
from plait.backends.eager.rewrites.dead_values import pop_dead_values, reuse_dead_operands
from plait.backends.eager.rewrites.offload_rewrites import (
    fetch_parameters,
    fetch_sums,
    offload_gradients,
    stash_activations,
)
from plait.backends.eager.rewrites.overlap import overlap
from plait.backends.eager.rewrites.read_ahead import bucket_gathers
from plait.compile.capture.precision import DTYPES
from plait.compile.ir.calls import copy_graph
from plait.compile.ir.rewriting import collection_paused
from plait.compile.pass_base import Pass, Watcher, run_passes
from plait.compile.rank_program import RankProgram, StepGraph
from plait.plan.sharding_plan import DEVICE, Gather


@dataclass
class EagerDraft:
    """The graphs of a program while the passes turn them into those that eager execution runs."""

    program: RankProgram
    parts: dict[str, StepGraph]

    @property
    def bucket_bytes(self) -> int:
        return self.program.plan.bucket_bytes

    @property
    def narrow_sums(self) -> torch.dtype | None:
        """The dtype in which sums of wider gradients are sent; None: in their own."""
        name = self.program.plan.reduce
        return None if name == "fp32" else DTYPES[name]


def _bind_world(draft: EagerDraft) -> None:
    for part in draft.parts.values():
        part.graph = bind_world(part.graph)


def _take_values(draft: EagerDraft) -> None:
    assert draft.program.pipeline is not None
    values = draft.program.pipeline.cells.values
    for part in draft.parts.values():
        assert part.cell is not None
        kind, stage = part.cell
        later = "FBW"["FBW".index(kind) + 1 :]
        kept = {value.name for value in values if any(on == stage and user in later for user, on in value.users)}
        part.graph = pop_dead_values(part.graph, kept)


def _stash_activations(draft: EagerDraft) -> None:
    for part in draft.parts.values():
        part.graph = stash_activations(part.graph, draft.bucket_bytes)


def _bucket_gathers(draft: EagerDraft) -> None:
    for part in draft.parts.values():
        part.graph = bucket_gathers(part.graph, draft.bucket_bytes)


def _bucket_gradients(draft: EagerDraft) -> None:
    for part in draft.parts.values():
        handed_on = [i for i, output in enumerate(part.outputs) if output.kind == "value"]
        part.graph = bucket_gradients(
            part.graph, draft.bucket_bytes, part.gradients.keys(), but=handed_on, narrow=draft.narrow_sums
        )


def _overlap(draft: EagerDraft) -> None:
    for part in draft.parts.values():
        part.graph = overlap(part.graph)


def _reuse_operands(draft: EagerDraft) -> None:
    for part in draft.parts.values():
        part.graph = reuse_dead_operands(part.graph)


def _fetch_parameters(draft: EagerDraft) -> None:
    away = draft.program.sharding.away
    for part in draft.parts.values():
        part.graph = fetch_parameters(part.graph, away, draft.bucket_bytes)


def _send_gradients(draft: EagerDraft) -> None:
    pipeline = draft.program.pipeline
    away = draft.program.sharding.gradients_away.difference(pipeline.added_up if pipeline is not None else ())
    for part in draft.parts.values():
        kind = "sum" if part.accumulation in ("first", "middle") else "gradient"
        part.graph = offload_gradients(part.graph, kind, part.gradients, away)
        given = "gradient" if part.accumulation == "more" else "sum"
        part.graph = fetch_sums(part.graph, given, away, draft.bucket_bytes)


def _is_piped(draft: EagerDraft) -> bool:
    return draft.program.pipeline is not None


EAGER_PASSES = (
    Pass("bind-world", "passes the rank's World to collectives", _bind_world, provides=["bound collectives"]),
    Pass("take-values", "takes values of other cells from where they are saved, at their first use", _take_values,
         provides=["taken values"], when=_is_piped),
    Pass("stash-activations", "offloads activations until backward reads them", _stash_activations,
         ["bound collectives"],
         when=lambda draft: draft.program.sharding.activation_memory != DEVICE and not _is_piped(draft)),
    Pass("bucket-gathers", "gathers parameters in buckets, each one bucket ahead of its use", _bucket_gathers,
         ["bound collectives"], when=lambda draft: bool(draft.program.sharding.gathered(Gather.USE))),
    Pass("bucket-gradients", "sums gradients in buckets while backward runs", _bucket_gradients,
         ["bound collectives", "taken values"], ["buckets"]),
    Pass("overlap", "starts collectives early, waits for them late, and puts work in between", _overlap, ["buckets"]),
    Pass("reuse-operands", "adds in place where nothing reads the operand again", _reuse_operands, ["buckets"],
         ["sums in place"]),
    Pass("fetch-parameters", "fetches parameters from their home before their use", _fetch_parameters, ["buckets"],
         when=lambda draft: bool(draft.program.sharding.away)),
    Pass("send-gradients", "sends gradients to their home as soon as they are computed", _send_gradients,
         ["buckets", "sums in place"], when=lambda draft: bool(draft.program.sharding.gradients_away)),
)  # fmt: skip

_made: WeakKeyDictionary[RankProgram, dict[str, Graph]] = WeakKeyDictionary()  # ranks that are threads share them
_lock = threading.Lock()


def eager_graphs(program: RankProgram) -> dict[str, Graph]:
    """The graphs that eager execution runs for a program, by the names of the program's own."""
    with _lock:
        if program not in _made:
            _made[program] = make_eager(program)
        return _made[program]


@collection_paused()
def make_eager(program: RankProgram, watcher: Watcher | None = None) -> dict[str, Graph]:
    """Make the graphs of `eager_graphs` anew. `watcher` is told of every pass."""
    parts = {name: replace(part, graph=copy_graph(part.graph)) for name, part in program.graphs.items()}
    draft = EagerDraft(program, parts)
    run_passes(EAGER_PASSES, draft, watcher)
    return {name: part.graph for name, part in draft.parts.items()}
