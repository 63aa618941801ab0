"""All plans of a space, one by one."""

from __future__ import annotations

from plait.plan.plan_space import PlanChoice, PlanSpace


def choices_of(space: PlanSpace) -> list[PlanChoice]:
    return [
        PlanChoice(outline, option, home, *order)
        for _, outline in space.outlines()
        for orders in [space.schedules(outline)]
        for option in space.states(outline)
        for home in space.homes
        for order in orders
    ]
