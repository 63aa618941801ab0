"""Offloads parameters, gradients and activations: the calls that move them, and the passes that write these into a
graph.

Parameters are fetched before their use and freed after it, in forward and again in backward (Rajbhandari et al. 2021,
"ZeRO-Infinity"). Those that the end of the forward pass reads are kept for the start of the backward pass. Gradients
are offloaded as soon as they are computed; sums that later microbatches add to are fetched like parameters.

An activation is offloaded as soon as it is computed, and comes back one bucket ahead of its first reader in the
backward pass (Rhu et al. 2016, "vDNN"). Those that the backward pass reads first stay on the device. Views of an
activation are recomputed from what came back.

A graph reaches offloaded tensors through one placeholder, `offload`, as it reaches other ranks through `world`. The
placeholder stands for an `OffloadStore`, which backends/eager/offload/store.py implements. Keys are `input/NAME` for a
parameter as the graph reads it, `gradient/NAME` for a gradient as the optimizer reads it, and `sum/NAME` for the sum of
a gradient over earlier microbatches. On a CPU, host memory is the device's memory, so nothing is offloaded to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, Node

from plait.backends.eager.collectives import WORLD, take_part
from plait.backends.eager.rewrites.bucket_gradients import bucket_part
from plait.backends.eager.rewrites.read_ahead import in_buckets, read_ahead
from plait.compile.ir.calls import is_tensor, is_view, num_bytes, output_node, placeholders, settled, view_anew
from plait.compile.ir.node_info import NodeInfo, describe, info_of, is_backward
from plait.compile.ops import OpSpec, register
from plait.compile.passes.zero import readers_in, repeat_views
from plait.cost.memory_model import padded
from plait.plan.sharding_plan import is_large

OFFLOAD = "offload"  # name of the placeholder of the rank's OffloadStore


class Arrival(Protocol):
    """Tensors in flight to the device."""

    def wait(self) -> list[Tensor]:
        """The tensors, in new memory."""


class OffloadStore(Protocol):
    """Keeps tensors that are off the device. The transfers of a tensor happen in the order of the calls."""

    def fetch(self, keys: Sequence[str]) -> Arrival:
        """Start to bring copies of tensors to the device."""

    def leave(self, key: str, tensor: Tensor) -> None:
        """Start to offload a tensor, to be kept under the key. Its memory on the device is freed once that is done and
        nothing else refers to it."""

    def stash(self, offset: int, tensor: Tensor) -> Any:
        """Start to offload a tensor until it is unstashed. Returns what `unstash` takes. `offset` is a number of bytes
        that no other tensor uses that is stashed at the same time."""

    def unstash(self, stashed: Sequence[object]) -> Arrival:
        """Start to bring stashed tensors back."""


def offload_placeholder(graph: Graph) -> Node:
    """The placeholder of the OffloadStore, which is added to the graph if it has none."""
    found = placeholders(graph)
    for node in found:
        if node.name == OFFLOAD:
            return node
    world = next((node for node in found if node.name == WORLD), None)
    with graph.inserting_after(world) if world else graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(OFFLOAD)
    describe(node, NodeInfo(kind="offload", name=OFFLOAD), None)
    return node


def fetch_start(offload: OffloadStore, keys: Sequence[str]) -> Arrival:
    return offload.fetch(keys)


def arrival_wait(arrival: Arrival) -> list[Tensor]:
    return arrival.wait()


def leave(offload: OffloadStore, key: str, tensor: Tensor) -> None:
    offload.leave(key, tensor)


def stash(offload: OffloadStore, offset: int, tensor: Tensor) -> Any:
    return offload.stash(offset, tensor)


def unstash_start(offload: OffloadStore, *stashed: object) -> Arrival:
    return offload.unstash(stashed)


register(fetch_start, arrival_wait, leave, stash, unstash_start, spec=OpSpec(transfers=True))


aten = torch.ops.aten


def fetch_parameters(graph: Graph, away: Collection[str], bucket_bytes: int) -> Graph:
    """Have the graph fetch the parameters named in `away`, in buckets. Changes `graph` and returns it."""
    held = [n for n in placeholders(graph) if info_of(n).kind == "parameter" and info_of(n).name in away]
    repeat_views(graph, held)
    forward, backward = readers_in("forward", held), readers_in("backward", held)
    buckets = in_buckets(graph, forward, bucket_bytes)
    kept = [node for node in buckets[-1] if node in backward] if buckets else []
    before = min((user for node in kept for user in backward[node]), default=None)
    for node in kept:
        forward[node] += backward.pop(node)
    _fetch(graph, buckets, forward, "input", None)
    _fetch(graph, in_buckets(graph, backward, bucket_bytes), backward, "input", before)
    return graph


def fetch_sums(graph: Graph, kind: str, away: Collection[str], bucket_bytes: int) -> Graph:
    """Have the graph fetch the sums over earlier microbatches of the gradients named in `away`, which are kept under
    keys of this kind. Changes `graph` and returns it."""
    held = [n for n in placeholders(graph) if info_of(n).kind == "sum" and info_of(n).name in away]
    readers = readers_in("backward", held)
    _fetch(graph, in_buckets(graph, readers, bucket_bytes), readers, kind, None)
    return graph


def offload_gradients(graph: Graph, kind: str, gradients: Mapping[int, str], away: Collection[str]) -> Graph:
    """Have the graph offload the gradients named in `away` as soon as they are computed, under keys of this kind.

    `gradients` has the names of the outputs, by index. The sum of a bucket is waited for when the next bucket has
    started. Changes `graph` and returns it.
    """
    end = output_node(graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    offloaded = {i: name for i, name in gradients.items() if name in away and isinstance(results[i], Node)}
    if not offloaded:
        return graph
    _wait_early(graph)
    offload = offload_placeholder(graph)
    for index, name in offloaded.items():
        node = results[index]
        if node.target in (take_part, aten.add_.Tensor):
            max(node.all_input_nodes).append(node)
        with graph.inserting_after(settled(node)):
            results[index] = graph.call_function(leave, (offload, f"{kind}/{name}", node))
        made = info_of(node)
        describe(results[index], NodeInfo(phase="backward", module=made.module, owner=made.owner), None)
    end.args = (tuple(results),)
    graph.lint()
    return graph


def _fetch(
    graph: Graph,
    buckets: Sequence[Sequence[Node]],
    readers: Mapping[Node, Sequence[Node]],
    kind: str,
    before: Node | None,
) -> None:
    if not buckets:
        return
    offload = offload_placeholder(graph)

    def start(members: list[Node]) -> Node:
        return graph.call_function(fetch_start, (offload, tuple(f"{kind}/{info_of(n).name}" for n in members)))

    read_ahead(graph, buckets, readers, start, arrival_wait, "home", before)
    graph.lint()


def _wait_early(graph: Graph) -> None:
    """Move the wait for each bucket, and its items, from the end to behind the start of the next bucket."""
    starts = [node for node in graph.nodes if bucket_part(node) == "start"]
    waits = {node.args[1]: node for node in graph.nodes if bucket_part(node) == "wait"}
    for start, after in itertools.pairwise(starts):
        wait = waits[start]
        after.append(wait)
        last = wait
        for item in list(wait.users):
            last.append(item)
            last = item


def stash_activations(graph: Graph, bucket_bytes: int) -> Graph:
    """Have the graph offload large values of the forward pass until backward reads them.

    Changes `graph` and returns it. Runs before any pass that reorders calls: all that follows the first call of
    backward counts as backward.
    """
    nodes = list(graph.nodes)
    calls = [node for node in nodes if node.op == "call_function"]
    begin = next((node for node in calls if is_backward(node)), None)
    if begin is None:
        return graph
    late = set(nodes[nodes.index(begin) :])
    early = [node for node in calls if node not in late]
    views = [node for node in early if is_view(node)]
    late |= view_anew(graph, views, lambda user: user in late and user.op != "output")
    readers = {
        node: users
        for node in early
        if is_tensor(node) and is_large(node.meta["val"].numel()) and not is_view(node)
        if (users := [u for u in node.users if u in late]) and all(u.op != "output" for u in users)
    }
    first, *buckets = in_buckets(graph, readers, bucket_bytes) or [[]]
    if not buckets:
        return graph
    offload = offload_placeholder(graph)
    tokens: dict[Node, Node] = {}
    offset = 0
    offloaded = {node for bucket in buckets for node in bucket}
    for node in [node for node in early if node in offloaded]:
        with graph.inserting_after(node):
            token = tokens[node] = graph.call_function(stash, (offload, offset, node))
        made, size = info_of(node), num_bytes(node.meta["val"])
        describe(token, NodeInfo(phase=made.phase, module=made.module, owner=made.owner, num_bytes=size), None)
        offset += padded(node.meta["val"].nbytes)

    def start(members: list[Node]) -> Node:
        return graph.call_function(unstash_start, (offload, *(tokens[node] for node in members)))

    before = min(user for node in first for user in readers[node])
    read_ahead(graph, buckets, readers, start, arrival_wait, "home", before)
    graph.lint()
    return graph


def stashed_bytes(graph: Graph) -> int:
    """Bytes that a graph has stashed at once, each value in whole pages."""
    return sum(padded(info_of(node).num_bytes) for node in graph.nodes if node.target is stash)
