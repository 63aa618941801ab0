"""A job's progress: a bar with loss, tokens/s and the time left, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_SECONDS = 5.0


class Reporter:
    """Shows a job's progress, on rank 0 only. `steps` are those of the job, `done` those taken before it resumed."""

    def __init__(self, steps: int, done: int) -> None:
        self.console = Console(highlight=False)
        self._steps = steps
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=20)  # steps, tokens and seconds of the last calls
        self._done = done
        self._last_line = 0.0
        self._bar: Progress | None = None
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s  left"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("", total=steps, completed=done, loss=float("nan"), speed=0.0)
            self._bar.start()

    def step(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """Show that `step` steps are done, of which those since the last call took `tokens` and `seconds`."""
        self._recent.append((step - self._done, tokens, seconds))
        self._done = step
        num, all_tokens, spent = (sum(each) for each in zip(*self._recent, strict=True))
        speed = all_tokens / max(spent, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=loss, speed=speed)
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_SECONDS or step == self._steps:
            self._last_line = now
            left = (self._steps - step) * spent / num
            self.say(f"step {step}/{self._steps}  loss {loss:.3f}  {speed:,.0f} tokens/s  {left:.0f} s left")

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
