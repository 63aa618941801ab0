"""The parameters of one rank: what the optimizer updates, what the graph reads, and the way from one to the other.

zero=0  the same tensors
zero=1  the graph reads whole tensors; the optimizer has this rank's part of each, a view of the whole where that
zero=2  is possible; after an update the parts are gathered
zero=3  the same tensors: this rank's parts, which the graph gathers
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from plait.comm.protocol import World
from plait.decide.buckets import bucket_limit, split_buckets
from plait.graph.gather import Gathering
from plait.graph.lower import Lowered
from plait.graph.rows import Cut, Rows
from plait.graph.zero import cut_of
from plait.run.initialise import initial_parameters
from plait.run.state import is_whole


class Variables:
    """`parameters` are the optimizer's, `inputs` the graph's, both by name; absent where another rank has them.

    With `adopt`, tensors that are whole are the model's own; the model's copies of others are let go.
    """

    def __init__(self, model: nn.Module, lowered: Lowered, world: World, seed: int, adopt: bool) -> None:
        plan = lowered.plan
        self._world = world
        self._bucket_bytes = plan.bucket_bytes
        self.parameters: dict[str, nn.Parameter] = {}
        self.inputs: dict[str, Tensor] = {}
        self._cuts: dict[str, Cut] = {}  # of parameters whose parts are gathered after an update
        own = dict(model.named_parameters())
        names = list(own)
        held = {name: (lowered.states if plan.zero == 3 else lowered.layouts)[name] for name in names}
        adopted: set[str] = set()
        for name, value in initial_parameters(model, held, world, seed).items():
            if value is None:
                continue
            if plan.zero in (1, 2):
                cut = cut_of(held[name], lowered.states[name], plan)
                narrow = lowered.dtypes.get(name)
                if cut is not None:
                    if adopt and is_whole(held[name]) and not own[name].is_meta and narrow is None:
                        adopted.add(name)
                        value = own[name].detach()
                    elif value.data_ptr() == own[name].data_ptr():
                        value = value.clone()
                    self._split(name, value.to(world.device), cut, narrow)
                    continue
            if adopt and is_whole(held[name]) and not own[name].is_meta:
                self.parameters[name] = own[name]
                adopted.add(name)
            else:
                mine = value.to(world.device)
                mine = mine.clone() if mine.data_ptr() == own[name].data_ptr() else mine
                self.parameters[name] = nn.Parameter(mine, requires_grad=own[name].requires_grad)
            self.inputs[name] = self.parameters[name]
        self._buckets = list(self._make_buckets())
        if adopt:
            _release(model, set(names) - adopted)

    def _split(self, name: str, whole: Tensor, cut: Cut, narrow: str | None) -> None:
        part = cut.part(whole, self._world.comm("data").rank)
        if narrow is not None:
            part = part.clone(memory_format=torch.contiguous_format)
            whole = whole.to(getattr(torch, narrow))
        self._cuts[name] = cut
        self.inputs[name] = whole
        self.parameters[name] = nn.Parameter(part.contiguous())

    def _make_buckets(self) -> Iterator[tuple[Rows, list[str]]]:
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name in self._cuts:
            by_dtype.setdefault(self.inputs[name].dtype, []).append(name)
        for names in by_dtype.values():
            sizes = [self.inputs[name].nbytes for name in names]
            limit = bucket_limit(sum(sizes), self._bucket_bytes)
            for members in split_buckets(sizes, limit, limit):
                bucket = [names[i] for i in members]
                yield Rows(tuple(self._cuts[name] for name in bucket)), bucket

    def updated(self) -> None:
        """The optimizer has changed its parts: gather them, so that the graph reads the new values."""
        ahead: list[Gathering] = []
        comm = self._world.comm("data")
        for rows, names in self._buckets:
            wholes = [self.inputs[name] for name in names]
            parts = tuple(self.parameters[name].detach() for name in names)
            ahead.append(Gathering(comm, rows.plain, tuple(w.dtype for w in wholes), parts, wholes))
            if len(ahead) > 1:
                ahead.pop(0).wait()
        for gathering in ahead:
            gathering.wait()


def _release(model: nn.Module, names: set[str]) -> None:
    """Let go of the model's own copy of parameters that now live in parts."""
    renamed: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        first = renamed.get(id(parameter))
        if first is None and name in names:
            first = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            renamed[id(parameter)] = first
        if first is not None:
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._parameters[key] = first
