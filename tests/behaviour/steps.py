"""Steps that many tests of this folder take: a commit, all that is committed, a wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

import anabranch


def commit(client: anabranch.Client, stream: str, *values: bytes) -> anabranch.Result:
    """One transaction; each value is its own key."""
    with client.begin(stream.partition("/")[0]) as txn:
        for value in values:
            txn.write(stream, value, key=value)
        return txn.commit()


def committed(client: anabranch.Client, stream: str) -> list[anabranch.Event]:
    """All events as of now."""
    return list(client.snapshot(stream).read(stream))


def values(client: anabranch.Client, stream: str) -> Counter[bytes | None]:
    """All values as of now."""
    return Counter(event.value for event in committed(client, stream))


def alter_topics(bootstrap: str, topics: Iterable[str], name: str, value: str) -> None:
    """Change a setting of topics by hand. Brokers act on it a little after it is taken."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resources = [
        ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry]) for topic in topics
    ]
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    for future in admin.incremental_alter_configs(resources).values():
        future.result(30)
