"""Refusals: the one table of what a plan may name but this version of plait cannot do, and what works instead."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import PlanError

# A key ending in `.` stands for every key that starts with it.
NOT_YET: dict[str, tuple[str, str]] = {
    "sync": ("lets replicas agree every n steps", "use data=N, which agrees at every step"),
    "outer": ("chooses the outer optimizer of local training", "use data=N, which agrees at every step"),
    "compress": ("compresses gradients on the wire", "use allreduce=ring or a larger bucket"),
    "workers": ("trains against parameter servers", "use data=N"),
    "servers": ("trains against parameter servers", "use data=N"),
    "staleness": ("bounds how old a gradient may be", "use data=N, which is never stale"),
    "backup": ("drops the slowest workers of a step", "use data=N with as many ranks as are dependable"),
    "expert": ("puts experts on different ranks", "use tensor=N, or a layout such as 'only:tensor=1'"),
    "sequence": ("splits the sequence between layers", "use data=N or tensor=N"),
    "context": ("splits the sequence within attention", "use data=N or tensor=N"),
    "streaming": ("overlaps the outer step with training", "use data=N"),
}

# (key, value, other key, its values that do not go with that, why, what works instead); ">1" is any value but 1 or none
NOT_TOGETHER: tuple[tuple[str, str, str, tuple[str, ...], str, str], ...] = (
    ("central", "host", "zero", ("1", "2", "3"),
     "central=host already has each data rank keep and update its part of the optimizer's state, of parameters of which"
     " there is one copy",
     "leave zero= out, or central=host to have copies on every rank"),
    ("central", "host", "home.parameters", ("disk",), "central=host keeps the parameters in memory that ranks share",
     "use home.parameters=host, or leave central=host out"),
    ("stages", ">1", "tensor", (">1",), "stages= says which of them are split by tensor",
     "write tensor=N within the brackets, or leave stages= out"),
)  # fmt: skip

# Keys that say how a pipeline is made, with the values that say nothing.
OF_PIPELINES: Mapping[str, str] = {"schedule": "1f1b", "chunks": "1", "cut": "none"}


def names_not_yet() -> tuple[str, ...]:
    """Every key that is known but refused, without the mark of a family."""
    return tuple(key.rstrip(".") for key in NOT_YET)


def refuse_together(values: Mapping[str, str]) -> None:
    """Raise PlanError where two of a plan's values, by key as text, do not go together."""
    for key, value, other, bad, why, instead in NOT_TOGETHER:
        if _is(values[key], value) and any(_is(values[other], each) for each in bad):
            raise PlanError(f"{key}={values[key]} does not go with {other}={values[other]}: {why}; {instead}")
    for key, nothing in OF_PIPELINES.items():
        if values["pipeline"] == "1" and values[key] != nothing:
            raise PlanError(
                f"{key}={values[key]} says how a pipeline is made, and the plan has none; give pipeline=N with it, or"
                f" leave {key}= out"
            )


def _is(value: str, wanted: str) -> bool:
    return value not in ("1", "none") if wanted == ">1" else value == wanted


def refuse_key(key: str, value: str, place: str) -> None:
    """Raise PlanError when `key` is one that this version does not have; `place` says where it stands."""
    family = key.partition(".")[0] + "."
    row = NOT_YET.get(key) or NOT_YET.get(family) or NOT_YET.get(key + ".")
    if row is None:
        return
    what, instead = row
    raise PlanError(f"{key}={value} ({place}) {what}, which this version of plait does not do yet; {instead}")
