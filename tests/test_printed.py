"""What is printed and read where the locale is not UTF-8, nobody reads, or the disk is full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer import Exit

from plait.api.command import errors_shown_once
from plait.api.job.metrics import printable
from plait.api.output import lasting_output
from plait.errors import ConfigError

ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}


def test_a_locale_that_is_not_utf8_changes_no_data() -> None:
    code = (
        "import sys, zlib, locale; from plait.api.job.gpt import python_text; from plait.api.output import *\n"
        "with lasting_output(): print(zlib.crc32(python_text()), locale.getpreferredencoding(False), '\\u2192')"
    )
    given = [{**os.environ, **ASCII}, {**os.environ, **ASCII, "PYTHONUTF8": "1"}]
    runs = [subprocess.run([sys.executable, "-c", code], env=each, capture_output=True, check=True) for each in given]
    (data, encoding, arrow), (wanted, other, _) = (run.stdout.split() for run in runs)
    assert encoding != other and data == wanted and arrow == b"\\u2192"


@contextmanager
def stdout_to(path: str | int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with open(path, "w", encoding="ascii", buffering=1) as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        yield


def test_a_pipe_that_nobody_reads_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with stdout_to(write, monkeypatch), errors_shown_once():
        for _ in range(3):
            print("a line that does not end the run", "\u00e9", flush=True)
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_told_at_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with stdout_to("/dev/full", monkeypatch), pytest.raises(SystemExit) as status, lasting_output():
        print("lost", flush=True)
    assert status.value.code == 1
    assert capsys.readouterr().err == "plait: the output could not be written: No space left on device\n"


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("a\x1b[2J\0\nb\u00e9\t\x9b") == "a\\x1b[2J\\x00\nb\u00e9\t\\x9b"


def test_messages_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exit), errors_shown_once():
        raise ConfigError("layers = ':x:' [red]")
    assert "layers = ':x:' [red]" in capsys.readouterr().err


def test_a_line_of_metrics_in_another_encoding_is_passed_by(tmp_path: Path) -> None:
    from plait.api.job.metrics import MetricsLog

    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2}\n\xff\xfe\n')
    MetricsLog(tmp_path, 2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1, "loss": 2}\n'
