"""Leaders by the word of other brokers: one that is cut off from them still answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, Protocol

from anabranch.kafka.wire.connection import ConnectionBroken
from anabranch.kafka.wire.topics import Topic
from anabranch.ports import LogError, LogUnavailable

_AGE_S = 10.0  # after so long others are asked again about topics in use
_WAIT_S = 2.0  # so long the caller waits for all of them
_OWES_S = 15.0  # so long one that did not answer is not waited for, unless it is asked again


class _Cluster(Protocol):
    """`Cluster`, as it is needed here."""

    chance: Random

    @property
    def nodes(self) -> list[int]: ...

    def address(self, node: int) -> tuple[str, int]: ...
    def topic(self, name: str) -> Topic | None: ...
    def soon(self) -> float: ...
    def metadata(self, names: list[str], node: int, deadline: float, *, beside: bool) -> Any: ...
    def take_newer(self, found: Any) -> None: ...


class _Question:
    """One broker asked in a thread of its own."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self.began = time.monotonic()
        self._over = False
        self.thread = threading.Thread(target=self._run, args=(ask,), name="leaders", daemon=True)

    def _run(self, ask: Callable[[], bool]) -> None:
        # A failure at once costs no time, so that broker is waited for next time, too.
        self._over = ask() or time.monotonic() - self.began < _WAIT_S

    @property
    def owed(self) -> bool:
        """Whether the answer is late."""
        recent = time.monotonic() - self.began < _OWES_S
        return not self._over and (recent or self.thread.is_alive())

    @property
    def under_way(self) -> bool:
        """Whether it may still be answered."""
        return self.thread.ident is None or self.thread.is_alive()


# By address, the last question that was not answered in time; for all clusters: a snapshot has one of its own.
_late: dict[tuple[str, int], _Question] = {}


class SecondOpinions:
    """Questions beside the caller to others than the leaders. Being late harms no broker's name elsewhere."""

    def __init__(self, cluster: _Cluster) -> None:
        self._cluster = cluster
        self.told: dict[str, float] = {}  # when others than its leaders were asked for a topic last
        self._looking: threading.Thread | None = None

    def look(self, topics: Collection[str]) -> None:
        """Once in a while and beside the caller, ask for newer leaders of topics that are in use."""
        now = time.monotonic()
        # Those that are soon due come along: ages that are apart would cost a question each.
        old = [topic for topic in topics if now - self.told.get(topic, now) > _AGE_S / 2]
        due = any(now - self.told[topic] > _AGE_S for topic in old)
        looks = self._looking is not None and self._looking.is_alive()
        if not due or looks or len(self._cluster.nodes) < 2:
            return
        self.told.update(dict.fromkeys(old, now))
        self._looking = threading.Thread(
            target=self._look, args=(old,), name="leaders", daemon=True
        )
        with suppress(RuntimeError):  # there are too many threads: the next look may have one
            self._looking.start()

    def _look(self, names: list[str]) -> None:
        """Ask until each topic's leaders are told by another broker."""
        known = filter(None, map(self._cluster.topic, names))
        left = {topic.name: topic.leading for topic in known}
        for node in self._by_chance():
            here = [name for name, nodes in left.items() if nodes - {node}]
            if here and self._ask(node, here):
                for name in here:
                    left[name] &= {node}

    def _by_chance(self) -> list[int]:
        nodes = self._cluster.nodes
        self._cluster.chance.shuffle(nodes)
        return sorted(nodes, key=lambda node: self._owed(node) is not None)

    def ask_replicas(self, topics: Collection[str], deadline: float) -> None:
        """Ask all replicas whether known leaders are still the newest: a new one knows before it takes records.

        They are waited for, except those whose last answer is owed: these are asked, too, one question at a time.
        Half of the time that is left stays for the question to the leaders.
        """
        asked: dict[int, list[str]] = {}
        for topic in filter(None, map(self._cluster.topic, topics)):
            for node in topic.replicas:
                if topic.leading - {node}:
                    asked.setdefault(node, []).append(topic.name)
        waited: dict[tuple[str, int], _Question] = {}
        for node in asked.keys() & set(self._cluster.nodes):
            owed = self._owed(node)
            if owed is not None and owed.under_way:
                continue
            question = _Question(partial(self._ask, node, asked[node]))
            try:
                question.thread.start()
            except RuntimeError as error:  # there are too many threads
                raise LogUnavailable(f"replicas can't be asked: {error}", asked[node]) from error
            (waited if owed is None else _late)[self._cluster.address(node)] = question
        now = time.monotonic()
        until = now + min(_WAIT_S, max(0.0, deadline - now) / 2)
        for address, question in waited.items():
            question.thread.join(max(0.0, until - time.monotonic()))
            if question.owed:
                _late[address] = question

    def _owed(self, node: int) -> _Question | None:
        with suppress(ConnectionBroken):  # it may be known no more
            question = _late.get(self._cluster.address(node))
            return question if question is not None and question.owed else None
        return None

    def _ask(self, node: int, names: list[str]) -> bool:
        """Take newer leaders. Returns whether there was an answer."""
        try:
            found = self._cluster.metadata(names, node, self._cluster.soon(), beside=True)
        except (ConnectionBroken, LogError):
            return False
        self._cluster.take_newer(found)
        return True
