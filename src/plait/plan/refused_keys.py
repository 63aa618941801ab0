"""Refusals of the keys of a plan alone: values that do not go together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from plait.errors import Refusal

GIVEN = "given"  # in the tables below: any value but the default of the key

# (keys, why XLA cannot have them)
_NOT_WITH_XLA: tuple[tuple[tuple[str, ...], str], ...] = (
    (("pipeline", "stages"), "XLA's partitioner gives every device all layers"),
    (("home.parameters", "home.activations", "home.optimizer", "central"),
     "XLA keeps what a step needs in the memory of its devices"),
    (("sync", "compress"), "one program of XLA runs on all devices, and they agree at every step"),
    (("workers",), "workers and servers are processes of PyTorch"),
    (("recompute",), "XLA decides itself what it keeps for the backward pass"),
    (("batchnorm",), "XLA's program computes with the whole batch"),
    (("expert",), "XLA's partitioner cuts the rows of a batch, sequences and weights"),
    (("context.kind",), "XLA's partitioner chooses what attention over parts of a sequence sends"),
    (("compile", "cudagraphs"), "XLA compiles the whole step"),
    (("allreduce", "bucket", "reduce"), "XLA chooses the collectives and what they have in common"),
)  # fmt: skip

# (key, value, other key, values of the other key that do not go with it, why, what to use instead)
NOT_TOGETHER: tuple[tuple[str, str, str, tuple[str, ...], str, str], ...] = (
    ("central", "host", "zero", ("1", "2", "3"),
     "with central=host there is one copy of the parameters, and each data rank already keeps and updates its part of"
     " the optimizer's state",
     "leave zero= out, or leave central=host out to have copies on every rank"),
    ("central", "host", "home.parameters", ("disk",), "central=host keeps the parameters in shared memory",
     "use home.parameters=host, or leave central=host out"),
    ("expert", GIVEN, "central", ("host",), "the ranks of data do not have all experts, so they cannot share one copy",
     "use zero=2, which needs no common memory"),
    ("expert", GIVEN, "stages", (GIVEN,), "stages= says for each stage how its ranks split it, by tensor or by data",
     "use pipeline=N with expert="),
    ("stages", GIVEN, "tensor", (GIVEN,), "stages= says which stages are split by tensor",
     "write tensor=N within the brackets, or leave stages= out"),
    ("workers", GIVEN, "streaming", (GIVEN,), "a worker pushes all changes of its steps at once",
     "leave streaming= out, or use data=N in place of workers="),
    ("workers", GIVEN, "moments", ("averaged",), "workers do not exchange their moments",
     "use moments=reset, or data=N in place of workers="),
    ("sync", GIVEN, "home.parameters", ("disk",), "replicas exchange what is in memory", "use home.parameters=host"),
    ("compress", GIVEN, "home.parameters", ("disk",), "replicas exchange what is in memory",
     "use home.parameters=host"),
    *(
        ("backend", "xla", key, (GIVEN,), why, "leave one of the two out")
        for keys, why in _NOT_WITH_XLA for key in keys
    ),
)  # fmt: skip

OF_PIPELINES = ("schedule", "chunks", "cut")
OF_LOCAL = ("outer", "outer.lr", "outer.momentum", "moments", "streaming")
OF_SERVERS = ("servers", "staleness", "backup")
OF_RELAXED = ("sync", *OF_LOCAL, "overlap", "compress", "compress.", "workers", *OF_SERVERS)

# (keys, the keys of which one must be given with them, the message if none is)
NEEDS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (OF_PIPELINES, ("pipeline",),
     "{key}={value} configures a pipeline, and the plan has none; give pipeline=N with it, or leave {key}= out"),
    (OF_SERVERS, ("workers",),
     "{key}={value} configures parameter servers, and the plan has no workers; give workers=N servers=M with it, or"
     " leave {key}= out"),
    (("workers",), ("servers",),
     "{key}={value} train against parameter servers, and the plan has none; add servers=1, or use data={value}"),
    (OF_LOCAL, ("sync",),
     "{key}={value} is for replicas that synchronise every N steps, but these do at every step; give sync=N with it, N"
     " being 2 or more, or leave {key}= out"),
    (("outer.lr", "outer.momentum"), ("outer",),
     "{key}={value} configures an outer optimizer, and the plan has none; add outer=sgd"),
    (("overlap",), ("sync", "workers"),
     "{key}={value} is for replicas that synchronise every N steps, or workers, and the plan has none; give sync=N with"
     " it, N being 2 or more, or leave {key}= out"),
    (("streaming",), ("outer",), "{key}={value} needs an outer optimizer; add outer=nesterov, or outer=sgd"),
    (("overlap",), ("outer", "workers"),
     "{key}={value} needs an outer optimizer; add outer=nesterov, or outer=sgd"),
    (("compress.",), ("compress",), "{value} names an exception, and the plan compresses nothing; give compress=KIND"),
    (("compile.",), ("compile",), "{value} names an exception, and the plan compiles nothing; give compile=inductor"),
    (("context.kind",), ("axes.",), "context.kind={value} is how context=N sees other positions; give context=N"),
    (("sequence",), ("tensor", "stages"), "sequence={value} cuts the sequence over the ranks of tensor; give tensor=N"),
    (("expert.capacity",), ("expert",),
     "expert.capacity={value} is room for rows that travel to their experts; give expert=N with it"),
    (("shapes.limit",), ("shapes",),
     "shapes.limit={value} is for batches that are padded to few shapes; give shapes=bucket:64 with it, or leave it"
     " out"),
    (("cudagraphs",), ("compile",),
     "cudagraphs={value} records what was compiled, and the plan compiles nothing; give compile=inductor"),
    (("sync", "compress"), ("data", "replica", "workers"),
     "{key}={value} is for several replicas, and the plan has one; add data=N, or leave {key}= out"),
)  # fmt: skip


def refused_together(values: Mapping[str, str], given: Collection[str]) -> Iterator[Refusal]:
    """The values of a plan that do not go together. Refusals after the first may follow from it.

    `values` has the value of every key as text; `given` are the keys whose value is not the default.
    """

    def has(key: str, value: str) -> bool:
        return key in given if value == GIVEN else values[key] == value

    for key, value, other, bad, why, instead in NOT_TOGETHER:
        if has(key, value) and any(has(other, each) for each in bad):
            shown = values[other] if other.endswith(".") else f"{other}={values[other]}"
            yield Refusal(f"{key}={values[key]} does not go with {shown}", why, instead)
    for keys, needed, text in NEEDS:
        for key in keys:
            if key in given and not any(other in given for other in needed):
                what, _, instead = text.format(key=key, value=values[key]).partition("; ")
                yield Refusal(what, "", instead)
    if values["precision"].endswith("-params"):
        yield from _of_precisions(values)
    if "backup" in given:
        yield from _of_backup(values)
    if "workers" in given and "sync" in given:
        yield from _of_rounds_of_workers(values)
    if "workers" in given and "overlap" in given:
        yield from _of_overlap_of_workers(values, given)
    if "workers" not in given and ("sync" in given or "compress" in given):
        yield from _of_replicas(values, "sync" if "sync" in given else "compress", given)


def _of_precisions(values: Mapping[str, str]) -> Iterator[Refusal]:
    """Refusals of modules under autocast in a model that reads its parameters in half precision."""
    for word in values["precision."].split():
        if not word.endswith("=fp32"):
            yield Refusal(
                f"{word} is PyTorch's autocast, which is for modules with float32 parameters, but"
                f" precision={values['precision']} has those of all other modules in half precision", "",
                f"give the module fp32, or use precision={values['precision'].removesuffix('-params')}",
            )  # fmt: skip


def _of_backup(values: Mapping[str, str]) -> Iterator[Refusal]:
    if values["staleness"] != "0":
        yield Refusal(
            f"backup={values['backup']} drops the slowest workers of a synchronous step", "",
            "add staleness=0, or leave backup= out",
        )  # fmt: skip
    elif int(values["backup"]) >= int(values["workers"]):
        yield Refusal(
            f"backup={values['backup']} leaves none of workers={values['workers']} to wait for",
            "",
            f"give at most {int(values['workers']) - 1}",
        )


def _of_rounds_of_workers(values: Mapping[str, str]) -> Iterator[Refusal]:
    sync = values["sync"]
    if values["staleness"] != "0":
        yield Refusal(
            f"sync={sync} with workers={values['workers']} takes the mean of the changes of all workers, which is a"
            " synchronous update", "", "add staleness=0, or leave sync= out",
        )  # fmt: skip
    if ".." in sync:
        yield Refusal(
            f"sync={sync} is an interval that grows, and workers need a fixed one", "they may join at any time",
            f"give one number, such as sync={sync.partition('..')[2]}",
        )  # fmt: skip


def _of_overlap_of_workers(values: Mapping[str, str], given: Collection[str]) -> Iterator[Refusal]:
    overlap, staleness = values["overlap"], values["staleness"]
    if staleness == "0":
        waits = "the mean of all" if "sync" in given else "the update of all"
        instead = "" if "sync" in given else f", or use staleness={overlap} or none"
        yield Refusal(
            f"overlap={overlap} lets a worker compute with values that lack its last push, but with staleness=0 it"
            f" waits for {waits}", "", f"leave overlap= out{instead}",
        )  # fmt: skip
    elif staleness != "none" and int(overlap) > int(staleness):
        yield Refusal(
            f"overlap={overlap} puts a worker up to {overlap} steps ahead, but staleness={staleness} allows"
            f" {staleness}", "", f"give overlap={staleness} or staleness={overlap}",
        )  # fmt: skip


def _of_replicas(values: Mapping[str, str], key: str, given: Collection[str]) -> Iterator[Refusal]:
    """Refusals of `sync=` or `compress=`, which is `key`, over the axis of the replicas."""
    for other in ("zero", "central"):
        if other in given and "replica" not in given:
            yield Refusal(
                f"{key}={values[key]} does not go with {other}={values[other]} over the same ranks, because none of"
                " them then has a whole replica", "", f"add replica=N, over which {key}= then works",
            )  # fmt: skip
    if "expert" in given and "replica" not in given:
        yield Refusal(
            f"{key}={values[key]} does not go with expert={values['expert']} over the same ranks, because none of them"
            " has all experts", "", f"add replica=N, over which {key}= then works",
        )  # fmt: skip
    shortest = int(values["sync"].partition("..")[0])
    if int(values["streaming"]) > shortest:
        yield Refusal(
            f"streaming={values['streaming']} parts cannot each have a step of their own within sync={values['sync']}",
            "", f"give at most {shortest}",
        )  # fmt: skip
    if int(values["overlap"]) >= shortest:
        yield Refusal(
            f"an exchange over overlap={values['overlap']} steps does not end before the next one, with"
            f" sync={values['sync']}",
            "", f"give at most {shortest - 1}",
        )  # fmt: skip
