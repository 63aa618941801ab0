"""The Ray cluster of a run: one that is started on this machine for the run, or the one that RAY_ADDRESS names.

A started cluster listens on the loopback interface only, and has a random token. A cluster of several machines is
joined with the token that it was started with; without one, anybody who can reach it could run code on it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

from plait.comm.private_folder import private_folder
from plait.cost.memory_model import human_bytes
from plait.errors import PlanError, WorldError
from plait.integrations.ray_servers.ray_reaper import reaper
from plait.integrations.ray_servers.server_job import Job

OWN_FOLDER = "PLAIT_RAY_FOLDER"  # rendezvous folder of a worker's ranks, if Ray was started for the run
_SMALLEST_STORE = 192 << 20
_PART_OF_MEMORY = 0.8  # the rest is for the processes that compute
_ANSWER_SECONDS = 5.0
_INSTALL = "pip install 'plait[ray]'"


def check_installed() -> None:
    """Raise PlanError, with the command that installs Ray, if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise PlanError(f"parameter servers run on Ray, which is not installed: {_INSTALL}")


def load_ray() -> ModuleType:
    """Import Ray, with its environment variables set before. Returns the module."""
    check_installed()
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if is_own():
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # makes Ray listen on the loopback interface only
        if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    import ray

    return ray


@contextmanager
def cluster(job: Job) -> Iterator[ModuleType]:
    """Initialise Ray with room for the roles of the job. If Ray is initialised in this process, it is used and left
    running."""
    ray = load_ray()
    if ray.is_initialized():
        _check_room(ray, job)
        yield ray
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    with ExitStack() as started:
        try:
            if is_own():
                check_memory(job)
                started.enter_context(started_here(ray, num_cpus(job), store_bytes(job)))
            else:
                started.enter_context(_joined(ray, os.environ["RAY_ADDRESS"]))
        except WorldError:
            raise
        except Exception as error:
            if type(error).__name__ != "AuthenticationError":
                raise WorldError(f"Ray did not start: {type(error).__name__}: {error}") from error
            raise WorldError(
                f"the Ray cluster at {os.environ.get('RAY_ADDRESS')} asks for its token: put it into RAY_AUTH_TOKEN, or"
                " its file into RAY_AUTH_TOKEN_PATH (`ray get-auth-token` on the head node shows it)"
            ) from None
        _keep_quiet(ray)
        _check_room(ray, job)
        yield ray


def is_own() -> bool:
    """Whether Ray is started for the run, on this machine."""
    return "RAY_ADDRESS" not in os.environ


def _check_answers(address: str) -> None:
    """Raise WorldError if nothing listens at host:port. Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address or not port.isdecimal():  # "auto", or a client address ray://
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise WorldError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({error}); start one with `ray start --head`, or unset"
            " RAY_ADDRESS to have plait start its own"
        ) from None


def _keep_quiet(ray: ModuleType) -> None:
    """Keep Ray from printing about actors that died: the coordinator reports them in one line."""
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = lambda *values, **options: None


@contextmanager
def started_here(ray: ModuleType, cpus: int, store: int) -> Iterator[ModuleType]:
    """Ray on this machine, with `cpus` processes at a time and an object store of `store` bytes."""
    with private_folder("ray") as folder, reaper():
        os.environ[OWN_FOLDER] = str(folder)  # inherited by Ray's processes
        try:
            ray.init(
                address="local", num_cpus=cpus, object_store_memory=store, include_dashboard=False,
                configure_logging=False, log_to_driver=False,
                _temp_dir=str(folder / "r"),  # Ray opens it to all users, so its parent must be private
            )  # fmt: skip
            yield ray
        finally:
            del os.environ[OWN_FOLDER]
            ray.shutdown()


@contextmanager
def _joined(ray: ModuleType, address: str) -> Iterator[ModuleType]:
    """Join the Ray cluster at an address."""
    _check_answers(address)
    try:
        ray.init(address=address, configure_logging=False, log_to_driver=False)
        yield ray
    finally:
        ray.shutdown()


def check_memory(job: Job) -> None:
    """Raise WorldError if the object store would need more memory than this machine has."""
    need, there = store_bytes(job), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > _PART_OF_MEMORY * there:
        plan = job.plan
        more = f" and the overlap={plan.overlap} tasks of each" if plan.overlap else ""
        raise WorldError(
            f"values and gradients in flight between workers={plan.workers}{more} and servers take up to"
            f" {human_bytes(need)}, and this machine has {human_bytes(there)} of memory; give fewer"
        )


def num_cpus(job: Job) -> int:
    """The number of processes that compute: servers, and every rank of every worker. Other processes need little."""
    return job.plan.servers + job.plan.workers * job.plan.inner_plan.num_processes


def store_bytes(job: Job) -> int:
    """The size of the object store, in bytes: for every worker the values that it has and those that it receives, and
    two gradients; values and a gradient more for each task besides the one that it computes."""
    size = sum(variable.num_bytes for variable in job.variables)
    return max(_SMALLEST_STORE, int(1.2 * size * ((4 + 2 * job.plan.overlap) * job.plan.workers + 4)))


def _check_room(ray: ModuleType, job: Job) -> None:
    """Raise WorldError if the cluster has fewer CPUs than the plan has processes that compute."""
    there = int(ray.cluster_resources().get("CPU", 0))
    if there < num_cpus(job):
        raise WorldError(
            f"the plan {job.plan.title!r} has {num_cpus(job)} processes that compute, {job.plan.servers} servers and"
            f" {job.plan.workers} workers of {job.plan.inner_plan.num_processes}, and the Ray cluster has {there} CPUs;"
            " start more nodes with `ray start --address`, or give a smaller plan"
        )
