"""What compiling a captured step under a plan gives: the program of its ranks, and what users are told of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from plait.compile.rank_program import RankProgram
from plait.compile.sharding.split_share import SplitShare
from plait.spec.layout import Layout


@dataclass(frozen=True)
class Compiled:
    """The program that ranks run, and how it came to be.

    origins       of parameters that are sharded: the annotation or recipe, by name
    without_rule  ops that run on whole inputs for lack of a rule
    share         of an axis that splits weights: how much it does
    """

    program: RankProgram
    origins: dict[str, str]
    without_rule: frozenset[str]
    share: SplitShare | None = None


@dataclass(frozen=True)
class Settled:
    """What the first batch of a model has decided, and is kept for batches of other shapes. None: not decided yet."""

    layouts: Mapping[str, Layout] | None = None  # of parameters
    stages: Mapping[str, tuple[int, ...]] | None = None  # of a pipeline, by parameter
    frozen: Collection[str] | None = None  # parameters that did not train

    def after(self, program: RankProgram) -> Settled:
        """What is known once this step is compiled."""
        if self.layouts is not None:
            return self
        layouts = {name: each.compute for name, each in program.sharding.parameters.items()}
        stages = None if program.pipeline is None else program.pipeline.stages
        return Settled(layouts, stages, program.captured.frozen)


NOTHING_SETTLED = Settled()
