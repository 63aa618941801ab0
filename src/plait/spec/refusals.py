"""Refusals: the one table of what a plan may name but this version of plait cannot do, and what works instead."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import PlanError

# A key ending in `.` stands for every key that starts with it.
NOT_YET: dict[str, tuple[str, str]] = {
    "expert": ("puts experts on different ranks", "use tensor=N, or a layout such as 'only:tensor=1'"),
    "sequence": ("splits the sequence between layers", "use data=N or tensor=N"),
    "context": ("splits the sequence within attention", "use data=N or tensor=N"),
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


# Keys of local training and of compression, and of parameter servers.
OF_LOCAL = ("outer", "outer.lr", "outer.momentum", "moments", "streaming", "overlap")
OF_SERVERS = ("servers", "staleness", "backup")
OF_AGREEMENT = ("sync", *OF_LOCAL, "compress", "compress.", "workers", *OF_SERVERS)
_NOTHING = {
    "outer": "none", "outer.lr": "none", "outer.momentum": "none", "moments": "kept", "streaming": "1", "overlap": "0",
    "servers": "0", "staleness": "none", "backup": "0",
}  # fmt: skip


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
    _refuse_agreement(values)


def _refuse_agreement(values: Mapping[str, str]) -> None:
    """What does not make sense of replicas that agree later, of compression, and of parameter servers."""

    def given(key: str) -> bool:
        return values[key] != _NOTHING[key]

    serves, local, compressed = values["workers"] != "0", values["sync"] != "1", values["compress"] != "none"
    for key in OF_SERVERS if not serves else ():
        if given(key):
            raise PlanError(
                f"{key}={values[key]} is about parameter servers, and the plan has no workers; give workers=N servers=M"
                f" with it, or leave {key}= out"
            )
    if serves and values["servers"] == "0":
        raise PlanError(
            f"workers={values['workers']} train against parameter servers, and the plan has none; add servers=1, or use"
            f" data={values['workers']}"
        )
    if serves and local:
        raise PlanError(
            f"sync={values['sync']} does not go with workers={values['workers']}, which agree through the servers; use"
            " staleness=N, or data=N in place of workers="
        )
    if given("backup") and values["staleness"] != "0":
        raise PlanError(
            f"backup={values['backup']} drops the slowest workers of a synchronous step; add staleness=0, or leave"
            " backup= out"
        )
    if given("backup") and int(values["backup"]) >= int(values["workers"]):
        raise PlanError(f"backup={values['backup']} leaves none of workers={values['workers']} to wait for; give fewer")
    for key in OF_LOCAL if not local else ():
        if given(key):
            raise PlanError(
                f"{key}={values[key]} is about replicas that agree every n steps, and this plan agrees at each; give"
                f" sync=N with it, N being 2 or more, or leave {key}= out"
            )
    if values["compress."] and not compressed:
        raise PlanError(
            f"{values['compress.']} names an exception, and the plan compresses nothing; give compress=KIND"
        )
    if serves or not (local or compressed):
        return
    key = "sync" if local else "compress"
    axis = "replica" if values["replica"] != "1" else "data"
    if values[axis] == "1":
        raise PlanError(f"{key}={values[key]} is about replicas, and the plan has one; add data=N, or leave {key}= out")
    if axis == "data" and (values["zero"] != "0" or values["central"] != "none"):
        what = "zero" if values["zero"] != "0" else "central"
        raise PlanError(
            f"{key}={values[key]} does not go with {what}={values[what]} over the same ranks, which then have no whole"
            f" replica each; use replica=N, which {key}= is then about, beside data=M"
        )
    for name in ("outer.lr", "outer.momentum"):
        if given(name) and not given("outer"):
            raise PlanError(f"{name}={values[name]} is about an outer optimizer, and the plan has none; add outer=sgd")
    if given("streaming") and not given("outer"):
        raise PlanError(f"streaming={values['streaming']} needs an outer optimizer; add outer=nesterov, or outer=sgd")
    shortest = int(values["sync"].partition("..")[0])
    if int(values["streaming"]) > shortest:
        raise PlanError(
            f"streaming={values['streaming']} parts cannot each have a step of their own within sync={values['sync']};"
            " give fewer"
        )
    if given("overlap") and int(values["overlap"]) >= shortest:
        raise PlanError(
            f"overlap={values['overlap']} steps of exchange do not end before the next, with sync={values['sync']};"
            f" give at most {shortest - 1}"
        )
    if given("overlap") and not given("outer"):
        raise PlanError(f"overlap={values['overlap']} needs an outer optimizer; add outer=nesterov, or outer=sgd")
    if values["home.parameters"] == "disk":
        raise PlanError(
            f"{key}={values[key]} does not go with home.parameters=disk: replicas exchange what is in memory; use"
            " home.parameters=host"
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
