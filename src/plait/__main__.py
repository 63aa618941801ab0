"""`python -m plait`, which torchrun can start: the command line."""

from __future__ import annotations

import signal
from types import FrameType

from plait.comm.launch import end_with_launcher, leave_interrupted


def main() -> None:
    """The entry point of `plait` and `python -m plait`. Ctrl-C ends it in one line, also while it still imports."""
    signal.signal(signal.SIGINT, _leave)
    end_with_launcher()
    from plait.api.cli import main as command_line

    command_line()


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once, because an exception that is raised during an import may be lost."""
    leave_interrupted()


if __name__ == "__main__":
    main()
