"""Step time and memory of this tree against another one, such as a worktree of a former commit.

    python -m bench.former FOLDER [small wide] [--plans "data=2" "tensor=2"] [--rounds 9] [--write]

Each side runs its own `bench.variants.plait`, on its own plait.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness import Variant, compare, publish, table

PLANS = ("data=2", "data=2 zero=3", "tensor=2", "pipeline=2 micro=8 schedule=1f1b")
TARGETS = "To reach: time within 3% of the former tree's, memory within 2%."


def build(folder: str, workload: str, plan: str) -> Callable[[], Any]:
    """The step of a plan, of the tree in that folder. For a process that has imported no plait."""
    assert "plait" not in sys.modules
    sys.path[:0] = [folder, f"{folder}/src"]
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "bench"}
    for name in own:
        del sys.modules[name]
    from bench import variants

    step: Callable[[], Any] = variants.plait(workload, plan)
    sys.modules.update(own)  # what the harness sends is of its own classes
    assert Path(sys.modules["plait"].__file__ or "").is_relative_to(folder), "another plait is installed"
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the other tree")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", default=["small", "wide"])
    parser.add_argument("--plans", nargs="*", default=PLANS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the table in docs/bench/")
    given = parser.parse_args()
    trees = {"former": str(given.folder.resolve()), "now": str(Path(__file__).resolve().parent.parent)}
    parts = []
    for workload in given.workloads:
        for plan in given.plans:
            sides = [Variant(side, build, (tree, workload, plan)) for side, tree in trees.items()]
            found = table(compare(sides, given.rounds, given.steps), ["former"])
            parts.append(f"## {workload}, {plan}\n\n{found}")
            print(parts[-1], flush=True)
    publish("This tree against a former one, 2 processes", "\n\n".join([TARGETS, *parts]), "former", given.write)


if __name__ == "__main__":
    main()
