"""The common part of load, export and compact: options, and whether a failed job committed its rows."""

from __future__ import annotations

from collections.abc import Callable

import anabranch
from anabranch.errors import AnabranchError, OutcomeUnknown
from anabranch.spark.failures import named_failures
from anabranch.spark.options import Connection


def options_of(connection: Connection, **more: str | int | None) -> dict[str, str]:
    """Options of ``format("anabranch")`` for a cluster, and the options in ``more`` that are not None."""
    options = {
        "bootstrap": connection.bootstrap,
        "prefix": connection.prefix,
        "lane": connection.lane,
        "timeout": str(connection.timeout),
    }
    options |= {f"kafka.{name}": value for name, value in connection.librdkafka}
    return options | {name: str(value) for name, value in more.items() if value is not None}


def committed_under(client: anabranch.Client, scope: str, name: str) -> anabranch.Result | None:
    """The commit under a name, if there is one. Aborts an open transaction of that name."""
    with client.begin(scope, name=name) as txn:
        return txn.result


def saved(
    client: anabranch.Client, scope: str, name: str, save: Callable[[], None]
) -> tuple[anabranch.Result | None, bool]:
    """Save rows by a job. Returns the commit under the name (None: no rows), and whether the job failed after it.

    Raises: the job's error, if nothing is committed; OutcomeUnknown.
    """
    failed: Exception | None = None
    try:
        with named_failures():
            save()
    except Exception as error:  # noqa: BLE001 - the rows may be committed after any error
        failed = error
    try:
        result = committed_under(client, scope, name)
    except AnabranchError as error:
        raise OutcomeUnknown(
            f"whether the rows are committed is not known: run it again with --name {name}, under which they are "
            f"committed once; {failed or error}"
        ) from (failed or error)
    if result is None and failed is not None:
        raise failed
    return result, failed is not None
