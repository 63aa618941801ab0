"""The rules of the house that no tool checks: public surface, version, floors that touch torch.distributed, length."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
import types
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

import plait
import plait.backends.eager.passes  # registers the calls of eager programs
import plait.compile.pipeline  # registers plait's own calls
from plait.compile.ops import OP_SPECS, comm_ops
from plait.plan.axes import AXES

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "plait").rglob("*.py"))
pytestmark = pytest.mark.xdist_group("house")  # tests share the trees of the sources

# Files above comm/ that hand DTensors to, or take them from, the ecosystem: the boundary that DESIGN.md draws.
MAY_NAME_DTENSOR = {
    "engine/dtensors.py": ("torch.distributed.tensor",),
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
        "op_rule",
        "optim",
        "run_ranks",
        "search",
        "simulate",
        "verify",
    ]


def test_public_names_resolve_and_are_documented() -> None:
    undocumented = [name for name in plait.__all__ if not getattr(plait, name).__doc__]
    assert undocumented == []


def test_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == plait.__version__


def test_plans_need_no_torch() -> None:
    code = "import sys, plait; plait.Plan.parse('data=2 tensor=2'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _by_file(find: Callable[[Path], Collection[Any]]) -> dict[str, Collection[Any]]:
    """What `find` finds in each source, by the place of the file; those without are left out.

    One test asks it of all files: a test a file would be two thousand, which take longer to report than to run."""
    found = {path.relative_to(ROOT / "src" / "plait").as_posix(): find(path) for path in SOURCES}
    return {place: each for place, each in found.items() if each}


def test_only_comm_names_torch_distributed() -> None:
    found = _by_file(lambda path: {name for name in _names(path) if name.startswith("torch.distributed")})
    above = {place: names for place, names in found.items() if not place.startswith("comm/")}
    rest = {(place, name) for place, names in above.items() for name in names}
    assert {(place, name) for place, name in rest if not name.startswith(MAY_NAME_DTENSOR.get(place, ()))} == set()


def test_only_one_file_names_an_accelerators_library() -> None:
    libraries = ("torch.cuda", "torch.accelerator")
    found = _by_file(lambda path: {name for name in _names(path) if name.startswith(libraries)})
    assert {place: names for place, names in found.items() if Path(place).name != "device.py"} == {}


_OF_A_DEVICE = {"pin_memory", "is_pinned", "record_stream", "current_stream", "empty_cache", "mem_get_info"}


def test_only_one_file_calls_what_a_device_does() -> None:
    found = _by_file(lambda path: {n.attr for n in _nodes(path) if isinstance(n, ast.Attribute)} & _OF_A_DEVICE)
    assert {place: names for place, names in found.items() if Path(place).name != "device.py"} == {}


def test_only_one_file_reads_the_keys_of_a_nodes_meta() -> None:
    found = _by_file(lambda path: _keys_of_meta(path) - {"val"})
    assert {place: keys for place, keys in found.items() if Path(place).name != "node_info.py"} == {}


def _keys_of_meta(path: Path) -> set[object]:
    nodes = _nodes(path)
    keys = [n.slice for n in nodes if isinstance(n, ast.Subscript) and _is_meta(n.value)]
    keys += [n.args[0] for n in nodes if isinstance(n, ast.Call) and n.args and _is_meta(_receiver(n.func))]
    return {k.value for k in keys if isinstance(k, ast.Constant)}


def test_facts_of_ops_stand_in_their_rows() -> None:
    """No file outside compile/ops holds a list of ops: a pass asks the row of an op for what it needs."""
    found = _by_file(lambda path: [ast.unparse(held) for held in _held(_tree(path)) if _names_ops(held)])
    assert {place: lists for place, lists in found.items() if not place.startswith("compile/ops/")} == {}


@pytest.mark.parametrize(
    ("text", "is_list"),
    [
        ("aten = torch.ops.aten", False),
        ("register(start, spec=OpSpec())", False),
        ("_VIEWS = {aten.view.default, aten.t.default}", True),
        ("_SHAPES: dict[Any, int] = {torch.ops.aten.mm.default: 1}", True),
        ("_NORMS = frozenset(overloads('native_layer_norm'))", True),
        ("_ALIKE = [getattr(aten, name).default for name in ('ones_like', 'zeros_like')]", True),
        ("_SENDS = (comm_ops.all_gather, comm_ops.wait)", True),
        ("_BEGINS = dict.fromkeys((bucket_start, rows_start), 1)", True),
        ("class Pass:\n    ops = (aten.mm.default,)", True),
    ],
)
def test_lists_of_ops_are_recognised(text: str, is_list: bool) -> None:
    assert any(map(_names_ops, _held(ast.parse(text)))) is is_list


def _held(tree: ast.Module) -> list[ast.expr]:
    """What a module and its classes hold."""
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    statements = [each for body in bodies for each in body if isinstance(each, (ast.Assign, ast.AnnAssign))]
    return [each.value for each in statements if each.value is not None]


def _names_ops(value: ast.expr) -> bool:
    """Whether a value is more than one name, and ops are named in it."""
    if isinstance(value, (ast.Name, ast.Attribute)):
        return False
    names = {ast.unparse(node) for node in ast.walk(value) if isinstance(node, (ast.Name, ast.Attribute))}
    return not names.isdisjoint(_own_ops() | {"aten", "torch.ops", "comm_ops", "overloads"})


@functools.cache
def _own_ops() -> set[str]:
    calls = [op for op in OP_SPECS if isinstance(op, types.FunctionType) and op.__module__ != comm_ops.__name__]
    return {op.__name__ for op in calls}


_TAKE_AN_AXIS = {"allow", "axis_kind", "axis_size", "comm", "fixes", "get_group", "group", "groups", "on"}


def test_only_the_plan_knows_an_axis_by_its_name() -> None:
    names = {kind.name for kind in AXES}
    named = {path.name: _axes_in(path) & names for path in SOURCES if _folder(path) not in ("plan", "spec")}
    assert {name: found for name, found in named.items() if found} == {}


def _axes_in(path: Path) -> set[object]:
    """The constants that a file compares with, subscripts by, and gives to what takes an axis; keys of its plans."""
    found: list[ast.AST] = []
    keys: set[object] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Compare):
            found += [each for one in (node.left, *node.comparators) for each in _elements(one)]
        elif isinstance(node, ast.Subscript):
            found.append(node.slice)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _TAKE_AN_AXIS:
            found += node.args
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Plan.parse":
            texts = [each.value for arg in node.args for each in ast.walk(arg) if isinstance(each, ast.Constant)]
            keys |= {word.partition("=")[0] for text in texts for word in str(text).split()}
    return keys | {each.value for each in found if isinstance(each, ast.Constant)}


def test_only_the_plan_knows_what_its_keys_mean() -> None:
    """Below it, the sharding plan says what zero= and central= are, and the mesh how many ranks an axis has."""
    below = [path for path in SOURCES if _folder(path) not in ("plan", "spec")]
    nodes = [node for path in below for node in _nodes(path) if isinstance(node, ast.Attribute)]
    read = [ast.unparse(node) for node in nodes if node.attr in ("zero", "zero_stage", "central")]
    read += [
        text
        for node in nodes
        if node.attr in ("data", "replica", "tensor") and (text := ast.unparse(node)).endswith(f"plan.{node.attr}")
    ]
    assert [text for text in read if not text.startswith("aten.")] == []


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(path)))


def _folder(path: Path) -> str:
    return path.relative_to(ROOT / "src" / "plait").parts[0]


def _elements(value: ast.AST) -> list[ast.AST]:
    return list(value.elts) if isinstance(value, (ast.Tuple, ast.List, ast.Set)) else [value]


def _is_meta(value: ast.AST | None) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "meta"


def _receiver(function: ast.AST) -> ast.AST | None:
    return function.value if isinstance(function, ast.Attribute) else None


def test_no_two_files_share_a_name() -> None:
    stems = Counter(path.stem for path in SOURCES if path.stem != "__init__")
    assert [stem for stem, count in stems.items() if count > 1] == []


def test_no_two_public_classes_share_a_name() -> None:
    """Nor do two names of types, such as `Edges = Collection[Edge]`."""
    names = Counter(name for tree in map(_tree, SOURCES) for node in tree.body for name in _types_in(node))
    assert [name for name, count in names.items() if count > 1] == []


def _types_in(node: ast.stmt) -> list[str]:
    """The public class or type alias that a statement defines."""
    if isinstance(node, ast.ClassDef):
        return [] if node.name.startswith("_") else [node.name]
    names = [each.id for each in node.targets if isinstance(each, ast.Name)] if isinstance(node, ast.Assign) else []
    return [name for name in names if re.fullmatch("[A-Z][a-z][A-Za-z]*", name)]


# Words that the field does not know, in whose place other names stand.
_FORMER = {"agreeing", "agreement", "blame", "boxes", "chief", "consent", "foresee", "recipe", "rehearsal", "tally"}


def test_names_have_the_words_of_the_field() -> None:
    found = _by_file(lambda path: _words(path) & _FORMER)
    assert found == {}


def _words(path: Path) -> set[str]:
    """The words of the names that a file defines or uses, and of its own."""
    names = [path.stem]
    for node in _nodes(path):
        names += [str(getattr(node, field)) for field in ("name", "id", "attr", "arg") if hasattr(node, field)]
    return {word.lower() for name in names for word in re.findall("[A-Z]?[a-z]+", name)}


def test_text_files_have_an_encoding() -> None:
    """Else the locale says what a file's bytes mean: another user's run would read other data."""
    found = _by_file(lambda path: [ast.unparse(node) for node in _nodes(path) if _lacks_encoding(node)])
    assert found == {}


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("path.read_text()", True),
        ("path.write_text(text)", True),
        ("open(name)", True),
        ("path.open('w')", True),
        ("subprocess.run(command, text=True)", True),
        ("path.read_text(encoding='utf-8')", False),
        ("open(name, 'rb')", False),
        ("path.open(mode='wb')", False),
        ("os.open(name, flags)", False),
        ("read_text(source)", False),
    ],
)
def test_text_without_an_encoding_is_recognised(text: str, lacks: bool) -> None:
    assert _lacks_encoding(ast.parse(text, mode="eval").body) is lacks


_OPEN_THEIR_OWN = ("os.open", "Segment.open")  # descriptors; and a file system of fsspec's, whose modes are binary


def _lacks_encoding(node: ast.AST) -> bool:
    """Whether a call opens, reads or writes a file as text, in the encoding of the locale."""
    if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
        return False
    name, method = ast.unparse(node.func), isinstance(node.func, ast.Attribute)
    if name == "open" or (name.endswith(".open") and name not in _OPEN_THEIR_OWN):
        modes = [word.value for word in node.keywords if word.arg == "mode"] or node.args[0 if method else 1 :]
        text = [each.value for each in modes if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        return not any("b" in each for each in text)
    if method and name.endswith((".read_text", ".write_text")):
        return True
    return any(word.arg in ("text", "universal_newlines") for word in node.keywords) and "subprocess" in name


def test_files_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


@functools.cache
def _names(path: Path) -> set[str]:
    """Modules that the file imports and dotted names that it uses."""
    names = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and (name := _dotted(node)):
            names.add(name)
    return names


def _dotted(node: ast.AST) -> str:
    """A name with the attributes that are read of it; empty of the attributes of other values."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""
