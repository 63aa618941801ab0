"""The command line: plait train, verify, explain, memory, simulate, plan, schedule, report, compare, checkpoint,
cluster and run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from plait import __version__
from plait.api.checkpoint_cli import checkpoint_app
from plait.api.cluster_cli import cluster_app
from plait.api.command import (
    ConfigArgument,
    PlanOption,
    ProcessesOption,
    SetOption,
    choose_plan,
    errors_shown_once,
    launch_command,
    launched_here,
    plan_of,
)
from plait.api.script import run_script
from plait.engine.environment import under_launcher
from plait.errors import PlanError

if TYPE_CHECKING:
    from plait.api.job.from_config import Resume

# torch is imported inside the commands, so that an invalid plan or config is refused without waiting for it.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 100},
)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(cluster_app, name="cluster")


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
    with errors_shown_once():
        from plait.api.job.config import load_config
        from plait.api.job.this_machine import auto_plan, is_auto

        if plan is not None and is_auto(plan):
            plan = str(auto_plan(config, plan, processes, changes or []))
            processes = None
        chosen = choose_plan(plan, processes)
        job = load_config(config, changes or [])
        from plait.api.job.from_config import check_job

        if chosen.workers:
            from plait.api.job.server_training import check_served, run_served

            if trace:
                raise PlanError(
                    f"--trace records ranks, and workers={chosen.workers} are not recorded; leave --trace out:"
                    " metrics.jsonl says how long workers waited for values and for data"
                )
            check_served(job, chosen)
        begins = _resume(resume, checkpoint)
        if not launched_here():
            check_job(job, chosen, begins)
        if chosen.workers:
            served = run_served(job, chosen, begins)
            if served.stopped:
                raise typer.Exit(128 + served.signal)
            return
        if not under_launcher() and chosen.num_processes > 1:
            arguments = ["train", str(config), *[f"--resume={resume}"] * bool(resume), *["--trace"] * trace]
            arguments += ["--checkpoint", checkpoint] * bool(checkpoint)
            arguments += [word for change in changes or [] for word in ("--set", change)]
            launch_command(arguments, chosen.num_processes, chosen)
        from plait.api.job.training import run_job

        ended = run_job(job, chosen, begins, trace)
        if ended.stopped:
            raise typer.Exit(128 + ended.signal)


@app.command()
def verify(
    config: ConfigArgument,
    plan: PlanOption = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compare.")] = 2,
    changes: SetOption = None,
) -> None:
    """Check that a plan gives the numbers of one device, with ranks as threads; status 1 if it does not."""
    with errors_shown_once():
        from plait.api.job.config import load_config

        chosen, job = plan_of(plan), load_config(config, changes or [])
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
    with errors_shown_once():
        from plait.api.job.config import load_config

        chosen, job = plan_of(plan), load_config(config, changes or [])
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


@app.command()
def memory(
    config: ConfigArgument,
    plan: PlanOption = None,
    limit: Annotated[str | None, typer.Option("--limit", help="What a rank may take, such as 16GiB.")] = None,
    changes: SetOption = None,
) -> None:
    """Predict the memory of each rank, class by class. Nothing is run; with --limit, status 1 if it does not fit."""
    with errors_shown_once():
        from plait.api.job.config import load_config

        chosen, job = plan_of(plan), load_config(config, changes or [])
        from plait.api.job.prediction_commands import print_memory

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
    with errors_shown_once():
        from plait.api.job.prediction_commands import simulate_config
        from plait.cost.transformer_simulation import SimulatedStep
        from plait.report.step_prediction import check_step_page, describe_step, write_step_page

        check_step_page(html)
        found = simulate_config(config, plan_of(plan), cluster, changes or [])
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
    with errors_shown_once():
        from plait.api.job.prediction_commands import how_to_measure, line_to_run, plan_config
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
    with errors_shown_once():
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
    with errors_shown_once():
        from plait.api.job.report_command import write_report

        print(write_report(run, out or run / "report.html", perfetto))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_A RUN_B ...", help="Folders that jobs wrote into.")],
    out: Annotated[Path | None, typer.Option("--out", help="Also write a page of the curves.")] = None,
) -> None:
    """Compare runs with the first: statistical efficiency, throughput, goodput, waiting, and bytes to the same loss."""
    with errors_shown_once():
        from plait.api.job.report_command import compare_runs

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
    with errors_shown_once(script=True):
        if not script.is_file():
            raise PlanError(f"there is no script {str(script)!r} (looked for {script.absolute()})")
        chosen = choose_plan(plan, processes) if plan is not None or "PLAIT_PLAN" in os.environ else None
        if trace is not None:
            os.environ["PLAIT_TRACE"] = str(trace)
        size = (processes or 1) if chosen is None else chosen.num_processes
        if not under_launcher() and size > 1:
            launch_command(["run", str(script), "--", *context.args], size, chosen)
        if chosen is not None:
            os.environ["PLAIT_PLAN"] = str(chosen)
        run_script(script, context.args)


def _resume(text: str, checkpoint: str) -> Resume:
    from plait.api.job.from_config import Resume

    if text not in ("", "yes", "auto"):
        raise PlanError(f"--resume={text} is unknown; write --resume, or --resume=auto, or --checkpoint step-N")
    return Resume(bool(text or checkpoint), text == "auto", checkpoint)


if __name__ == "__main__":
    main()
