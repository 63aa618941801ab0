"""The rules of the house that no tool checks: public surface, version, floors that touch torch.distributed, length."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import plait

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "plait").rglob("*.py"))

# Files above comm/ that hand DTensors to, or take them from, the ecosystem: the boundary that DESIGN.md draws.
MAY_NAME_DTENSOR = {
    "engine/boundary.py": {"torch.distributed.tensor"},
}


def test_public_surface() -> None:
    assert sorted(plait.__all__) == [
        "BatchError",
        "CaptureError",
        "CheckpointError",
        "ConfigError",
        "DataError",
        "HomeError",
        "Layout",
        "LayoutError",
        "LocalBatch",
        "LossError",
        "Max",
        "Mean",
        "Mesh",
        "Min",
        "ModelError",
        "PlaitError",
        "Plan",
        "PlanError",
        "RankFailed",
        "Report",
        "ScheduleError",
        "SparseTable",
        "StepEnd",
        "Sum",
        "Trainer",
        "Verifier",
        "Weighted",
        "WorldError",
        "__version__",
        "explain",
        "loader",
        "memory",
        "optim",
        "run_ranks",
        "verify",
    ]


@pytest.mark.parametrize("name", plait.__all__)
def test_public_names_resolve_and_are_documented(name: str) -> None:
    value = getattr(plait, name)
    assert name == "__version__" or value.__doc__


def test_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == plait.__version__


def test_plans_need_no_torch() -> None:
    code = "import sys, plait; plait.Plan.parse('data=2 tensor=2'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_only_comm_names_torch_distributed(path: Path) -> None:
    place = path.relative_to(ROOT / "src" / "plait").as_posix()
    if place.startswith("comm/"):
        return
    allowed = MAY_NAME_DTENSOR.get(place, set())
    found = {name for name in _names(path) if name.startswith("torch.distributed")}
    assert {name for name in found if not any(name.startswith(prefix) for prefix in allowed)} == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_only_one_file_names_an_accelerators_library(path: Path) -> None:
    found = {name for name in _names(path) if name.startswith(("torch.cuda", "torch.accelerator"))}
    assert found == set() or path.name == "device.py"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_only_one_file_reads_the_keys_of_a_nodes_meta(path: Path) -> None:
    tree = ast.parse(path.read_text())
    keys = [n.slice for n in ast.walk(tree) if isinstance(n, ast.Subscript) and _is_meta(n.value)]
    keys += [n.args[0] for n in ast.walk(tree) if isinstance(n, ast.Call) and n.args and _is_meta(_receiver(n.func))]
    assert {k.value for k in keys if isinstance(k, ast.Constant)} <= {"val"} or path.name == "node_info.py"


def _is_meta(value: ast.AST | None) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "meta"


def _receiver(function: ast.AST) -> ast.AST | None:
    return function.value if isinstance(function, ast.Attribute) else None


def test_no_two_files_share_a_name() -> None:
    stems = Counter(path.stem for path in SOURCES if path.stem != "__init__")
    assert [stem for stem, count in stems.items() if count > 1] == []


def test_no_two_public_classes_share_a_name() -> None:
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


def _names(path: Path) -> set[str]:
    """Modules that the file imports and dotted names that it uses."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return names
