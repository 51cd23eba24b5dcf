"""`anabranch conformance`: plays scenarios with a client in any language, and reports which rules it keeps."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from anabranch.cli.errors import CheckFailed
from anabranch.cli.options import Bootstrap, Json, Lane, Prefix, Verbose, argument, option
from anabranch.cli.output import print_note, print_result
from anabranch.errors import InvalidArgument
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.topics.names import DEFAULT_PREFIX

if TYPE_CHECKING:
    from anabranch.cli.cluster import LocalCluster

AT_ONCE = 4  # scenarios: most of their time is waiting
_CONTROLLERS = 2  # so that one takes over when the other is killed


class OwnControllers:
    """The controllers and the broker of a cluster that the kit started."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def kill_leader(self) -> None:
        """Kill the leader of control partition 0."""
        for controller in self._cluster.controllers:
            if 0 in controller.leads():
                controller.kill()

    def pause_broker(self) -> None:
        """Stop the broker until `resume_broker`."""
        self._cluster.broker.pause()

    def resume_broker(self) -> None:
        """Let the broker continue."""
        self._cluster.broker.resume()


def command(
    client: Annotated[
        list[str] | None,
        argument("COMMAND...", "The client under test, after --; without it: the Python client."),
    ] = None,
    only: Annotated[
        list[str] | None, option("--only SCENARIO", "Play only this scenario. Repeatable.")
    ] = None,
    at_once: Annotated[
        int, option("--at-once", "How many scenarios are played at the same time.", min=1, max=32)
    ] = AT_ONCE,
    bootstrap: Bootstrap = None,
    prefix: Prefix = DEFAULT_PREFIX,
    lane: Lane = OPEN_LANE,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Play scenarios with a client in any language, and report which rules of the protocol it keeps.

    The client is a child process that answers requests, one JSON document a line. Without --bootstrap the command
    starts a broker and two controllers. The exit code is 1 if a rule is broken.
    """
    from anabranch.conformance.child import NoAnswer
    from anabranch.conformance.play import Target
    from anabranch.conformance.run import chosen, run

    chosen(only or ())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="anabranch-conformance-")))
        words = client or [sys.executable, "-m", "anabranch.conformance.python_client"]
        if bootstrap:
            target = Target(bootstrap, prefix, lane, words, folder)
        else:
            from anabranch.cli.cluster import local_cluster

            print_note("starting a broker and controllers")
            cluster = stack.enter_context(local_cluster(folder, _CONTROLLERS))
            own = OwnControllers(cluster)
            target = Target(cluster.broker.bootstrap, prefix, lane, words, folder, own)
        try:
            report = run(target, only or (), at_once=at_once, progress=print_note)
        except (OSError, NoAnswer) as error:
            raise InvalidArgument(f"{shlex.join(words)} can't be played with: {error}") from error
    print_result(report.document(), *report.lines(), as_json=json)
    if report.failures:
        raise CheckFailed(f"{len(report.broken)} rules are broken")
