"""Batches of a step: a rank's rows of the global batch as a type of its own, microbatches, and the rows of replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.comm.protocol import World
from plait.compile.capture.batch import (
    at_rows,
    batch_form,
    batch_leaves,
    batch_structure,
    batch_tensors,
    count_rows,
    is_container,
    map_batch,
    map_rows,
    row_lists,
    row_sizes,
    select_rows,
    take_rows,
    unclear_lists,
)
from plait.errors import BatchError, CaptureError, Refusal, UnevenBatchError
from plait.plan.legality import uneven_micro, uneven_replicas
from plait.plan.plan import Plan


@dataclass(frozen=True)
class LocalBatch:
    """This rank's rows of a global batch.

    tree         the rows, a tree of tensors
    local_size   the number of rows here
    global_size  the number of rows over all ranks
    place        which global batch this is a part of, in words, for ranks to compare
    padding      the number of rows of weight zero at the end of the global batch

    Raises BatchError if no tensor has `local_size` rows.
    """

    tree: Any
    local_size: int
    global_size: int
    place: str = ""
    padding: int = 0

    def __post_init__(self) -> None:
        sizes = [num for _, num in row_sizes(self.tree)]
        if self.local_size not in sizes:
            raise BatchError(f"a local batch of {self.local_size} rows holds no tensor of that size: {sizes}")


def check_values(batch: Any) -> None:
    """Raise BatchError for a batch that no step can run on: one with a tensor on the meta device, or not dense."""
    leaves = batch_leaves(batch.tree if isinstance(batch, LocalBatch) else batch)
    if without := [name for name, leaf in leaves.items() if leaf.is_meta]:
        raise BatchError(
            f"{without[0]} of the batch is on the meta device, and has no values to compute with; give a tensor with"
            " values (explain, memory, simulate and search need none)"
        )


def without_inference(batch: Any) -> Any:
    """The batch with copies of tensors that were made under torch.inference_mode(), of which autograd keeps none."""
    return map_batch(lambda _, leaf: leaf.clone() if torch.is_tensor(leaf) and leaf.is_inference() else leaf, batch)


def global_like(batch: LocalBatch) -> Any:
    """Tensors of the shapes of the global batch that take no memory.

    Raises CaptureError for lists with a mapping for each row: those of other ranks may have other shapes.
    """
    if batch.local_size != batch.global_size and (lists := row_lists(batch.tree)):
        raise CaptureError(
            f"{lists[0]} of the batch is a list with an entry for each row, and a loader's batch holds this rank's rows"
            " alone; stack the entries, padded, as tensors, or give the trainer the global batch"
        )

    def stretched(leaf: Tensor, dim: int) -> Tensor:
        shape = (*leaf.shape[:dim], batch.global_size, *leaf.shape[dim + 1 :])
        return at_rows(leaf, dim, slice(0, 1)).expand(shape)

    return map_rows(stretched, batch.tree, batch.local_size)


def num_rows(batch: Any) -> int:
    """The number of rows of the global batch."""
    return batch.global_size if isinstance(batch, LocalBatch) else count_rows(batch)


def num_tokens(batch: Any) -> int:
    """The number of tokens of the global batch: the elements of its largest integer tensor of two dims or more, or its
    rows if it has none."""
    leaves = batch_tensors(batch.tree if isinstance(batch, LocalBatch) else batch)
    widest = max((leaf.numel() for leaf in leaves if leaf.ndim > 1 and not leaf.is_floating_point()), default=0)
    if isinstance(batch, LocalBatch):
        return (widest or batch.local_size) * batch.global_size // batch.local_size
    return widest or num_rows(batch)


def batch_part(batch: Any, index: int, count: int) -> Any:
    """Part `index` of `count` equal parts of a global batch's rows; the last part may be smaller.

    Raises BatchError if the last part would be empty.
    """
    rows = num_rows(batch)
    step = -(-rows // count)
    if step * (count - 1) >= rows:
        others = [f"{size} of {name}" for name, size in row_sizes(batch) if size != rows]
        counted = f", counted by the first dim of most of its tensors (but {others[0]})" if others else ""
        spec = "; or say with a batch_spec which tensors have rows, as BatchSpec({'x': 'rows'})" if others else ""
        raise BatchError(
            f"a batch of {rows} rows{counted} does not make {count} parts; give at least a row for each{spec}"
        )
    return take_rows(batch, rows, index * step, step)


def microbatches(batch: Any, num: int) -> list[Any]:
    """The batch's rows in `num` equal parts, in order; for a LocalBatch, this rank's rows of each part.

    Raises BatchError if `num` does not divide the rows, and for lists of rows of other shapes in each part.
    """
    if num == 1:
        return [batch]
    local = isinstance(batch, LocalBatch)
    tree = batch.tree if local else batch
    rows = _num_here(batch)
    if refusal := uneven_micro(num, rows, "each rank's part of the batch" if local else "the batch"):
        raise UnevenBatchError(refusal)
    step = rows // num
    parts = []
    for index in range(num):
        part = take_rows(tree, rows, index * step, step)
        if local:
            part = dataclasses.replace(batch, tree=part, local_size=step, global_size=batch.global_size // num)
        parts.append(part)
    _check_lists(tree, rows, num, "microbatches")
    return parts


def _check_lists(batch: Any, rows: int, num: int, of_what: str) -> None:
    """Raise BatchError for lists with a mapping for each row whose shapes differ among `num` parts of the batch, and
    for those that could be several inputs as well."""
    if num > 1 and (unclear := unclear_lists(batch)):
        raise BatchError(
            f"{unclear[0]} of the batch is a list of {rows} mappings, whose tensors have {rows} rows each, and the"
            f" batch has {rows} rows: {of_what} cannot tell whether it has an entry for each row, or is several inputs;"
            " stack the entries of rows as tensors, or give several inputs as a mapping"
        )
    if num == 1 or not (lists := row_lists(batch)):
        return
    each = rows // num
    forms = [batch_form(take_rows(batch, rows, index * each, each)) for index in range(num)]
    if len({*forms}) > 1:
        raise BatchError(
            f"{lists[0]} of the batch is a list with an entry for each row, and the entries of {num} {of_what} have"
            f" other shapes, so no graph is that of all: {forms[0]} and {next(f for f in forms if f != forms[0])};"
            " pad the entries to one shape, or leave micro, pipeline, sync and compress out of the plan"
        )


def first_microbatch(batch: Any, num: int) -> Any:
    """The first of `num` microbatches; the whole batch if `num` does not divide it, as may be in an evaluation."""
    return batch if _num_here(batch) % num else microbatches(batch, num)[0]


def step_key(seed: int, step: int) -> int:
    """The key of a step's random draws."""
    return (seed * 0x9E3779B1 + step) & ((1 << 62) - 1)


def batches_of(data: Any, known: str | None) -> Iterable[Any]:
    """The batches of a loader or of a list; a batch alone gives itself. `known` is the structure of the batches so
    far.

    Raises BatchError for a list that may be either one batch or several, and has the structure of neither.
    """
    if is_loader(data):
        return data  # type: ignore[no-any-return]
    if type(data) not in (list, tuple) or not data or batch_structure(data) == known:
        return [data]
    if any(isinstance(one, LocalBatch) for one in data):
        return data  # type: ignore[no-any-return]
    each = {batch_structure(one) for one in data}
    if each == {known}:
        return data  # type: ignore[no-any-return]
    if not all(is_container(one) and not torch.is_tensor(one) for one in data):  # such as [x, y]
        if known is None or known.startswith("tuple("):
            return [data]
    elif known is None or not known.startswith("tuple("):
        return data  # type: ignore[no-any-return]
    raise BatchError(
        f"a {type(data).__name__} of {len(data)} may be one batch, or that many batches, and the trainer has seen"
        f" batches like {known}: as one it is {batch_structure(data)}, and its elements {' and '.join(sorted(each))}"
        "; give batches of that form, one alone as it is and several as iter([...])"
    )


def is_loader(data: Any) -> bool:
    """Whether `data` yields batches, rather than being one."""
    return isinstance(data, Iterable) and not isinstance(data, LocalBatch) and not is_container(data)


def rows_of_replica(batch: Any, plan: Plan, world: World) -> LocalBatch:
    """This rank's rows of a global batch, as a part of its replica's batch, microbatch after microbatch as in the
    loader.

    Raises BatchError if the ranks do not divide the batch.
    """
    num = plan.mesh.axis_size(plan.relaxed_axis)
    if isinstance(batch, LocalBatch):
        return dataclasses.replace(batch, global_size=batch.global_size // num)
    rows, parts, micro = num_rows(batch), plan.num_batch_parts, plan.micro
    if rows % (parts * micro):
        what = f"{parts} parts of {micro} microbatches do not divide the batch of {rows} rows (plan {plan.title})"
        raise UnevenBatchError(Refusal(what, "", f"give a multiple of {parts * micro}"))
    each = rows // (parts * micro)
    part = plan.batch_part(world.mesh.coordinates(world.rank))
    places = torch.arange(rows).view(micro, parts, each)[:, part].reshape(-1)
    tree = select_rows(batch, rows, places)
    return LocalBatch(tree, each * micro, rows // num)


def batch_of_replica(batch: Any, plan: Plan) -> Any:
    """A batch of the shapes that one replica trains on: the first rows of the global batch, or all of it without
    replicas.

    Raises BatchError if the replicas do not divide the batch, and for lists of rows of other shapes in each part.
    """
    if not plan.relaxed_axis:
        return batch
    num, rows = plan.mesh.axis_size(plan.relaxed_axis), num_rows(batch)
    if refusal := uneven_replicas(plan, rows):
        raise UnevenBatchError(refusal)
    _check_lists(batch, rows, num, "replicas")
    return take_rows(batch, rows, 0, rows // num)


def replica_key(key: int, index: int) -> int:
    """The key of a replica's random draws. The first replica's key is the step's."""
    return (key + index * 0xD1B54A32D192ED03) & ((1 << 62) - 1)


def _num_here(batch: Any) -> int:
    """The number of rows on this rank."""
    return batch.local_size if isinstance(batch, LocalBatch) else num_rows(batch)
