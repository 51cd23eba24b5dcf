"""A run of the kit: scenarios with one client, several at the same time, and their report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import anabranch
from anabranch.conformance.child import ChildError, NoAnswer, NotOffered
from anabranch.conformance.play import Children, Play, Target, playing
from anabranch.conformance.rules import Report
from anabranch.conformance.scenarios import SCENARIOS, NotPlayed, Scenario
from anabranch.errors import AnabranchError, InvalidArgument
from anabranch.kafka.log import KafkaLog
from anabranch.ports import LogError

AT_ONCE = 4  # scenarios: most of their time is waiting
log = logging.getLogger("anabranch.conformance")


def chosen(names: Iterable[str]) -> list[Scenario]:
    """Scenarios by their names; all if none is given. Raises `InvalidArgument`."""
    wanted = list(names)
    unknown = [name for name in wanted if name not in SCENARIOS]
    if unknown:
        raise InvalidArgument(f"{unknown[0]!r} is no scenario: {', '.join(SCENARIOS)}")
    return [SCENARIOS[name] for name in wanted or SCENARIOS]


def run(
    target: Target,
    names: Iterable[str] = (),
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Play the scenarios, and report. ``progress``: gets a line for each.

    Raises: OSError (the command can't be started), NoAnswer (it does not answer ``hello``), InvalidArgument.
    """
    scenarios, whole = chosen(names), Report()
    with playing(target) as (pool, kafka, kit):
        first = pool.take()
        whole.client = str(first.about.get("client", ""))
        pool.give(first)

        def play(scenario: Scenario) -> Report:
            part = _play(scenario, target, pool, kafka, kit)
            progress(_line(part))
            return part

        with ThreadPoolExecutor(AT_ONCE) as threads:
            parts = list(threads.map(play, [one for one in scenarios if not one.alone]))
        parts += [play(scenario) for scenario in scenarios if scenario.alone]
        for part in parts:
            _add(whole, part)
    return whole


def _play(
    scenario: Scenario, target: Target, pool: Children, kafka: KafkaLog, kit: anabranch.Client
) -> Report:
    part = Report(scenario=scenario.name)
    if scenario.own and target.controllers is None:
        part.skipped[scenario.name] = "needs a cluster of the kit's own: leave --bootstrap out"
        return part
    play, began, reuse = Play(target, part, pool, kafka, kit), time.monotonic(), False
    try:
        play.stream("one", 2)  # makes the scope
        scenario.play(play)
        play.finish()
        reuse = True
    except NotOffered as error:
        part = Report(scenario=scenario.name)
        part.skipped[scenario.name] = f"the client does not offer it: {error}"
        return part
    except NotPlayed as error:
        part.skipped[scenario.name] = str(error)
        return part
    except (ChildError, NoAnswer) as error:
        part.check(scenario.rules[0], False, f"the scenario ended early: {error}")
        with suppress(AnabranchError, LogError):  # what was sent by then may say why
            play.check_sent()
    except (AnabranchError, LogError) as error:
        log.warning("the kit could not play %s: %r", scenario.name, error)
        part.check(scenario.rules[0], False, f"the kit could not play it to its end: {error!r}")
    finally:
        play.close(reuse=reuse)
    part.played[scenario.name] = time.monotonic() - began
    return part


def _add(whole: Report, part: Report) -> None:
    whole.passed += part.passed
    whole.failures += part.failures
    whole.played |= part.played
    whole.skipped |= part.skipped


def _line(part: Report) -> str:
    if why := part.skipped.get(part.scenario):
        return f"{part.scenario}: not played: {why}"
    seconds = part.played[part.scenario]
    if part.failures:
        broken = ", ".join(part.broken)
        return f"{part.scenario}: {seconds:.1f} s: breaks {broken}"
    return f"{part.scenario}: {seconds:.1f} s: {sum(part.passed.values())} checks"
