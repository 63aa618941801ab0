"""plait memory: the memory of a job on each rank, and whether it fits."""

from __future__ import annotations

import torch

from plait.api.job.config import Config
from plait.api.job.from_config import check_job, first_batch, make_data, make_model, optimizer_factory
from plait.api.memory import Estimator
from plait.compile.capture.capture import LossFn
from plait.errors import PlaitError, PlanError
from plait.plan.key_values import Bytes
from plait.plan.plan import Plan
from plait.report.memory_table import verdict


def print_memory(config: Config, plan: Plan, limit: str | None) -> bool:
    """Print the estimate of a job, and with a limit such as `16GiB` whether it fits. Returns whether it fits."""
    most = _bytes(limit) if limit is not None else None
    check_job(config, plan, writes=False)
    model, loss_fn = make_model_without_values(config)
    estimator = Estimator(
        model, loss_fn, first_batch(config, make_data(config)), optimizer_factory(config), config.layouts, built=True
    )
    found = estimator.estimate(plan)
    print(found)
    if most is None:
        return True
    print()
    print(verdict(found, most, [] if found.fits(most) else estimator.until_it_fits(plan, most)))
    return found.fits(most)


def _bytes(limit: str) -> int:
    try:
        number = Bytes().parse(limit)
        Bytes().check(number)
    except ValueError as error:
        raise PlanError(f"cannot read --limit {limit!r}: {error}") from None
    return number


def make_model_without_values(config: Config) -> tuple[torch.nn.Module, LossFn]:
    """The model on the meta device if its constructor works there, else with values."""
    try:
        with torch.device("meta"):
            return make_model(config)
    except PlaitError:
        raise
    except Exception:
        return make_model(config)
