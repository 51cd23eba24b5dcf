"""The load of each control partition, from two answers of its leader, and what an operator may do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from anabranch.types import LeaderInfo

FULL = 0.7  # share of a core from which a controller's leaders delay each other: they share one Python process
LEAST = 0.05  # share of a core below which giving control partitions away does not help


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a control partition.

    ``leader``: host, process and start time. ``commits``: a second. ``busy``: share of a core that the leader's
    thread takes. Both are None if there is only one answer of this leader, and ``busy`` below feature level 4.
    ``waiting``: commands not decided yet. ``uncommitted_bytes``: of open transactions in journals.
    """

    control_partition: int
    leader: str
    commits: float | None
    busy: float | None
    waiting: int
    uncommitted_bytes: int

    @property
    def row(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def loads(before: Iterable[LeaderInfo], after: Iterable[LeaderInfo], seconds: float) -> list[Load]:
    """The loads in the ``seconds`` between two answers of the leaders."""
    former = {each.control_partition: each for each in before}
    found = []
    for each in after:
        then = former.get(each.control_partition)
        commits = busy = None
        if then is not None and (then.term, then.leader) == (each.term, each.leader):
            commits = max(0, each.committed - then.committed) / max(seconds, 0.001)
            if each.busy_us:
                busy = max(0, each.busy_us - then.busy_us) / 1e6 / max(seconds, 0.001)
        found.append(
            Load(
                each.control_partition,
                each.leader,
                commits,
                busy,
                each.waiting,
                each.uncommitted_bytes,
            )
        )
    return found


def advice(found: Iterable[Load]) -> list[str]:
    """Sentences that say what would help, one for each controller that is full."""
    by_leader: dict[str, list[Load]] = {}
    for load in found:
        by_leader.setdefault(load.leader, []).append(load)
    shares = {leader: sum(map(_share, its)) for leader, its in by_leader.items()}
    texts = []
    for leader, its in sorted(by_leader.items()):
        if shares[leader] < FULL:
            continue
        *others, first = sorted(its, key=_share)
        full = f"{leader} takes {shares[leader]:.0%} of a core"
        if sum(map(_share, others)) < LEAST:
            texts.append(
                f"{full} for control partition {first.control_partition} alone: another controller can't help; "
                "put new scopes on other control partitions (`anabranch cluster grow`)"
            )
            continue
        texts.append(f"{full}: {_way(others[-1], leader, shares)}")
    return texts


def _way(given: Load, leader: str, shares: Mapping[str, float]) -> str:
    """The advice to give a control partition away: to a controller that has room for it, or to a new one."""
    what = f"give control partition {given.control_partition} ({_share(given):.0%}) to another controller"
    others = {name: share for name, share in shares.items() if name != leader}
    idle = min(others, key=lambda name: others[name], default=None)
    if idle is not None and others[idle] + _share(given) < min(FULL, shares[leader]):
        return f"{what}, such as {idle}, which takes {others[idle]:.0%}"
    return f"{what}: start one more"


def _share(load: Load) -> float:
    return load.busy or 0.0
