"""Pads batches to few shapes, for `shapes=bucket:N`: keeps the lengths that a run has met, and removes the padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from plait.comm.agree import from_first_rank
from plait.comm.protocol import World
from plait.compile.capture.loss_values import Outputs
from plait.engine.compiler import Compiler
from plait.engine.local_batch import LocalBatch
from plait.engine.padding_rules import PaddingRules


@dataclass(frozen=True)
class PaddedBatch:
    """A batch as the step sees it.

    batch  the batch, padded
    rules  how it was padded; None if it is as it was given
    more   the number of positions that each of its tensors got
    """

    batch: Any
    rules: PaddingRules | None = None
    more: Mapping[str, int] = field(default_factory=dict)

    def cropped(self, outputs: Outputs) -> Outputs:
        """The outputs of a loss function without the positions of padding."""
        return outputs if self.rules is None else self.rules.crop(outputs, self.more)


class BatchPadding:
    """Pads the batches of a run, on one rank. Every rank makes one, and gives it its batches in the same order.

    Each length is rounded up to a multiple. Once there were `shapes.limit` combinations of lengths, a batch is padded
    to the smallest of them that is large enough; if none is, to one of at least twice the length, so that there are
    few more.
    """

    def __init__(self, compiler: Compiler, world: World) -> None:
        self._compiler, self._world = compiler, world
        self._pads, self._limit = bool(compiler.plan.shapes), compiler.plan.shapes_limit
        self._rules: dict[tuple[bool, tuple[str, ...]], PaddingRules] = {}
        self._met: dict[bool, dict[tuple[int, ...], None]] = {True: {}, False: {}}  # by whether a step trains

    def padded(self, batch: Any, train: bool = True) -> PaddedBatch:
        """The batch padded; as it is if the plan has no buckets. All ranks must call it.

        With LocalBatches, all ranks pad to what the longest of their batches needs, for which they exchange lengths.
        Raises PlanError, with a Refusal, if padding changes the step of the first batch.
        """
        if not self._pads:
            return PaddedBatch(batch)
        local = isinstance(batch, LocalBatch)
        tree = batch.tree if local else batch
        rules = self._rules_of(tree, train)
        here = rules.lengths(tree)
        lengths = self._longest(here) if local else here
        wanted = self._bounded(rules, lengths, self._met[train])
        documents = rules.longest_documents(tree, wanted)
        made = rules.pad(tree, wanted, self._longest(documents) if local and documents else documents)
        more = {name: wanted[name] - length for name, length in lengths.items()}
        return PaddedBatch(dataclasses.replace(batch, tree=made) if local else made, rules, more)

    def _rules_of(self, tree: Any, train: bool) -> PaddingRules:
        """The rules for batches with these tensors, found on rank 0 with the first such batch."""
        key = (train, self._compiler.names_of(tree))
        if key not in self._rules:
            text = from_first_rank(
                self._world,
                lambda: self._compiler.padding_rules(tree, train).to_text(),
                "checking that padding changes nothing",
            )
            self._rules[key] = PaddingRules.from_text(text)
        return self._rules[key]

    def _longest(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """The largest of each length on any rank."""
        if self._world.mesh.size == 1:
            return dict(lengths)
        here = torch.tensor([*lengths.values()], dtype=torch.int64).to(self._world.device)
        found = self._world.everyone().all_reduce(here, "max").wait()
        return dict(zip(lengths, found.tolist(), strict=True))

    def _bounded(
        self, rules: PaddingRules, lengths: Mapping[str, int], met: dict[tuple[int, ...], None]
    ) -> dict[str, int]:
        """The lengths to pad to, which are noted as met."""
        apart = {name: rules.rounded(name, length) for name, length in rules.apart(lengths).items()}
        wanted = tuple(apart.values())
        if wanted not in met and len(met) >= self._limit:
            fitting = [known for known in met if all(one >= other for one, other in zip(known, wanted, strict=True))]
            wanted = min(fitting, key=sum) if fitting else self._doubled(rules, apart, met)
        met[wanted] = None
        return rules.of_all(lengths, dict(zip(apart, wanted, strict=True)))

    def _doubled(
        self, rules: PaddingRules, apart: Mapping[str, int], met: Mapping[tuple[int, ...], None]
    ) -> tuple[int, ...]:
        """Lengths that are those met, or at least twice as long where these are too short."""
        longest = [max(lengths) for lengths in zip(*met, strict=True)]
        return tuple(
            known if length <= known else max(length, rules.rounded(name, 2 * known))
            for known, (name, length) in zip(longest, apart.items(), strict=True)
        )
