"""Options and streams that all pipelines need."""

from __future__ import annotations

import anabranch
from anabranch.spark.options import Connection


def options_of(connection: Connection, **more: str | int | None) -> dict[str, str]:
    """Options of ``format("anabranch")`` for a cluster; ``more`` without those that are None."""
    options = {
        "bootstrap": connection.bootstrap,
        "prefix": connection.prefix,
        "lane": connection.lane,
        "timeout": str(connection.timeout),
    }
    options |= {f"kafka.{name}": value for name, value in connection.librdkafka}
    return options | {name: str(value) for name, value in more.items() if value is not None}


def committed_under(client: anabranch.Client, scope: str, name: str) -> anabranch.Result | None:
    """The commit under a name, if there is one. An open transaction of that name is aborted."""
    with client.begin(scope, name=name) as txn:
        return txn.result
