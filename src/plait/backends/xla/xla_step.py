"""A captured step as compiled programs of XLA: forward and backward, the optimizer's update, and both in one.

    parameters, buffers, leaves of the batch, random numbers -> loss, gradients, new buffers
    parameters, gradients, state of the optimizer            -> new parameters, new state

Arrays are global, with shardings from the plan's layouts, and XLA's partitioner inserts the collectives (Xu et al.
2021, "GSPMD"). Microbatches are a `lax.scan` that adds up gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax
from torch.fx import Graph

from plait.backends.xla.element_update import Numbers, StateArrays, UpdateOfKind, updated
from plait.backends.xla.graph_function import GraphFunction, simplified
from plait.backends.xla.lowerings.table import jax_dtype
from plait.backends.xla.mesh_shardings import Constrained, ParameterShardings
from plait.compile.capture.captured import Captured
from plait.compile.ir.calls import output_node

Arrays = dict[str, Array]
Stepped = tuple[Arrays, StateArrays, Array | None, Array]  # parameters, state, norm, whether updated


@dataclass(frozen=True)
class Inputs:
    """What a step reads beside its parameters, as arrays.

    buffers    by name; also frozen parameters that the step changes, and tensors from outside the model
    constants  by name
    leaves     of the batch, by name; with several microbatches they have a leading dim for them
    seeds      [microbatches, 2] uint32: the lower and upper 32 bits of the seed of random numbers
    scale      the loss scale; None without one
    """

    buffers: Arrays
    constants: Arrays
    leaves: Arrays
    seeds: Array
    scale: Array | None = None


jax.tree_util.register_dataclass(Inputs, ["buffers", "constants", "leaves", "seeds", "scale"], [])


@dataclass(frozen=True)
class Found:
    """The results of a step.

    loss     the loss of the whole batch
    parts    (sum, weight), if the loss function returned these
    buffers  new values, by name
    aux      outputs beside the loss by (kind, name), each with a leading dim of microbatches
    """

    loss: Array
    parts: tuple[Array, Array] | None
    buffers: Arrays
    aux: dict[str, Arrays]


jax.tree_util.register_dataclass(Found, ["loss", "parts", "buffers", "aux"], [])


@dataclass(frozen=True)
class Rules:
    """How an update treats gradients.

    clip         the 2-norm to which gradients are clipped; None: they are not
    guards_loss  whether there is no update if the loss is not finite
    guards       whether there is no update if a gradient is not finite
    """

    clip: float | None = None
    guards_loss: bool = False
    guards: bool = False


class XlaStep:
    """The programs of one captured step, with or without gradients.

    Args:
        captured: the step of one microbatch, on global shapes.
        num_micro: the number of microbatches.
        placed: the shardings of the parameters.
        graph: the step's graph with constraints, and their shardings by name (mesh_shardings.py).

    Raises PlanError for an op that cannot be lowered.
    """

    def __init__(
        self, captured: Captured, num_micro: int, placed: ParameterShardings, graph: tuple[Graph, Constrained]
    ) -> None:
        self.captured, self.num_micro, self._placed = captured, num_micro, placed
        self.graph = GraphFunction(simplified(graph[0]), graph[1])
        nodes: Any = output_node(captured.graph).args[0]
        pairs = list(zip(captured.outputs, nodes, strict=True))
        self.gradient_dtypes: dict[str, torch.dtype] = {
            o.name: n.meta["val"].dtype for o, n in pairs if o.kind == "gradient"
        }
        self._changed = [o.name for o in captured.outputs if o.kind == "buffer"]
        self._combined: dict[tuple[tuple[UpdateOfKind, ...], Rules], Callable[..., Any]] = {}
        # (parameters, inputs) -> (Found, gradients)
        self.run: Callable[[Arrays, Inputs], tuple[Found, Arrays]] = jax.jit(self._run)

    def _one(self, parameters: Arrays, inputs: Inputs, seed: Array) -> dict[str, Arrays]:
        """One microbatch. Returns its results by kind and name."""
        given: dict[str, Array | None] = {}
        for one in self.captured.inputs:
            if one.kind == "parameter":
                given[one.node] = parameters[one.name]
            elif one.kind == "scale":
                given[one.node] = inputs.scale
            elif one.kind != "key":
                kinds = {"buffer": inputs.buffers, "batch": inputs.leaves, "constant": inputs.constants}
                given[one.node] = kinds[one.kind][one.name]
        found: dict[str, Arrays] = {}
        for output, value in zip(self.captured.outputs, self.graph(given, seed), strict=True):
            if value is not None:
                found.setdefault(output.kind, {})[output.name] = value
        if "gradient" in found:
            found["gradient"] = _constrained(found["gradient"], self._placed.kept)
        return found

    def _run(self, parameters: Arrays, inputs: Inputs) -> tuple[Found, Arrays]:
        """All microbatches. Returns what they have found, and the gradients of the loss of the whole batch."""
        whole = _constrained(parameters, self._placed.computed)
        if self.num_micro == 1:
            found = self._one(whole, inputs, inputs.seeds[0])
            each = {kind: {n: v[None] for n, v in found.get(kind, {}).items()} for kind in _OF_MICROBATCHES}
            gradients, buffers = found.get("gradient", {}), found.get("buffer", {})
        else:
            gradients, buffers, each = self._scanned(whole, inputs)
        loss, parts, factor = _joined(each, self.num_micro, inputs.scale)
        if factor is not None:
            gradients = {name: g * factor.astype(g.dtype) for name, g in gradients.items()}
        gradients = _constrained(gradients, self._placed.kept)
        return Found(loss, parts, buffers, {kind: each[kind] for kind in ("aux", "aux_weight")}), gradients

    def _scanned(self, parameters: Arrays, inputs: Inputs) -> tuple[Arrays, Arrays, dict[str, Arrays]]:
        kept = self._placed.kept

        def step(
            carried: tuple[Arrays, Arrays], given: tuple[Arrays, Array]
        ) -> tuple[tuple[Arrays, Arrays], dict[str, Arrays]]:
            sums, buffers = carried
            leaves, seed = given
            here = replace(inputs, buffers=inputs.buffers | buffers, leaves=leaves)
            found = self._one(parameters, here, seed)
            new = found.get("gradient", {})
            sums = {name: sums[name] + new[name] for name in sums}
            return (sums, found.get("buffer", {})), {kind: found.get(kind, {}) for kind in _OF_MICROBATCHES}

        zeros = {
            name: lax.with_sharding_constraint(jnp.zeros(parameters[name].shape, jax_dtype(dtype)), kept[name])
            for name, dtype in self.gradient_dtypes.items()
        }
        changed = {name: inputs.buffers[name] for name in self._changed}
        (sums, buffers), each = lax.scan(step, (zeros, changed), (inputs.leaves, inputs.seeds))
        return sums, buffers, each

    def step_and_update(self, updates: tuple[UpdateOfKind, ...], rules: Rules) -> Callable[..., Any]:
        """Forward, backward and update in one program, which takes over the memory of parameters and state.

        (trained parameters, others, state, inputs, numbers) -> (found, parameters, state, norm, whether updated)
        """
        key = (updates, rules)
        if key not in self._combined:

            def run(trained: Arrays, others: Arrays, state: StateArrays, inputs: Inputs, numbers: Numbers) -> Any:
                found, gradients = self._run(trained | others, inputs)
                loss = found.loss if rules.guards_loss else None
                return found, *_stepped(self._placed, updates, rules, trained, gradients, state, numbers, loss)

            self._combined[key] = jax.jit(run, donate_argnums=(0, 2))
        return self._combined[key]


def update_alone(placed: ParameterShardings, updates: tuple[UpdateOfKind, ...], rules: Rules) -> Callable[..., Stepped]:
    """The update alone: (parameters, gradients, state, numbers) -> (parameters, state, norm, whether updated)."""

    def run(parameters: Arrays, gradients: Arrays, state: StateArrays, numbers: Numbers) -> Stepped:
        return _stepped(placed, updates, rules, parameters, gradients, state, numbers, None)

    return jax.jit(run, donate_argnums=(0, 1, 2))


def _stepped(
    placed: ParameterShardings, updates: Sequence[UpdateOfKind], rules: Rules, parameters: Arrays, gradients: Arrays,
    state: StateArrays, numbers: Numbers, loss: Array | None,
) -> Stepped:  # fmt: skip
    norm = None
    finite = jnp.asarray(True) if loss is None else jnp.isfinite(loss)
    if rules.guards:
        flags = [jnp.all(jnp.isfinite(g)) for g in gradients.values()]
        finite = functools.reduce(jnp.logical_and, flags, finite)
    if rules.clip is not None:
        norm = norm_of(gradients)
        factor = jnp.minimum(rules.clip / (norm + 1e-6), 1.0)
        gradients = {name: g * factor.astype(g.dtype) for name, g in gradients.items()}
    parts = _constrained(parameters, placed.states)
    new, new_state = updated(updates, parts, _constrained(gradients, placed.states), state, numbers)
    if rules.guards or loss is not None:
        new = {name: jnp.where(finite, value, parts[name]) for name, value in new.items()}
        new_state = {
            name: {key: jnp.where(finite, v, state[name][key]) if key in state[name] else v for key, v in own.items()}
            for name, own in new_state.items()
        }
    held = _constrained(parts | new, placed.held)
    new_state = {
        name: {key: lax.with_sharding_constraint(v, placed.states[name]) for key, v in own.items()}
        for name, own in new_state.items()
    }
    return held, state | new_state, norm, finite


def _constrained(arrays: Arrays, shardings: Constrained) -> Arrays:
    return {name: lax.with_sharding_constraint(array, shardings[name]) for name, array in arrays.items()}


_OF_MICROBATCHES = ("loss", "sum", "weight", "aux", "aux_weight")


def _joined(
    each: Mapping[str, Arrays], num: int, scale: Array | None
) -> tuple[Array, tuple[Array, Array] | None, Array | None]:
    """The loss, its (sum, weight) if it has these, and the factor of the gradients' sums; as
    engine.step_results.joined."""
    (losses,) = each["loss"].values()
    loss, parts, factor = losses[0], None, None
    if each["sum"]:
        (sums,), (weights,) = each["sum"].values(), each["weight"].values()
        parts = (jnp.sum(sums, dtype=sums.dtype), jnp.sum(weights, dtype=weights.dtype))
    if num > 1 and parts is None:
        loss, factor = jnp.mean(losses), jnp.asarray(1 / num, jnp.float64)
    elif num > 1 and parts is not None:
        loss, factor = parts[0] / parts[1], 1 / parts[1].astype(jnp.float64)
    if scale is not None:
        factor = (1.0 if factor is None else factor) / scale.astype(jnp.float64)
    return loss, parts, factor


@jax.jit
def norm_of(gradients: Arrays) -> Array:
    """The 2-norm of all gradients together, in float64."""
    squares = [jnp.sum(jnp.square(_at_least_single(g))).astype(jnp.float64) for g in gradients.values()]
    return jnp.sqrt(functools.reduce(jnp.add, squares, jnp.zeros((), jnp.float64)))


def _at_least_single(x: Array) -> Array:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


@functools.partial(jax.jit, donate_argnums=(0,))
def scaled(gradients: Arrays, factor: Array) -> Arrays:
    """The gradients times a factor."""
    return {name: g * factor.astype(g.dtype) for name, g in gradients.items()}


@functools.partial(jax.jit, donate_argnums=(0,))
def added(gradients: Arrays, others: Arrays) -> Arrays:
    """The sums of gradients by name; either may lack some."""
    both = {name: g + others[name] if name in others else g for name, g in gradients.items()}
    return both | {name: g for name, g in others.items() if name not in gradients}
