"""How clients scale streams: evenly, or by hand, by splitting segments and merging neighbours."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from anabranch.client.client import Client
from anabranch.errors import InvalidArgument
from anabranch.types import StreamDescription
from tests.sim.world import World

MOST_SEGMENTS = 5
STALE = "not an active segment"  # the plan was made for a layout that is no more


def scale_somehow(world: World, client: Client, stream: str) -> None:
    """One scaling. What was planned by hand may be out of date by the time it is received."""
    random = world.random
    timeout = random.choice((1.0, 5.0, 20.0))
    if random.random() < 0.4:
        client.scale(stream, random.randint(1, MOST_SEGMENTS), timeout=timeout)
        return
    found = client.describe(stream)
    if random.random() < 0.3:
        world.sleep(random.expovariate(1.0))
    seal, ranges = hand_plan(random, found)
    try:
        client.scale(stream, seal=seal, ranges=ranges, timeout=timeout)
    except InvalidArgument as error:
        if STALE not in str(error):
            raise InvalidArgument(f"{stream}: seal {seal}, open {ranges}: {error}") from error


def hand_plan(random: Random, stream: StreamDescription) -> tuple[list[int], list[tuple[int, int]]]:
    """What to seal and what to open instead: a split, a merge of neighbours, or other bounds between two."""
    segments = sorted(stream.segments, key=lambda s: s.low)
    if len(segments) > 1 and (len(segments) >= MOST_SEGMENTS or random.random() < 0.6):
        low, high = random.choice(list(pairwise(segments)))
        seal = [low.segment_id, high.segment_id]
        bounds = [low.low, high.high]
        if random.random() < 0.3:
            bounds.insert(1, random.randrange(low.low + 1, high.high))
    else:
        only = random.choice(segments)
        seal = [only.segment_id]
        bounds = [only.low, only.high]
        for _ in range(random.choice((0, 1, 1, 2))):
            bounds.append(random.randrange(only.low + 1, only.high))
    return seal, list(pairwise(sorted(set(bounds))))
