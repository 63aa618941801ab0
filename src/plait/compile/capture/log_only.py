"""Whether a line of the user's code only prints or logs what it computes, so that the step does not depend on it.

The answer comes from the source of the line. Without source, as of code that `exec` ran, it is no, except for a branch
that branches.py sees to show something in the bytecode.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import logging
import sys
from types import FrameType

from plait.compile.capture.capture_errors import is_library, users_frame

LOGS = frozenset(
    {
        "debug", "info", "warning", "warn", "error", "critical", "exception", "print", "write", "set_description",
        "set_postfix", "set_postfix_str",
    }
)  # fmt: skip
_TESTS = frozenset({"bool", "any", "all"})
_READS = frozenset({"sum", "mean", "parameters", "named_parameters", "values", "float", "to", "view", "reshape"})
_Path = list[ast.AST]  # from the module down to a node


def is_shown(frame: FrameType | None = None) -> bool:
    """Whether the value that the user's code computes now is only printed or logged."""
    at = frame or sys._getframe(1)
    while at is not None and at.f_code.co_filename != logging.__file__:
        at = at.f_back  # type: ignore[assignment]
    if at is not None:
        return True
    asking = users_frame(frame or sys._getframe(1))
    path = _path_of(asking)
    statement = next((node for node in reversed(path) if isinstance(node, ast.stmt)), None)
    if statement is not None and _only_shows(statement, _function(path)):
        return True
    # A library may ask within the call that shows: a progress bar, or what Ray and others put in the place of print.
    at = asking
    while at is not None and is_library(at.f_code.co_filename):
        at = at.f_back
    path = [] if at is asking else _path_of(at)
    return bool(path) and isinstance(path[-1], ast.Expr) and _only_shows(path[-1], None)


def branch_without_output(frame: FrameType) -> bool | None:
    """The truth value of a condition with which the branch that only shows something is skipped, as in
    `if x.isnan().any(): print(...)`; None if both branches do more."""
    path = _path_of(frame)
    at = next((i for i in reversed(range(len(path))) if isinstance(path[i], ast.stmt)), None)
    statement = None if at is None else path[at]
    if at is None or not isinstance(statement, ast.If) or path[at + 1 : at + 2] != [statement.test]:
        return None
    function = _function(path)
    if all(_only_shows(one, function) for one in statement.body):
        wanted = False
    elif statement.orelse and all(_only_shows(one, function) for one in statement.orelse):
        wanted = True
    else:
        return None
    for node in path[at + 1 : -1]:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            wanted = not wanted
        elif not (isinstance(node, ast.BoolOp) or _called(node) in _TESTS):
            return None
    return wanted


def idle_lines(frame: FrameType) -> frozenset[int]:
    """The lines of a branch of the `if` whose condition the frame computes, if it adds zeros at most:
    `else: out[0] += 0 * sum(p.sum() for p in expert.parameters())`, which gives parameters a gradient."""
    path = _path_of(frame)
    statement = next((node for node in reversed(path) if isinstance(node, ast.stmt)), None)
    if not isinstance(statement, ast.If) or statement.test not in path:
        return frozenset()
    branches = [each for each in (statement.body, statement.orelse) if all(map(_adds_zeros, each))]
    return frozenset(line for each in branches for one in each for line in range(one.lineno, (one.end_lineno or 0) + 1))


def _adds_zeros(statement: ast.AST) -> bool:
    """Whether a statement does nothing, or adds zero times something that is only read."""
    if isinstance(statement, ast.If):
        return _only_reads(statement.test) and all(map(_adds_zeros, [*statement.body, *statement.orelse]))
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.value, ast.BinOp):
        sum_of, target = statement.value, statement.targets[0]
        same = ast.unparse(sum_of.left) == ast.unparse(target)
        return isinstance(sum_of.op, (ast.Add, ast.Sub)) and same and _is_zero(sum_of.right) and _only_reads(target)
    if isinstance(statement, ast.AugAssign):
        adds = isinstance(statement.op, (ast.Add, ast.Sub))
        return adds and _is_zero(statement.value) and _only_reads(statement.target)
    return isinstance(statement, ast.Pass)


def _is_zero(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    zero = any(isinstance(one, ast.Constant) and one.value in (0, 0.0) for one in (node.left, node.right))
    return zero and _only_reads(node)


def _only_reads(node: ast.AST) -> bool:
    """Whether an expression calls nothing but what reads parameters and reduces tensors."""
    changes = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    names = (one.id if isinstance(one, ast.Name) else getattr(one, "attr", "") for one in calls)
    return not any(isinstance(each, changes) for each in ast.walk(node)) and all(name in _READS for name in names)


def _only_shows(statement: ast.AST, function: ast.AST | None) -> bool:
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.If):
        return all(_only_shows(one, function) for one in [*statement.body, *statement.orelse])
    if any(isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for node in ast.walk(statement)):
        return False
    if isinstance(statement, ast.Expr):
        call = statement.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            return call.func.attr in LOGS
        return isinstance(call, ast.Constant) or _called(call) == "print"
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and function is not None:
        target = statement.targets[0]
        return isinstance(target, ast.Name) and _read_to_be_shown(target.id, function)
    return False


def _read_to_be_shown(name: str, function: ast.AST) -> bool:
    """Whether a local variable is assigned once, and read only by statements that show something."""
    stored, todo = 0, [(function, False)]
    while todo:
        node, shown = todo.pop()
        if isinstance(node, ast.Expr):
            shown = _only_shows(node, None)
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return False
        if isinstance(node, ast.Name) and node.id == name:
            stored += isinstance(node.ctx, ast.Store)
            if isinstance(node.ctx, ast.Load) and not shown:
                return False
        todo += [(child, shown) for child in ast.iter_child_nodes(node)]
    return stored == 1


def _called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _function(path: _Path) -> ast.AST | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return next((node for node in reversed(path) if isinstance(node, kinds)), None)


def _path_of(frame: FrameType | None) -> _Path:
    """The AST nodes around what a frame computes now, outermost first."""
    if frame is None:
        return []
    calls = [one for one in dis.get_instructions(frame.f_code) if one.opname not in ("CACHE", "EXTENDED_ARG")]
    # A frame that waits for a Python function is at the end of the cache that follows the instruction.
    at = max(sum(one.offset <= frame.f_lasti for one in calls) - 1, 0)
    if at and ("JUMP" in calls[at].opname or calls[at].opname == "TO_BOOL"):
        at -= 1  # the instruction that made the condition: the position of a jump is not reliable
    where = calls[at].positions
    first, last, column, end = (None,) * 4 if where is None else where
    node: ast.AST | None = _tree(frame.f_code.co_filename)
    if node is None or first is None or last is None or column is None or end is None:
        return []
    span = ((first, column), (last, end))
    path: _Path = []
    while node is not None:
        path.append(node)
        if path[1:] and _span(node) == span:
            break
        node = next((one for one in _children(node) if _holds(one, span)), None)
    return path


def _children(node: ast.AST) -> list[ast.AST]:
    """The children that have a position in the source; for a child without one, its children."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        found += [child] if hasattr(child, "lineno") else _children(child)
    return found


def _span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    at: ast.expr = node  # type: ignore[assignment]
    return (at.lineno, at.col_offset), (at.end_lineno or 0, at.end_col_offset or 0)


def _holds(node: ast.AST, span: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    start, end = _span(node)
    return start <= span[0] and span[1] <= end


@functools.lru_cache(64)
def _tree(file: str) -> ast.AST | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
