"""Few cases in which each value of a key meets each value of every other key."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


def covering(values: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Cases, each with one value of every key, such that any two values of two keys occur together in one of them.

    A case begins with a pair that none has yet, and then takes the key and the value by which it has most such pairs;
    of equal ones the first, so that the first value of a key is that of the most cases.
    """
    missing = {
        pair
        for one, other in itertools.combinations(values, 2)
        for pair in itertools.product(
            [(one, value) for value in values[one]], [(other, value) for value in values[other]]
        )
    }
    cases = []
    for pair in sorted(missing):
        if pair in missing:
            case = dict(pair)
            while rest := [(key, value) for key in values if key not in case for value in values[key]]:
                key, value = max(rest, key=lambda each: len(missing & {*_pairs(case | dict([each]), values)}))
                case[key] = value
            missing -= {*_pairs(case, values)}
            cases.append({key: case[key] for key in values})
    return cases


def _pairs(case: Mapping[str, str], values: Mapping[str, Sequence[str]]) -> list[tuple[tuple[str, str], ...]]:
    """The pairs of a case in part, in the order of the keys."""
    return [*itertools.combinations([(key, case[key]) for key in values if key in case], 2)]
