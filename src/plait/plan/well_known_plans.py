"""Well-known strategies by name: the choices that a search says something of, though it chose another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.plan.parallelism import Parallelism


def _only_rows(how: Parallelism) -> bool:
    return (
        how.weights == how.context == how.pipeline == how.experts == 1 and how.later is None and not how.homes.any_away
    )


def _three_ways(how: Parallelism) -> bool:
    return how.weights > 1 and how.pipeline > 1 and not how.cuts.parameters and not how.homes.any_away


# (name, whether a plan is such, by the plan and the sizes of the domains of links)
STRATEGIES: tuple[tuple[str, Callable[[Parallelism, Sequence[int]], bool]], ...] = (
    ("data parallel (DDP)", lambda how, _: how.batch > 1 and _only_rows(how) and not how.cuts.optimizer),
    ("ZeRO-1", lambda how, _: _only_rows(how) and how.cuts.optimizer and not how.cuts.gradients),
    ("ZeRO-3 (FSDP)", lambda how, _: _only_rows(how) and how.cuts.parameters and how.sharded == how.batch),
    (
        "hybrid FSDP: ZeRO-3 in a node, replicas between",
        lambda how, sizes: _only_rows(how) and how.cuts.parameters and how.batch > how.sharded == sizes[0],
    ),
    (
        "FSDP with tensor parallelism",
        lambda how, _: how.weights > 1 and how.pipeline == 1 and how.cuts.parameters and how.later is None,
    ),
    (
        "tensor parallel in a node, data parallel between",
        lambda how, sizes: how.pipeline == how.context == 1 < how.weights <= sizes[0]
        and not how.cuts.parameters and how.later is None and not how.homes.any_away,
    ),
    ("Megatron-LM: tensor, 1F1B, data", lambda how, _: _three_ways(how) and how.order == "1f1b"),
    ("Megatron-LM: tensor, interleaved, data", lambda how, _: _three_ways(how) and how.order == "interleaved"),
    ("expert parallel", lambda how, _: how.experts > 1),
    ("GPipe with data parallelism", lambda how, _: how.weights == 1 < how.pipeline and how.order == "gpipe"),
    ("zero bubble", lambda how, _: how.pipeline > 1 and how.order.startswith(("zb", "dualpipe"))),
    ("offload to the host", lambda how, _: how.homes.any_away),
    ("DiLoCo", lambda how, _: how.later is not None),
)  # fmt: skip


def names_of(how: Parallelism, domains: Sequence[int]) -> list[str]:
    """The strategies that a plan is one of, for links with domains of these sizes, innermost first."""
    return [name for name, is_such in STRATEGIES if is_such(how, domains)]
