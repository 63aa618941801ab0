"""Goodput under failures: closed forms against a simulation of failures, and the interval that loses least."""

from __future__ import annotations

import random

import pytest

from plait.cost.goodput import (
    daly_interval,
    goodput_of_replicas,
    goodput_of_restarts,
    mean_time_between_failures,
    young_interval,
)
from plait.errors import ConfigError


def played(mean: float, save: float, restart: float, interval: float, segments: int) -> float:
    """The fraction of time that trains, of segments that are tried until no failure meets them."""
    draws = random.Random(0)
    seconds, until = 0.0, draws.expovariate(1 / mean)
    for _ in range(segments):
        while until < interval + save:
            seconds, until = seconds + until, draws.expovariate(1 / mean)
            while until < restart:
                seconds, until = seconds + until, draws.expovariate(1 / mean)
            seconds, until = seconds + restart, until - restart
        seconds, until = seconds + interval + save, until - interval - save
    return segments * interval / seconds


@pytest.mark.parametrize(
    ("mean", "save", "restart", "interval"),
    [(10_000.0, 30.0, 600.0, 800.0), (1_400.0, 60.0, 600.0, 300.0), (500.0, 100.0, 400.0, 700.0)],
)
def test_restarts_take_what_failures_that_are_drawn_take(
    mean: float, save: float, restart: float, interval: float
) -> None:
    found = goodput_of_restarts(mean, save, restart, interval)
    assert found.fraction == pytest.approx(played(mean, save, restart, interval, 40_000), rel=0.03)
    assert found.fraction + sum(found.lost.values()) == pytest.approx(1.0)
    assert all(part >= 0 for part in found.lost.values())


@pytest.mark.parametrize(("mean", "save"), [(10_000.0, 10.0), (10_000.0, 300.0), (1_000.0, 200.0)])
def test_no_interval_loses_less_than_dalys(mean: float, save: float) -> None:
    best = goodput_of_restarts(mean, save, 300.0)
    every = [
        goodput_of_restarts(mean, save, 300.0, best.interval * factor).fraction for factor in (0.5, 0.8, 1.25, 2.0)
    ]
    assert best.interval == daly_interval(save, mean)
    assert all(best.fraction > other for other in every)
    young = goodput_of_restarts(mean, save, 300.0, young_interval(save, mean)).fraction
    assert 0.97 * best.fraction < young <= best.fraction * 1.001


def test_dalys_interval_is_youngs_for_short_saves() -> None:
    assert daly_interval(1.0, 1e6) == pytest.approx(young_interval(1.0, 1e6) - 1, rel=1e-3)
    assert young_interval(2.0, 100.0) == 20.0
    assert daly_interval(300.0, 100.0) == 100.0


def test_a_save_that_counts_later_costs_the_work_until_then() -> None:
    at_once, later = goodput_of_restarts(5_000.0, 5.0, 300.0), goodput_of_restarts(5_000.0, 5.0, 300.0, delay=120.0)
    assert later.fraction < at_once.fraction
    assert later.lost["work done again"] > at_once.lost["work done again"]
    assert later.lost["restarts"] == pytest.approx(at_once.lost["restarts"], rel=0.1)
    slow = goodput_of_restarts(5_000.0, 0.001, 300.0, delay=900.0)
    assert slow.interval == 900.0  # one save is written at a time
    assert goodput_of_restarts(1.0, 10.0, 600.0).fraction == 0.0


def test_replicas_lose_the_one_that_failed() -> None:
    week = 7 * 86400.0
    found = goodput_of_replicas(100 * week, 1024, 8, step=10.0, stall=20.0, heal=600.0)
    mean = mean_time_between_failures(100 * week, 1024)
    away, seconds, draws = 0.0, 0.0, random.Random(0)
    for _ in range(50_000):  # each failure: the stall, half of a step, then the time to the next; one of 8 is away
        until = draws.expovariate(1 / mean)
        seconds += until + 25.0
        away += 600.0 / 8
    assert found.fraction == pytest.approx((50_000 * mean - away) / seconds, rel=0.01)
    assert found.fraction + sum(found.lost.values()) == pytest.approx(1.0)
    assert found.fraction > goodput_of_restarts(mean, 10.0, 600.0).fraction
    more = goodput_of_replicas(100 * week, 1024, 64, step=10.0, stall=20.0, heal=600.0)
    assert more.lost["replicas that are away"] < found.lost["replicas that are away"] / 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_time_between_failures(0.0, 8), "between failures of a node of 0.0 seconds cannot be"),
        (lambda: mean_time_between_failures(1.0, 0), "0 nodes cannot fail"),
        (lambda: goodput_of_restarts(100.0, -1.0, 1.0), "a save of -1.0 seconds cannot be"),
        (lambda: goodput_of_restarts(float("nan"), 1.0, 1.0), "the mean time between failures of nan seconds"),
        (lambda: goodput_of_restarts(100.0, 1.0, 1.0, 0.0), "the training between two saves of 0.0 seconds"),
        (lambda: goodput_of_replicas(1e6, 16, 1, 1.0, 1.0, 1.0), "1 replicas of 16 nodes cannot go on without one"),
        (lambda: goodput_of_replicas(1e6, 16, 3, 1.0, 1.0, 1.0), "which divide the nodes"),
    ],
)
def test_what_cannot_be(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=message):
        call()
