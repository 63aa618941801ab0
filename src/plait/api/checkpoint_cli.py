"""plait checkpoint: show, verify, convert."""

from __future__ import annotations

from typing import Annotated

import typer

from plait.api.command import errors_shown_once

checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, check them, export their weights.")
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint, or the folder or URL of a run, of which it is the last.")
]


@checkpoint_app.command()
def show(path: CheckpointArgument) -> None:
    """Print the contents of a checkpoint: step, plan, and each tensor's name, shape, dtype and bytes."""
    with errors_shown_once():
        from plait.report.checkpoint_text import describe_checkpoint

        print(describe_checkpoint(path))


@checkpoint_app.command("verify")
def verify_files(path: CheckpointArgument) -> None:
    """Check every byte of every checkpoint there; status 1, with the names of damaged files, if any is damaged."""
    with errors_shown_once(status=1):
        from plait.report.checkpoint_text import verify_checkpoints

        print(*verify_checkpoints(path), sep="\n")


@checkpoint_app.command()
def convert(
    path: CheckpointArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A file named .safetensors, or a folder.")],
) -> None:
    """Write the weights as safetensors: one file, or a folder in the form of Hugging Face."""
    with errors_shown_once():
        from plait.engine.checkpoint.export import CONFIG, export_weights

        written = export_weights(path, out)
        print(*written, sep="\n")
        if not out.endswith(".safetensors") and not written[-1].endswith(f"/{CONFIG}"):
            print(
                f"no {CONFIG}: the checkpoint has no configuration of the model's; from_pretrained needs one, which"
                f" model.config.save_pretrained({out!r}) writes"
            )
