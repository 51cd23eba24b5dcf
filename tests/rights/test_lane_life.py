"""A lane's life on a broker with an authorizer: made, granted, used, looked into, blocked; nothing by others."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import anabranch
from anabranch import errors
from anabranch.cli.lane import differences
from anabranch.topics import rights
from anabranch.topics.names import commands_topic, replies_topic
from anabranch.topics.rights import TOPIC, Right
from tests.cluster import ControllerProcess, words
from tests.rights.test_each_right import commit
from tests.secured import secured_broker
from tests.secured_lanes import at_last

pytestmark = pytest.mark.broker
CONTROLLER, OPERATOR, ETL, OTHER = USERS = "controller", "operator", "etl", "other"
STREAM, REPLIES = "shop/a", replies_topic(lane="etl")


@pytest.mark.soak
def test_a_lanes_life(tmp_path: Path) -> None:
    with secured_broker(tmp_path, *USERS) as secured:
        secured.grant(CONTROLLER, rights.controller_rights("anabranch", "shop"))
        secured.grant(OPERATOR, rights.client_rights(lane="admin"))
        secured.grant(OPERATOR, rights.lane_maker_rights())
        secured.grant(OTHER, rights.client_rights())

        def connected(user: str, lane: str) -> anabranch.Client:
            return anabranch.connect(
                secured.bootstrap, lane=lane, config=secured.options(user), timeout=5
            )

        def differ() -> list[str]:
            lanes = {name: commands_topic(lane=name) for name in ("open", "admin", "etl")}
            found = differences(operator.acls(), operator.grants(), lanes, [STREAM])
            return [f"{each.principal} {each.stream}" for each in found]

        with (
            ControllerProcess(
                secured.bootstrap,
                tmp_path / "controller",
                arguments=(*words(secured.options(CONTROLLER)), "--control-partitions", "2"),
            ) as controller,
            connected(OPERATOR, "admin") as operator,
            connected(ETL, "etl") as etl,
            connected(OTHER, "open") as other,
        ):
            controller.wait_leading()
            at_last(lambda: operator.add_lane("etl", ["User:etl"], apply=True, adopt_topics=True))
            operator.grant("etl", "shop/*", ["write", "create", "describe"])
            at_last(partial(etl.create_stream, STREAM))
            assert differ() == ["User:etl shop/a"]  # it may write, and the brokers don't let it
            secured.grant(ETL, rights.writer_rights(STREAM))
            assert differ() == []
            commit(etl, STREAM)

            # Others can't use the lane, nor touch its transactions by their ids.
            with connected(OTHER, "etl") as thief, pytest.raises(errors.NotAuthorized):
                thief.streams()
            txn = etl.begin("shop")
            txn.write(STREAM, b"v")
            txn.flush()
            assert txn.txn_id is not None
            for call in (other.abort, other.state):
                with pytest.raises(errors.FixCallError):
                    call(txn.txn_id)
            assert other.transactions() == []
            (seen,) = operator.transactions()
            assert (seen.txn_id, seen.owner) == (txn.txn_id, "etl")
            operator.abort(txn.txn_id)
            with pytest.raises(errors.TransactionAborted):
                txn.commit()

            operator.revoke("etl", "shop/*", ["write"])
            assert differ() == ["User:etl shop/a"]
            with pytest.raises(errors.NotAuthorized, match="anabranch grants add etl 'shop/"):
                commit(etl, STREAM)
            operator.grant("etl", "shop/*", ["write"])
            commit(etl, STREAM)

            assert operator.block_lane("etl").blocked
            with pytest.raises(errors.RetryError):
                etl.describe(STREAM, timeout=1.5)
            assert other.describe(STREAM).state == "ACTIVE"
            operator.unblock_lane("etl")
            at_last(lambda: commit(etl, STREAM))
            did = [entry.command for entry in operator.audit_log(50)]
            assert {"SetGrant", "Abort"} <= set(did)

            # It can't be answered: `lane list` says why, its commands are carried out, others go on.
            led = controller.log_file.read_text().count("leading, term")

            def unanswered(why: str) -> None:
                try:
                    one_shot(etl, b"unheard", timeout=1)
                except errors.AnabranchError:
                    pass
                else:  # the broker has not heard of it
                    raise errors.NotReady("it is answered still")
                one_shot(other, b"heard", timeout=3)
                trouble = {lane.name: lane.trouble for lane in operator.lanes()}
                if why not in trouble.pop(
                    "etl"
                ):  # it is told well after each look, until it is tried again
                    raise errors.NotReady("nothing is told")
                assert not any(trouble.values())

            with secured.denied(CONTROLLER, Right(TOPIC, REPLIES, "Write", "")):
                at_last(partial(unanswered, "AUTHORIZATION_FAILED"))
            at_last(lambda: one_shot(etl, b"heard"))
            secured.admin.delete_topics([REPLIES])[REPLIES].result(30)
            at_last(partial(unanswered, "there is no topic"))
            assert controller.log_file.read_text().count("leading, term") == led
            with anabranch.connect(secured.broker.bootstrap) as plain:
                read = plain.snapshot(STREAM).read(STREAM)
                assert [event.value for event in read].count(b"unheard") > 1


def one_shot(client: anabranch.Client, value: bytes, timeout: float = 5) -> None:
    with client.begin("shop") as txn:
        txn.write(STREAM, value)
        txn.commit(timeout=timeout)
