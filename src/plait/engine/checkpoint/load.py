"""Loads a checkpoint into a run of any plan, or weights alone from other files.

First what the files have is compared with the run, then checksums are verified, and only then is anything changed. Each
rank reads the parts that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import BaseModel, TypeAdapter
from torch import Tensor, nn

from plait.comm.protocol import World
from plait.compile.ir.dtypes import torch_name
from plait.engine.checkpoint import random_state, replica_state
from plait.engine.checkpoint.barrier import Barrier
from plait.engine.checkpoint.checkpoint_folders import check_files, has_checkpoints, newest, older_than
from plait.engine.checkpoint.json_values import Count, Text, Whole, checked, decode, tensor_names
from plait.engine.checkpoint.local_shards import is_away
from plait.engine.checkpoint.manifest import (
    EMA,
    MODEL,
    NAME,
    STATE,
    Manifest,
    Shapes,
    check_model,
    check_optimizer,
    refuse_tables,
    saved_model,
    saved_state,
)
from plait.engine.checkpoint.plain_values import check_groups, check_scheduler
from plait.engine.checkpoint.snapshot import (
    expected_state,
    persistent_buffers,
    persistent_of,
    set_group_options,
    state_layout,
)
from plait.engine.checkpoint.source import Source, Wanted, whole_of
from plait.engine.checkpoint.storage import Folder, Location, folder_of
from plait.engine.slices import Fragment, fragments
from plait.engine.train_state import TrainState
from plait.errors import CheckpointError
from plait.optim.combined import each_parameter, set_own_values, title_of

_AT_ONCE = 256 << 20  # bytes of optimizer state that are read before they are moved to where the plan keeps them


def load(run: TrainState, path: Location) -> dict[str, Any]:
    """Load the newest checkpoint of the folder `path`, or the checkpoint `path` itself. Returns its `extra`.

    Raises CheckpointError, with nothing changed, for a damaged file, or for another model or optimizer. All ranks must
    call it.
    """
    barrier = Barrier(run.world)
    folder = folder_of(barrier.on_first_rank("which", lambda: _choose(path)))
    found: list[_Load] = []
    barrier.on_all_ranks("fits", lambda: found.append(_Load(run, folder)))
    loading = found[0]
    barrier.on_all_ranks("whole", loading.check_files)
    try:
        barrier.on_all_ranks("read", loading.fill)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; part of it is in place: load a checkpoint before going on") from None
    extra = loading.take_values()
    run.held.updated()
    barrier.on_all_ranks("read its own", loading.take_own)
    return extra


def look_up(world: World, model: nn.Module, path: Location) -> tuple[str, dict[str, Any]]:
    """Find the checkpoint that `load` would load, for a model that has seen no batch. Returns its path and its
    `extra`.

    Raises CheckpointError for a damaged file, or for another model. All ranks must call it.
    """
    barrier = Barrier(world)
    folder = folder_of(barrier.on_first_rank("which", lambda: _choose(path)))
    found: list[dict[str, Any]] = []

    def look() -> None:
        manifest = Manifest.read(folder)
        common = manifest.values["common"]
        checked(_COMMON, common, f"{folder}/{NAME}: values.common")
        what, here = f"the checkpoint {folder}", _shapes_of(model)
        refuse_tables(what, manifest, here)
        check_model(what, saved_model(manifest), here)
        tensors = {name: _empty(manifest, name) for name in tensor_names(common["extra"])}
        source, wanted = Source.checkpoint(folder, manifest), {name: whole_of(t) for name, t in tensors.items()}
        source.check({name: one.fragments for name, one in wanted.items()})
        source.fill(wanted)
        found.append(decode(common["extra"], tensors.__getitem__))

    barrier.on_all_ranks("fits", look)
    return str(folder), found[0]


def look_up_weights(world: World, model: nn.Module, path: Location) -> None:
    """Check that `load_weights` would succeed for a model that has seen no batch. Raises CheckpointError if not. All
    ranks must call it."""
    Barrier(world).on_all_ranks("fits", lambda: _find_weights(model, _shapes_of(model), path))


def check(run: TrainState, path: Location) -> dict[str, object]:
    """Check by the manifest alone that `load` would succeed, for a run of one rank. Returns `extra`, with names for
    tensors.

    Raises the errors of `load`.
    """
    extra: dict[str, Any] = _Load(run, folder_of(_choose(path)))._common["extra"]
    return extra


def load_weights(run: TrainState, path: Location) -> None:
    """Load parameters and buffers alone: from a checkpoint, a safetensors file, or a folder of such files.

    Values are converted to the model's dtypes. Raises CheckpointError, with nothing changed, for other names or shapes.
    All ranks must call it.
    """
    barrier = Barrier(run.world)
    found: list[tuple[Source, dict[str, str]]] = []
    barrier.on_all_ranks("fits", lambda: found.append(_find_weights(run.held.model, _shapes(run), path)))
    source, names = found[0]
    wanted = _wanted_model(run)
    barrier.on_all_ranks("whole", lambda: source.check({names[name]: one.fragments for name, one in wanted.items()}))
    barrier.on_all_ranks("read", lambda: _fill_model(run, source, names, wanted))
    run.held.updated()
    if run.replicas is not None:
        run.replicas.begin(run.step_number)


class _Common(BaseModel):
    """The values that every checkpoint of a run has, as they are encoded."""

    step: Count
    seed: Whole
    optimizer: Text
    groups: list[dict[Text, Any]]
    scheduler: Any
    loss_scale: Any
    extra: dict[Text, Any]


_COMMON = TypeAdapter(_Common)


class _Load:
    """One rank's side of a load. Raises CheckpointError if the checkpoint is of another model or optimizer."""

    def __init__(self, run: TrainState, folder: Folder) -> None:
        self._run = run
        self._manifest = manifest = Manifest.read(folder)
        self._source = Source.checkpoint(folder, manifest)
        self._common = manifest.values["common"]
        checked(_COMMON, self._common, f"{folder}/{NAME}: values.common")
        self._model = _wanted_model(run)
        mine = f"random/{run.world.rank}/"
        random = [n for n in manifest.tensors if n.startswith(mine)] if random_state.has_own(run.world) else []
        self._small = {name: _empty(manifest, name) for name in (*tensor_names(self._common), *random)}
        what, optimizer = f"the checkpoint {folder}", run.optimizer
        assert optimizer is not None
        refuse_tables(what, manifest, _shapes(run))
        check_model(what, saved_model(manifest), _shapes(run))
        expected = {name: set(keys) for name, keys in expected_state(run).items()}
        check_optimizer(what, manifest, title_of(optimizer), expected, len(optimizer.param_groups))
        self._check_plain(optimizer)
        self._names = {id(p): name for name, p in run.held.parameters.items()}
        self._saved = saved_state(manifest)
        self._parts = self._state_parts()
        self._average = _saved_average(run, manifest)

    def _check_plain(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the options of groups and the scheduler's state with the live ones: the values of tensors among them
        are not read yet, their shapes are known."""
        scheduler = self._run.scheduler
        try:
            check_groups(optimizer.param_groups, decode(self._common["groups"], self._small.__getitem__))
            if scheduler is not None and self._common["scheduler"] is not None:
                check_scheduler(scheduler, decode(self._common["scheduler"], self._small.__getitem__))
        except CheckpointError as error:
            raise CheckpointError(f"{self._source.folder}/{NAME}: values.common.{error}") from None

    def check_files(self) -> None:
        """Verify the checksums of the bytes that this rank will read."""
        needed = {MODEL + name: one.fragments for name, one in self._model.items()}
        needed |= {name: held for name, (_, held) in self._parts.items()}
        needed |= {name: one.fragments for name, one in self._average.items()}
        needed |= {name: whole_of(tensor).fragments for name, tensor in self._small.items()}
        try:
            self._source.check(needed)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{older_than(self._source.folder)}") from None

    def fill(self) -> None:
        """Read all tensors. Optimizer state is read in portions, because it may have to be moved to disk."""
        _fill_model(self._run, self._source, {name: MODEL + name for name in self._model}, self._model)
        self._source.fill({name: whole_of(tensor) for name, tensor in self._small.items()})
        if self._run.average is not None and not self._average:
            self._run.average.begin(self._run.held)
        self._source.fill(self._average)
        optimizer = self._run.optimizer
        assert optimizer is not None
        batch: dict[str, Wanted] = {}
        members: list[nn.Parameter] = []
        num_bytes = 0
        for group, parameter in each_parameter(optimizer):
            if id(parameter) not in self._names:
                continue
            before = optimizer.state.pop(parameter, {})
            if after := self._state_of(parameter, before, group, batch):
                optimizer.state[parameter] = after
                members.append(parameter)
                num_bytes += sum(value.nbytes for value in after.values() if torch.is_tensor(value))
            if num_bytes >= _AT_ONCE:
                self._settle(batch, members)
                num_bytes = 0
        self._settle(batch, members)

    def take_values(self) -> dict[str, object]:
        """Load everything but tensors of model and optimizer. Returns what the caller saved as `extra`."""
        run, own = self._run, self._manifest.values["own"]
        common = decode(self._common, self._small.__getitem__)
        assert run.optimizer is not None
        set_group_options(run, common["groups"])
        with self._taking("common.optimizer_values"):
            set_own_values(run.optimizer, common.get("optimizer_values", {}))
        with self._taking("common.scheduler"):
            if run.scheduler is not None and common["scheduler"] is not None:
                run.scheduler.load_state_dict(common["scheduler"])
        with self._taking("common.loss_scale"):
            if run.loss_scale is not None and common["loss_scale"] is not None:
                run.loss_scale.load_state_dict(common["loss_scale"])
        mine = f"random/{run.world.rank}"
        if mine in own and random_state.has_own(run.world):
            tensors = {name.rpartition("/")[2]: t for name, t in self._small.items() if name.startswith(mine + "/")}
            with self._taking(f"own.{mine}"):
                random_state.restore(run.world, tensors, decode(own[mine], self._small.__getitem__))
        run.seed, run.step_number = common["seed"], common["step"]
        extra: dict[str, Any] = common["extra"]
        return extra

    @contextmanager
    def _taking(self, place: str) -> Iterator[None]:
        """Context that turns any error of an object that rejects its saved state into a CheckpointError."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"{self._source.folder}/{NAME}: values.{place} cannot be taken over: {type(error).__name__}: {error}"
            ) from error

    def take_own(self) -> None:
        """Load the state that each replica has for itself."""
        replica_state.restore(self._run, self._source, self._manifest)

    def _state_parts(self) -> dict[str, tuple[tuple[int, ...], tuple[Fragment, ...]]]:
        """(shape of this rank's part, its fragments) of each tensor of optimizer state that belongs to this rank."""
        run, mesh = self._run, self._run.world.mesh
        here = mesh.coordinates(run.world.rank)
        assert run.optimizer is not None
        known = self._names  # empty on a rank without parameters, whose optimizer has one empty parameter
        trained = {known[id(p)] for group in run.optimizer.param_groups for p in group["params"] if id(p) in known}
        found = {}
        for name, keys in self._saved.items():
            for key in keys if name in trained else ():
                full = f"{STATE}{name}/{key}"
                if full in self._manifest.tensors:
                    layout = state_layout(run, name, key, self._manifest.tensors[full][0], whole=True)
                    found[full] = (layout.local_shape(mesh, here), fragments(layout, mesh, here))
        return found

    def _state_of(
        self, parameter: nn.Parameter, before: Mapping[str, object], group: Mapping[str, object],
        batch: dict[str, Wanted],
    ) -> dict[str, object]:  # fmt: skip
        """The new state of a parameter; the tensors to be read for it are added to `batch`."""
        name, own = self._names[id(parameter)], self._manifest.values["own"]
        after: dict[str, Any] = {}
        for key in sorted(self._saved.get(name, ())):
            full = f"{STATE}{name}/{key}"
            if full in own:
                after[key] = decode(own[full], self._small.__getitem__)
                continue
            shape, held = self._parts[full]
            dtype = getattr(torch, self._manifest.tensors[full][1])
            after[key] = _place(before.get(key), parameter, shape, dtype, group)
            batch[full] = Wanted(held, after[key])
        return after

    def _settle(self, batch: dict[str, Wanted], members: list[nn.Parameter]) -> None:
        """Read a portion of optimizer state, and move it to where the plan keeps it."""
        self._source.fill(batch)
        for parameter in members:
            self._run.update.settle(parameter)
        batch.clear()
        members.clear()


def _saved_average(run: TrainState, manifest: Manifest) -> dict[str, Wanted]:
    """This rank's parts of the moving average, if both the run and the checkpoint have one."""
    if run.average is None:
        return {}
    mesh, layouts = run.world.mesh, run.held.layouts
    here = mesh.coordinates(run.world.rank)
    return {
        EMA + name: Wanted(fragments(layouts[name], mesh, here), part)
        for name, part in run.average.tensors.items()
        if EMA + name in manifest.tensors
    }


def _choose(path: Location) -> str:
    """On one rank: the path of the checkpoint, after checking that all its files exist."""
    folder = newest(path)
    try:
        check_files(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{older_than(folder)}") from None
    return str(folder)


def _shapes(run: TrainState) -> Shapes:
    """(shape, dtype) of every whole parameter and persistent buffer of the run's model."""
    held = run.held
    here = {name: (layout.shape, torch_name(held.dtypes[name])) for name, layout in held.layouts.items()}
    persistent = persistent_of(held)
    return here | {n: (tuple(b.shape), torch_name(b.dtype)) for n, b in held.buffers.items() if n in persistent}


def _shapes_of(model: nn.Module) -> Shapes:
    """(shape, dtype) of every parameter and persistent buffer of a model that has seen no batch."""
    own = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in persistent_buffers(model)
    }
    return {name: (tuple(tensor.shape), torch_name(tensor.dtype)) for name, tensor in own.items()}


def _wanted_model(run: TrainState) -> dict[str, Wanted]:
    """This rank's parts of parameters, and its buffers, to be read."""
    held, mesh = run.held, run.world.mesh
    here = mesh.coordinates(run.world.rank)
    found = {
        name: Wanted(fragments(held.layouts[name], mesh, here), parameter)
        for name, parameter in held.parameters.items()
    }
    persistent = persistent_of(held)
    return found | {name: whole_of(b) for name, b in held.buffers.items() if name in persistent}


def _place(
    before: object, parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype, group: Mapping[str, object]
) -> Tensor:
    """A tensor to read a parameter's state into: the existing one if it fits."""
    if torch.is_tensor(before) and not is_away(before) and tuple(before.shape) == shape and before.dtype == dtype:
        return before
    away = is_away(parameter)
    if shape and shape == tuple(parameter.shape) and not away:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)  # fused steps need equal strides
    on_device = bool(shape) or group.get("capturable") or group.get("fused")  # these have counters on the device
    return torch.empty(shape, dtype=dtype, device=parameter.device if on_device and not away else "cpu")


def _empty(manifest: Manifest, name: str) -> Tensor:
    shape, dtype = manifest.tensors[name]
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _find_weights(model: nn.Module, here: Shapes, path: Location) -> tuple[Source, dict[str, str]]:
    """Where the weights are, and the name in the files of each parameter and buffer."""
    if has_checkpoints(path):
        folder = newest(path)
        manifest = check_files(folder)
        source, prefix, there = Source.checkpoint(folder, manifest), MODEL, dict(saved_model(manifest))
    else:
        source, prefix = Source.safetensors(path), ""
        there = dict(source.tensors)
    names: dict[str, str] = {}
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = firsts[id(parameter)]
        if name in there and names.setdefault(first, name) != name:
            del there[name]  # another name of a tied tensor
    for first, name in names.items():
        there[first] = there.pop(name)
    check_model(str(path), there, here, dtypes=False)
    return source, {name: prefix + names.get(name, name) for name in here}


def _fill_model(run: TrainState, source: Source, names: Mapping[str, str], wanted: Mapping[str, Wanted]) -> None:
    """Read parameters and buffers; offloaded ones one by one."""
    source.fill({names[name]: one for name, one in wanted.items() if not is_away(one.into)})
    for name, one in wanted.items():
        if is_away(one.into):
            part = torch.empty(one.into.shape, dtype=one.into.dtype)
            source.fill({names[name]: Wanted(one.fragments, part)})
            run.held.set_local(name, part)
