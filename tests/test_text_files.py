"""Files that a user names, and what stands in a run's folder: devices, pipes, links, files without end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.api.job.config import load_config
from plait.api.job.metrics import MetricsLog
from plait.compile.stages.split import _from_file
from plait.cost.costs import read_costs
from plait.errors import ConfigError, PlaitError
from plait.report.schedule_page import find_schedule
from plait.spec.cluster_file import read_cluster
from plait.spec.text_files import open_in_run


def read_schedule(path: Path) -> Any:
    return find_schedule(str(path), None, None, None)


READERS = [load_config, read_cluster, read_schedule, lambda path: read_costs(path, 2), lambda path: _from_file(path)]


@pytest.mark.parametrize("read", READERS)
def test_what_has_no_end_is_refused(read: Callable[[Any], Any], tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate((1 << 24) + 1)
    for path in (Path("/dev/zero"), pipe):
        with pytest.raises(PlaitError, match="it is no regular file"):
            read(path)
    with pytest.raises(PlaitError, match="it has more than .* KiB; give a shorter file"):
        read(large)
    with pytest.raises(PlaitError, match="Is a directory|is a directory"):
        read(tmp_path)


def test_a_run_writes_through_no_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    for name in ("metrics.jsonl", "sample.txt"):
        (tmp_path / name).symlink_to(other)
    with pytest.raises(ConfigError, match=r"metrics.jsonl is a link, through which a run does not write; remove it"):
        MetricsLog(tmp_path, 1)
    with pytest.raises(ConfigError, match="sample.txt is a link"):
        open_in_run(tmp_path / "sample.txt")
    assert other.read_text() == "mine"
