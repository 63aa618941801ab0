"""The command line: plait train, verify, explain, memory, simulate, plan, schedule, report, compare, checkpoint,
cluster and run."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from plait import __version__
from plait.api.script import run_script, tell_other_ranks
from plait.comm.launch import FAILURE_FILE, first_to_fail, launch
from plait.engine.environment import num_processes, rank, resolve_plan, under_launcher
from plait.errors import PlaitError, PlanError, RankFailed
from plait.plan.plan import Plan

if TYPE_CHECKING:
    from plait.api.job.from_config import Resume

# torch is imported inside the commands, so that an invalid plan or config is refused without waiting for it.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 100},
)

checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, check them, export their weights.")
app.add_typer(checkpoint_app, name="checkpoint")
cluster_app = typer.Typer(
    no_args_is_help=True, help="Show a machine or cluster, and measure the one that this runs on."
)
app.add_typer(cluster_app, name="cluster")

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The job's TOML file.")]
PlanOption = Annotated[str | None, typer.Option("--plan", help='How the step is spread, such as "data=2 tensor=2".')]
ProcessesOption = Annotated[
    int | None,
    typer.Option("--processes", min=1, help="Processes on this machine; by default as many as the plan has."),
]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint, or the folder or URL of a run, of which it is the last.")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a value: --set train.steps=10.")]


def main() -> None:
    """Run the command line; `plait/__main__.py` calls it."""
    app()


@app.callback(invoke_without_command=True)
def plait(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Train any PyTorch model on any number of devices: a plan, one line of text, says how the step is spread."""
    if version:
        print(f"plait {__version__}")
        raise typer.Exit


class _TrainCommand(TyperCommand):
    """A command whose `--resume` may stand alone or have a value: --resume=auto."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = list(args)
        for at, word in enumerate(rest):
            if word == "--":
                break
            if word == "--resume":
                alone = rest[at + 1 : at + 2] != ["auto"]
                rest[at : at + (1 if alone else 2)] = ["--resume=yes" if alone else "--resume=auto"]
        found: list[str] = super().parse_args(ctx, rest)
        return found


@app.command(cls=_TrainCommand)
def train(
    config: ConfigArgument,
    plan: PlanOption = None,
    processes: ProcessesOption = None,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="[auto]",
            help="Go on from the last checkpoint. With --resume=auto begin anew if there is none, which suits a job"
            " that is queued again.",
        ),
    ] = "",
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="step-N", help="Go on from this checkpoint of the run.")
    ] = "",
    trace: Annotated[bool, typer.Option("--trace", help="Record the last 20 steps, for plait report.")] = False,
    changes: SetOption = None,
) -> None:
    """Train as a config file says, on processes of this machine; under torchrun, as one of its ranks."""
    with _errors_shown_once():
        from plait.api.job.config import load_config
        from plait.api.job.this_machine import auto_plan, is_auto

        if plan is not None and is_auto(plan):
            plan = str(auto_plan(config, plan, processes, changes or []))
            processes = None
        chosen = _choose_plan(plan, processes)
        job = load_config(config, changes or [])
        from plait.api.job.from_config import check_job

        if chosen.workers:
            from plait.api.job.server_training import check_served, run_served

            if trace:
                raise PlanError(
                    f"--trace is of ranks, and workers={chosen.workers} leaves none; metrics.jsonl has how long workers"
                    " waited for values and for data; leave --trace out"
                )
            check_served(job, chosen)
        begins = _resume(resume, checkpoint)
        if not _launched_here():
            check_job(job, chosen, begins)
        if chosen.workers:
            if run_served(job, chosen, begins).stopped:
                raise typer.Exit(128 + signal.SIGINT)
            return
        if not under_launcher() and chosen.num_processes > 1:
            arguments = ["train", str(config), *[f"--resume={resume}"] * bool(resume), *["--trace"] * trace]
            arguments += ["--checkpoint", checkpoint] * bool(checkpoint)
            arguments += [word for change in changes or [] for word in ("--set", change)]
            _launch(arguments, chosen.num_processes, chosen)
        from plait.api.job.training import run_job

        if run_job(job, chosen, begins, trace).stopped:
            raise typer.Exit(128 + signal.SIGINT)


@app.command()
def verify(
    config: ConfigArgument,
    plan: PlanOption = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compare.")] = 2,
    changes: SetOption = None,
) -> None:
    """Check that a plan gives the numbers of one device, with ranks as threads; status 1 if it does not."""
    with _errors_shown_once():
        from plait.api.job.config import load_config

        chosen, job = _plan_of(plan), load_config(config, changes or [])
        from plait.api.job.from_config import check_job, first_batch, make_data, make_model
        from plait.api.verify import verify as compare

        check_job(job, chosen, writes=False)
        model, loss_fn = make_model(job)
        batch = first_batch(job, make_data(job))
        report = compare(
            model, loss_fn, batch, chosen, layouts=job.layouts, steps=steps, seed=job.train.seed,
            clip_norm=job.train.clip_norm,
        )  # fmt: skip
        print(report)
        if not report.ok:
            raise typer.Exit(1)


@app.command()
def explain(
    config: ConfigArgument,
    plan: PlanOption = None,
    tensor: Annotated[str | None, typer.Option("--tensor", help="Only this tensor: its layout and why.")] = None,
    passes: Annotated[bool, typer.Option("--passes", help="The passes, and what each changes.")] = False,
    diff: Annotated[
        str | None, typer.Option("--diff", metavar="PASS", help="The graphs before and after a pass.")
    ] = None,
    changes: SetOption = None,
) -> None:
    """Show the layout of every parameter and each collective of a step, with its bytes. Nothing is run."""
    with _errors_shown_once():
        from plait.api.job.config import load_config

        chosen, job = _plan_of(plan), load_config(config, changes or [])
        from plait.api.explain import explain as explain_step
        from plait.api.job.from_config import check_job, first_batch, make_data, make_model

        check_job(job, chosen, writes=False)
        model, loss_fn = make_model(job)
        found = explain_step(model, loss_fn, first_batch(job, make_data(job)), chosen, layouts=job.layouts)
        if diff is not None:
            print(found.diff(diff))
        elif passes:
            print(found.passes())
        else:
            print(found if tensor is None else found.tensor(tensor))


@checkpoint_app.command()
def show(path: CheckpointArgument) -> None:
    """Print the contents of a checkpoint: step, plan, and each tensor's name, shape, dtype and bytes."""
    with _errors_shown_once():
        from plait.report.checkpoint_text import describe_checkpoint

        print(describe_checkpoint(path))


@checkpoint_app.command("verify")
def verify_files(path: CheckpointArgument) -> None:
    """Check every byte of every checkpoint there; status 1, with the names of damaged files, if any is damaged."""
    with _errors_shown_once(status=1):
        from plait.report.checkpoint_text import verify_checkpoints

        print(*verify_checkpoints(path), sep="\n")


@checkpoint_app.command()
def convert(
    path: CheckpointArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A file named .safetensors, or a folder.")],
) -> None:
    """Write the weights as safetensors: one file, or a folder in the form of Hugging Face."""
    with _errors_shown_once():
        from plait.engine.checkpoint.export import CONFIG, export_weights

        written = export_weights(path, out)
        print(*written, sep="\n")
        if not out.endswith(".safetensors") and not written[-1].endswith(f"/{CONFIG}"):
            print(
                f"no {CONFIG}: the checkpoint has no configuration of the model's; from_pretrained needs one, which"
                f" model.config.save_pretrained({out!r}) writes"
            )


@cluster_app.command("show")
def show_cluster(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="Such as h100x64, or a TOML file.")] = "",
) -> None:
    """Print a cluster: devices, links by level, hosts, and where each number is from; without a name, all names."""
    with _errors_shown_once():
        from plait.report.cluster_text import describe_cluster, list_clusters
        from plait.spec.cluster_file import find_cluster

        print(describe_cluster(find_cluster(name)) if name else list_clusters())


@cluster_app.command("measure")
def measure_cluster(
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; by default it is printed.")] = None,
    processes: ProcessesOption = None,
) -> None:
    """Measure this machine in under two minutes: products by shape, memory, each collective by size and group."""
    with _errors_shown_once():
        from plait.api.cluster_measurement import check_out, default_processes, measure_here, write_measured

        check_out(out)
        if not under_launcher() and (size := processes or default_processes()) > 1:
            _launch(["cluster", "measure", *([] if out is None else ["--out", str(out)])], size, None)
        text = measure_here()
        if text:
            write_measured(text, out)


@app.command()
def memory(
    config: ConfigArgument,
    plan: PlanOption = None,
    limit: Annotated[str | None, typer.Option("--limit", help="What a rank may take, such as 16GiB.")] = None,
    changes: SetOption = None,
) -> None:
    """Predict the memory of each rank, class by class. Nothing is run; with --limit, status 1 if it does not fit."""
    with _errors_shown_once():
        from plait.api.job.config import load_config

        chosen, job = _plan_of(plan), load_config(config, changes or [])
        from plait.api.job.memory_command import print_memory

        if not print_memory(job, chosen, limit):
            raise typer.Exit(1)


@app.command("simulate")
def simulate_plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A job's TOML file, or one with a [shape].")],
    plan: PlanOption = None,
    cluster: Annotated[str, typer.Option("--cluster", help="Such as h100x64, or a TOML file.")] = "cpu",
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with the ranks' swimlanes.")] = None,
    changes: SetOption = None,
) -> None:
    """Predict a step on a cluster: time, MFU, memory by class, bytes by link. Nothing is run."""
    with _errors_shown_once():
        from plait.api.job.simulate_command import simulate_config
        from plait.cost.transformer_simulation import SimulatedStep
        from plait.report.simulation_text import check_step_page, describe_step, write_step_page

        check_step_page(html)
        found = simulate_config(config, _plan_of(plan), cluster, changes or [])
        if html is not None:
            write_step_page(html, found.plan.title, found.cluster.name, found.seconds, found.trace)
        print(describe_step(found) if isinstance(found, SimulatedStep) else found)


@app.command("plan")
def plan_job(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A job's TOML file, or one with a [shape].")],
    cluster: Annotated[
        str, typer.Option("--cluster", help="Such as h100x64, or a TOML file; by default this machine, measured once.")
    ] = "",
    memory: Annotated[str, typer.Option("--memory", help="What a rank may take, such as 70GiB.")] = "",
    batch: Annotated[str, typer.Option("--batch", help="Rows of the global batch: 512, or a range 512..2048.")] = "",
    limits: Annotated[
        str, typer.Option("--limit-keys", help='What keys may be, such as "tensor=1..8 zero=1,3 sync=1".')
    ] = "",
    goal: Annotated[
        str, typer.Option("--goal", help="tokens: most per second; loss: least time to a loss.")
    ] = "tokens",
    noise: Annotated[
        str, typer.Option("--noise-scale", help="For --goal loss: rows, or the folder of a run that measured it.")
    ] = "",
    changes: SetOption = None,
) -> None:
    """Search for the fastest plan on a cluster: what fits, what it takes, why others lost. Nothing is run."""
    with _errors_shown_once():
        from plait.api.job.plan_command import how_to_measure, line_to_run, plan_config
        from plait.api.job.this_machine import this_machine
        from plait.report.plan_text import describe_plans
        from plait.spec.cluster_file import find_cluster

        where = (lambda: find_cluster(cluster)) if cluster else this_machine
        found = plan_config(config, where, memory, batch, limits, changes or [], goal, noise)
        command = line_to_run(found, config, cluster, changes or [])
        print(describe_plans(found, command, how_to_measure(config) if found.goal.to_loss else ""))
        if not found.best:
            raise typer.Exit(1)


@app.command()
def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="Such as 1f1b or zb-search, or a file of actions.")],
    stages: Annotated[int | None, typer.Option("--stages", min=1, help="Ranks of the pipeline.")] = None,
    micro: Annotated[int | None, typer.Option("--micro", min=1, help="Microbatches.")] = None,
    chunks: Annotated[int | None, typer.Option("--chunks", min=1, help="Stages on each rank.")] = None,
    costs: Annotated[Path | None, typer.Option("--costs", help="Seconds and bytes of each stage, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with the picture, to zoom into.")] = None,
    memory: Annotated[
        float, typer.Option("--memory", min=1, help="For zb-search: the most activations, in times of 1f1b's.")
    ] = 2.0,
    save: Annotated[Path | None, typer.Option("--save", help="Write a file, for schedule=FILE of a plan.")] = None,
) -> None:
    """Draw the schedule of a pipeline, with its simulated utilisation, bubble and memory. Nothing is run."""
    with _errors_shown_once():
        from plait.report.schedule_page import (
            SEARCHED,
            describe_schedule,
            find_schedule,
            predict,
            save_schedule,
            search_schedule,
            write_schedule_page,
        )

        if name == SEARCHED:
            found = search_schedule(stages, micro, costs, memory)
        else:
            found = find_schedule(name, stages, micro, chunks)
        if save is not None:
            save_schedule(save, found)
        trace = predict(found, costs)
        if html is not None:
            write_schedule_page(html, found, trace, costs)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(describe_schedule(found, trace, costs, width))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that a job wrote into: its train.out.")],
    out: Annotated[Path | None, typer.Option("--out", help="The page; by default report.html in the folder.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", help="Also write a trace for ui.perfetto.dev or chrome://tracing.")
    ] = None,
) -> None:
    """Write a page about a run: swimlanes (with --trace), utilisation, memory, bytes per link, loss and tokens/s."""
    with _errors_shown_once():
        from plait.api.job.report_command import write_report

        print(write_report(run, out or run / "report.html", perfetto))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_A RUN_B ...", help="Folders that jobs wrote into.")],
    out: Annotated[Path | None, typer.Option("--out", help="Also write a page of the curves.")] = None,
) -> None:
    """Compare runs with the first: statistical efficiency, throughput, goodput, waiting, and bytes to the same loss."""
    with _errors_shown_once():
        from plait.api.job.compare_runs import compare_runs

        print(compare_runs(runs, out))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file; what follows is passed to it.")],
    plan: PlanOption = None,
    processes: ProcessesOption = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Record the last 20 steps into this folder, for plait report.")
    ] = None,
) -> None:
    """Run your own script on processes of this machine. Its Trainer uses the plan given here, or else its own."""
    with _errors_shown_once():
        if not script.is_file():
            raise PlanError(f"there is no script {str(script)!r} (looked for {script.absolute()})")
        chosen = _choose_plan(plan, processes) if plan is not None or "PLAIT_PLAN" in os.environ else None
        if trace is not None:
            os.environ["PLAIT_TRACE"] = str(trace)
        size = (processes or 1) if chosen is None else chosen.num_processes
        if not under_launcher() and size > 1:
            _launch(["run", str(script), "--", *context.args], size, chosen)
        if chosen is not None:
            os.environ["PLAIT_PLAN"] = str(chosen)
        run_script(script, context.args)


def _resume(text: str, checkpoint: str) -> Resume:
    from plait.api.job.from_config import Resume

    if text not in ("", "yes", "auto"):
        raise PlanError(f"--resume={text} is unknown; write --resume, or --resume=auto, or --checkpoint step-N")
    return Resume(bool(text or checkpoint), text == "auto", checkpoint)


def _choose_plan(text: str | None, processes: int | None) -> Plan:
    """The plan to train under, checked against the number of processes."""
    if under_launcher():
        chosen = _plan_of(text) if text is not None else resolve_plan(None)
        chosen.check_processes(num_processes())
        os.environ["PLAIT_PLAN"] = str(chosen)
        return chosen
    if text is None and "PLAIT_PLAN" not in os.environ:
        return Plan.for_processes(processes or 1)
    chosen = _plan_of(text)
    if processes is not None and chosen.workers:
        raise PlanError(
            f"--processes {processes} is about ranks that this command starts; workers={chosen.workers} are started by"
            " Ray, so leave --processes out"
        )
    if processes is not None:
        chosen.check_processes(processes)
    return chosen


def _plan_of(text: str | None) -> Plan:
    return Plan.parse(text) if text is not None else resolve_plan(None)


def _launched_here() -> bool:
    """Whether this rank was started by `_launch`, whose process has checked the job."""
    return under_launcher() and FAILURE_FILE in os.environ


def _launch(arguments: list[str], size: int, plan: Plan | None) -> None:
    raise typer.Exit(launch(["-m", "plait", *arguments], size, {} if plan is None else {"PLAIT_PLAN": str(plan)}))


@contextmanager
def _errors_shown_once(status: int = 2) -> Iterator[None]:
    """Print a PlaitError as one message and exit with `status`. Of several ranks only the first to fail prints."""
    try:
        yield
    except PlaitError as error:
        tell_other_ranks(error)
        if first_to_fail():
            from rich.console import Console

            who = "" if isinstance(error, RankFailed) or not under_launcher() else _failed(error)
            console = Console(stderr=True, highlight=False)
            console.print(f"plait: {who}{error}", markup=False, style="red", soft_wrap=True)
        raise typer.Exit(status) from None
    except Exception as error:
        if not under_launcher() or isinstance(error, typer.Exit):
            raise
        tell_other_ranks(error)
        if first_to_fail():
            traceback.print_exc()
            print(f"plait: {_failed(error)}{error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _failed(error: Exception) -> str:
    return f"rank {rank()} failed: {type(error).__name__}: "


if __name__ == "__main__":
    main()
