"""The passes that made the graphs of a plan as text: which ran, and what each changed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from plait.compile.pass_manager import PassReport
from plait.errors import PlanError
from plait.report.bytes import human_bytes


def pass_table(reports: Sequence[PassReport]) -> str:
    """A table with a row per pass that ran: calls in all graphs of the step, and bytes of the tensors they make."""
    lines = [f"{'pass':20} {'calls':>7} {'':>7} {'bytes made':>10} {'':>10}  what it does"]
    for each in reports:
        calls, made = each.num_calls[1] - each.num_calls[0], each.num_bytes[1] - each.num_bytes[0]
        more = f"{'+' if made > 0 else '-'}{human_bytes(abs(made))}" if made else ""
        size = human_bytes(each.num_bytes[1])
        lines.append(f"{each.name:20} {each.num_calls[1]:7} {f'{calls:+}' if calls else '':>7} {size:>10} {more:>10}"
                     f"  {each.about}")  # fmt: skip
    return "\n".join(lines)


def pass_diff(reports: Sequence[PassReport], name: str, known: Sequence[str]) -> str:
    """The graphs before and after one pass, as a diff. Raises PlanError for an unknown pass."""
    found = next((each for each in reports if each.name == name), None)
    if found is None and name not in known:
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the passes are {', '.join(known)}"
        raise PlanError(f"there is no pass {name!r}; {hint}")
    if found is None:
        return f"the pass {name} does not run under this plan"
    return found.diff or f"the pass {name} changes nothing"
