"""plait's own exceptions: what a user's bad input gets, with the values, the place and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """The reason why a plan cannot run: what was given, why it cannot be, and what to write instead. Its text is the
    message of a PlanError."""

    what: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.instead}" if self.why else f"{self.what}; {self.instead}"


class PlaitError(Exception):
    """Base of every error that plait raises on purpose."""

    status: int = 1  # of a rank's process that it ends; 2 of a job that is refused before its first step


class PlanError(PlaitError, ValueError):
    """A plan that cannot be read, or that does not fit the model, the batch or the number of processes.

    `refusal` is the reason as a value where a plan that can be read is refused; None where it cannot be read, and for
    another argument that is wrong.
    """

    def __init__(self, reason: str | Refusal) -> None:
        super().__init__(str(reason))
        self.refusal = reason if isinstance(reason, Refusal) else None


class ScheduleError(PlanError):
    """A schedule that cannot be read, that misses or repeats an action, or that deadlocks; the message has its grid."""


class ModelError(PlaitError, RuntimeError):
    """A use of the model's weights while a trainer has them elsewhere."""


class LayoutError(PlaitError, ValueError):
    """A layout that does not fit the mesh or the tensor's shape, a pattern that matches nothing, or a rule that does
    not fit its op."""


class CaptureError(PlaitError):
    """A model whose training step cannot be captured as a graph; `file` and `line` say where, if that is known."""

    file: str = ""
    line: int = 0
    data_dependent: bool = False  # a branch on values, as opposed to a mistake: the model would run as it is
    in_merged_loop: bool = False  # after rounds of a loop were made one, without which the step may be captured
    loop: str = ""  # the line of that loop, and the one that stopped it


class BatchError(PlaitError, ValueError):
    """A batch of the wrong structure or shape."""


class UnevenBatchError(PlanError, BatchError):
    """A batch whose rows the plan does not divide."""


class LossError(PlaitError, ValueError):
    """A loss in a form that plait does not take, or a loss that is not finite."""


class ConfigError(PlaitError, ValueError):
    """A configuration file with a wrong key, type or value."""


class DataError(PlaitError):
    """Training data that is missing or unusable."""


class CheckpointError(PlaitError):
    """A checkpoint that is damaged, incomplete or made for another model."""


class HomeError(PlaitError):
    """A folder or disk, for tensors that a plan offloads, that is missing, too small or failed; names the file."""


class DeviceMemoryError(PlaitError, MemoryError):
    """An accelerator's memory ran out; the message has what each class of tensors takes, and what would take less."""


class WorldError(PlaitError):
    """Ranks that are missing, that disagree, or of which one has failed."""


class RoleFailed(WorldError):
    """A worker, a server or the coordinator raised an error that a replacement would raise again."""


class RankFailed(WorldError):
    """One rank raised; every rank stops and the first exception is shown once, with its rank."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.rank = rank
