"""plait cluster: show, measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.api.command import ProcessesOption, errors_shown_once, launch_command
from plait.engine.environment import under_launcher

cluster_app = typer.Typer(
    no_args_is_help=True, help="Show a machine or cluster, and measure the one that this runs on."
)


@cluster_app.command("show")
def show_cluster(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="Such as h100x64, or a TOML file.")] = "",
) -> None:
    """Print a cluster: devices, links by level, hosts, and where each number is from; without a name, all names."""
    with errors_shown_once():
        from plait.report.cluster_text import describe_cluster, list_clusters
        from plait.spec.cluster_file import find_cluster

        print(describe_cluster(find_cluster(name)) if name else list_clusters())


@cluster_app.command("measure")
def measure_cluster(
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; by default it is printed.")] = None,
    processes: ProcessesOption = None,
) -> None:
    """Measure this machine in under two minutes: products by shape, memory, each collective by size and group."""
    with errors_shown_once():
        from plait.api.cluster_measurement import check_out, default_processes, measure_here, write_measured

        check_out(out)
        if not under_launcher() and (size := processes or default_processes()) > 1:
            launch_command(["cluster", "measure", *([] if out is None else ["--out", str(out)])], size, None)
        text = measure_here()
        if text:
            write_measured(text, out)
