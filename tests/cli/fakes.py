"""A client that needs no cluster, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anabranch.cli.options import Target
from anabranch.errors import AnabranchError
from anabranch.presentation.system_tables import LockRow
from anabranch.protocol.schemas.records import (
    PartInfo,
    ProcessorInfo,
    ProcessorInput,
    QuarantineRow,
    SegmentRange,
    SeriesInfo,
    StagedMergeInfo,
    TaskInfo,
    TaskPosition,
    WaitInfo,
    WriterInfo,
)
from anabranch.reading.group_lag import (
    HISTORY,
    ConsumerGroup,
    GroupPosition,
    InputLag,
    Lag,
    StreamCount,
    positions_of,
)
from anabranch.topics.rights import Acl
from anabranch.types import (
    AuditEntry,
    CommandsInfo,
    Committed,
    Counts,
    Event,
    Events,
    FeatureLevel,
    Grant,
    Lane,
    LeaderInfo,
    Listed,
    OpenTransaction,
    StreamDescription,
    Timeline,
    TimelineStep,
    TransactionInfo,
)

TXN_ID = bytes(range(16))


def stream(name: str = "nyc/flights") -> StreamDescription:
    """A stream with two segments."""
    return StreamDescription(
        stream=name,
        stream_epoch=0,
        reference_epoch=0,
        segments=(SegmentRange(0, 0, 1 << 31, 0), SegmentRange(1, 1 << 31, 1 << 32, 1)),
        settings={"retention.ms": "-1"},
        rejected={"late": 3},
        journal={0: 12, 1: 34},
        partitions=2,
        low_water={0: 10},
        uncommitted_bytes=0,
    )


def lane(name: str, *, blocked: bool = False, trouble: str = "") -> Lane:
    """A lane with a quota."""
    return Lane(name, blocked, trouble, {"open": 1000}, {"open": 17}, 3, ("a", "b"))


TOPOLOGY = json.dumps(
    {
        "calls": [
            {
                "name": "count\x1b[2J",
                "of": ["nyc/flights"],
                "uses": ["totals"],
                "writes": ["nyc/hours"],
            }
        ],
        "stores": {"totals": "a store of json"},
        "outputs": ["nyc/hours", "nyc/other"],
    }
)


def processor(name: str) -> ProcessorInfo:
    """Four tasks, two of which were taken; one input is fine, the other one in trouble."""
    stamp = 1_700_000_000_000_000 << 12
    inputs = tuple(ProcessorInput(stream, "", 0, 0) for stream in ("nyc/flights", "nyc/lost"))
    never = [TaskInfo(task, 0, "", 0, 0, bytes(16), 0, None, ()) for task in (0, 3)]
    held = [
        TaskInfo(task, 2, "host:7", 1_700_000_000_000, 9, TXN_ID, stamp, merging, (stands,))
        for task, merging, stands in (
            (1, None, TaskPosition(0, 40, stamp)),
            (2, TXN_ID, TaskPosition(0, 40, stamp, 1 << 32, 17)),
        )
    ]
    return ProcessorInfo(name, 4, inputs, 0, (never[0], *held, never[1]))


def transaction(**changes: Any) -> TransactionInfo:
    """A committed transaction."""
    fields: dict[str, Any] = {
        "txn_id": TXN_ID,
        "state": "COMMITTED",
        "scope": "nyc",
        "name": "backfill",
        "commit_timestamp": 1_700_000_000_000_000 << 12,
        "counts": Counts(10, 1, 2),
        "reason": "",
        "begun_ms": 1_700_000_000_000,
        "finished_ms": 1_700_000_001_000,
        "keepalive": 30.0,
        "streams": ("nyc/flights",),
        "writers": (),
    }
    return TransactionInfo(**{**fields, **changes})


def opened(info: TransactionInfo, age: float = 60.0) -> OpenTransaction:
    """The same with a writer, and half of it merged; at age 0 it waits for nothing."""
    writers = (WriterInfo(5, "open", "loader 7", 10, True),)
    merges = (StagedMergeInfo("nyc/flights", 1, 5, 10, 4, False),)
    why = WaitInfo("stream", "nyc/flights", "nyc/flights: it has no leader", 180_000)
    waits = why if age else None
    ends = f"anabranch txn force {info.txn_id.hex()}"
    holds: dict[str, Any] = {"locks": 3, "frozen": True, "journals": {"nyc/flights": 9_000}}
    parts = (
        PartInfo(1, ("ber",), info.state, 3, None, -1),
        PartInfo(2, (), info.state, 3, None, -1),
    )
    return OpenTransaction(
        info,
        7,
        age,
        10.0,
        20.0,
        1,
        writers,
        merges,
        **holds,
        waits=waits,
        ends=ends,
        partitions=parts,
    )


def event(number: int = 0, **changes: Any) -> Event:
    """An event."""
    fields: dict[str, Any] = {
        "stream": "nyc/flights",
        "key": b"N14228",
        "value": b'{"n":%d}' % number,
        "headers": [("by", b"me"), ("raw", b"\xff"), ("caf\udce9", b"1")],
        "timestamp": 1_700_000_000_000,
        "txn_id": TXN_ID,
        "commit_timestamp": 1_700_000_000_000_000 << 12,
        "segment_id": 1,
        "partition": 1,
        "offset": 40 + number,
    }
    return Event(**{**fields, **changes})


@dataclass
class FakeClient:
    """Answers from memory, remembers what it was asked, and raises ``error`` if there is one."""

    error: BaseException | None = None
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    info: TransactionInfo = field(default_factory=transaction)
    events: Sequence[Event] = field(default_factory=lambda: [event(0), event(1), event(2)])
    target: Target | None = None
    several: list[TransactionInfo] = field(default_factory=list)
    ages: dict[bytes, float] = field(default_factory=dict)
    topic_ids: list[str] = field(default_factory=list)
    counts: dict[str, StreamCount] = field(
        default_factory=lambda: {
            "nyc/flights": StreamCount(12_345, False, 1_700_000_000_000_000 << 12)
        }
    )
    losses: list[str] = field(default_factory=list)  # as brokers lack calls
    granted: list[Grant] = field(default_factory=list)
    rules: list[Acl] = field(default_factory=list)
    missing: dict[int, AnabranchError] = field(default_factory=dict)  # of lists
    description: str = ""  # of the last stream that was created

    def _call(self, call: str, **arguments: Any) -> None:
        self.calls.append((call, arguments))
        if self.error is not None:
            raise self.error

    def create_stream(
        self,
        name: str,
        segments: int | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        adopt: bool = False,
        near: str | None = None,
        description: str = "",
        exist_ok: bool = False,
        exclusive: bool = False,
    ) -> StreamDescription:
        adopted = ({"adopt": True} if adopt else {}) | ({"near": near} if near else {})
        adopted |= {"exclusive": True} if exclusive else {}
        adopted |= {"description": description} if description else {}
        adopted |= {"exist_ok": True} if exist_ok else {}
        self._call("create_stream", name=name, segments=segments, settings=settings, **adopted)
        self.description = description
        return replace(stream(name), description=description)

    def scale(
        self,
        name: str,
        segments: int | None = None,
        *,
        seal: Sequence[int] = (),
        ranges: Sequence[tuple[int, int]] = (),
    ) -> StreamDescription:
        self._call("scale", name=name, segments=segments, seal=seal, ranges=ranges)
        return stream(name)

    def describe(self, name: str) -> StreamDescription:
        self._call("describe", name=name)
        return replace(stream(name), description=self.description)

    def streams(self, scope: str | None = None) -> Listed[StreamDescription]:
        self._call("streams", scope=scope)
        return Listed([stream("nyc/weather"), stream("nyc/flights")], self.missing)

    def reader_ports(self) -> None:
        pass

    def lanes(self) -> list[Lane]:
        self._call("lanes")
        return [lane("admin"), lane("etl", blocked=True), lane("open", trouble="its topic is gone")]

    def add_lane(self, name: str, principals: Any, quotas: Any, **more: Any) -> Lane:
        self._call("add_lane", name=name, principals=principals, quotas=quotas, **more)
        default = {"open": 1000}
        changed = {k: default.get(k) if v is None else v for k, v in (quotas or {}).items()}
        has = default | {k: v for k, v in changed.items() if v is not None}
        return replace(lane(name), quotas=has)

    def block_lane(self, name: str) -> Lane:
        self._call("block_lane", name=name)
        return lane(name, blocked=True)

    def unblock_lane(self, name: str) -> Lane:
        self._call("unblock_lane", name=name)
        return lane(name)

    def grants(self) -> list[Grant]:
        self._call("grants")
        return self.granted

    def grant(self, name: str, pattern: str, rights: Sequence[str]) -> Grant:
        self._call("grant", lane=name, pattern=pattern, rights=rights)
        return Grant(name, pattern, tuple(rights))

    def revoke(self, name: str, pattern: str, rights: Sequence[str] | None) -> Grant:
        self._call("revoke", lane=name, pattern=pattern, rights=rights)
        return Grant(name, pattern, ())

    def acls(self) -> list[Acl]:
        self._call("acls")
        return self.rules

    def feature_level(self, raise_to: int | None = None) -> FeatureLevel:
        self._call("feature_level", raise_to=raise_to)
        return FeatureLevel(raise_to or 1, 2)

    def grow_cluster(self, control_partitions: int) -> int:
        self._call("grow_cluster", control_partitions=control_partitions)
        return control_partitions

    def audit_log(self, limit: int) -> list[AuditEntry]:
        self._call("audit_log", limit=limit)
        return [AuditEntry(1_700_000_000_000, "admin", "SetLane", "etl blocked", 0)]

    def processors(self, scope: str) -> list[ProcessorInfo]:
        self._call("processors", scope=scope)
        return [processor(f"{scope}/delays")]

    def processor(
        self, name: str, *, topology: bool = False, timeout: float | None = None
    ) -> ProcessorInfo:
        self._call("processor", name=name)
        return replace(processor(name), topology=TOPOLOGY if topology else "")

    def lag(self, info: ProcessorInfo, *, timeout: float | None = None) -> list[InputLag]:
        lags = {0: Lag(12_345, 1_700_000_000_000, exact=False), 40: Lag(0, 0)}
        tasks = {task: (at, lags[at.record]) for task, at in positions_of(info, 0).items()}
        return [InputLag("nyc/flights", tasks), InputLag("nyc/lost", {}, "UnknownStream: gone")]

    def reset_processor(self, name: str, start: Any, *, keep_state: bool) -> ProcessorInfo:
        self._call("reset_processor", name=name, start=start, keep_state=keep_state)
        return processor(name)

    def alter_processor(self, name: str, *, add: Any, start: Any, drop: Any) -> ProcessorInfo:
        self._call("alter_processor", name=name, add=add, start=start, drop=drop)
        return processor(name)

    def import_group(self, name: str, group: str, inputs: Any, tasks: int) -> ProcessorInfo:
        self._call("import_group", name=name, group=group, inputs=inputs, tasks=tasks)
        return processor(name)

    def delete_processor(self, name: str) -> None:
        self._call("delete_processor", name=name)

    def stored(self, name: str, store: Any, key: bytes, task: int | None) -> Any:
        if not isinstance(store, str):
            return store.shown({key: b"[7,8]"} if key == b"text" else {})
        self._call("stored", name=name, store=store, key=key, task=task)
        return {b"text": b"7", b"raw": b"\xff"}.get(key)

    def groups(
        self, stream: str | None = None, *, timeout: float | None = None
    ) -> list[ConsumerGroup]:
        self._call("groups", stream=stream)
        events = GroupPosition("nyc/flights", {0: 5, 1: 7}, Lag(1234, 0))
        lost = GroupPosition("nyc/weather", {HISTORY: 9}, Lag(0, 0), "it is LOST")
        return [
            ConsumerGroup("loaders", "Stable", ("a", "b"), (events, lost)),
            ConsumerGroup("nyc.delays", "Empty", (), (events,)),
            ConsumerGroup("readers", "Empty", (), (events,)),
        ]

    def group(self, name: str) -> ConsumerGroup:
        self._call("group", name=name)
        return self.groups()[0]

    def transactions(self, **arguments: Any) -> Listed[TransactionInfo]:
        self._call("transactions", **arguments)
        return Listed(self.several or [self.info], self.missing)

    def open_transactions(self, *asked: Any, **arguments: Any) -> Listed[OpenTransaction]:
        self._call("open_transactions", **arguments)
        found = Listed(self.several or [self.info], self.missing)
        return found.each(lambda info: opened(info, self.ages.get(info.txn_id, 60.0)))

    def system(self, *asked: Any, **arguments: Any) -> Listed[LockRow]:
        self._call("system", asked=asked, **arguments)
        zeros, other = bytes(16), b"w" * 16
        row = LockRow(self.info.txn_id, "nyc/a", 2, 1, True, False, (zeros, other), ())
        return Listed([row], self.missing)

    def open_transaction(self, txn_id: bytes) -> OpenTransaction:
        self._call("open_transaction", txn_id=txn_id)
        return opened(self.info)

    def timeline(self, txn_id: bytes) -> Timeline:
        self._call("timeline", txn_id=txn_id)
        begun, wait = 1_700_000_000_000, "the journals of nyc/flights to show the receipts of 05"
        steps = (
            TimelineStep(begun - 2, "client", "id made"),
            TimelineStep(begun, "controller", "begun"),
            TimelineStep(begun + 1500, "controller", "decided", waited_for=wait),
            TimelineStep(begun + 1507, "broker", "readable", "nyc/flights"),
        )
        return Timeline(self.info.txn_id, steps, "its turn", ("the rest is gone",))

    def commands(self) -> Listed[CommandsInfo]:
        self._call("commands")
        row = QuarantineRow(17, 1_700_000_000_000, "Commit", "RecursionError()", "open")
        return Listed([CommandsInfo(0, 40, 42, (row,), 3, 12)], self.missing)

    def leaders(self) -> Listed[LeaderInfo]:
        self._call("leaders")
        return Listed([LeaderInfo(0, 7, "host:4711", 1_700_000_000_000, 42, 4096)], self.missing)

    def prepared(self, *asked: Any, **arguments: Any) -> Listed[TransactionInfo]:
        self._call("prepared", **arguments)
        return Listed(self.several or [self.info], self.missing)

    def state(self, txn: bytes) -> TransactionInfo:
        self._call("state", txn=txn)
        return next((info for info in self.several if info.txn_id == txn), self.info)

    def series(self, scope: str, name: str | None = None) -> list[SeriesInfo]:
        self._call("series", scope=scope, name=name)
        return [SeriesInfo(name or "s", 17, TXN_ID, (0, 17), "etl", 1_767_225_600_000)]

    def set_series(self, scope: str, name: str, number: int, **arguments: Any) -> None:
        self._call("set_series", scope=scope, name=name, number=number, **arguments)

    def forget_stream(self, name: str) -> None:
        self._call("forget_stream", name=name)

    def alter_stream(
        self, name: str, settings: Mapping[str, Any], *, description: str | None = None
    ) -> StreamDescription:
        described = {} if description is None else {"description": description}
        self._call("alter_stream", name=name, settings=settings, **described)
        self.description = self.description if description is None else description
        return replace(stream(name), description=self.description)

    def truncate_stream(self, name: str, until: object) -> None:
        self._call("truncate_stream", name=name, until=until)

    def effective_settings(self, name: str) -> dict[str, str]:
        return {"retention.ms": "60000"}

    def topic_id(self, name: str) -> str:
        return self.topic_ids.pop(0) if self.topic_ids else "id"

    def count_events(self, name: str) -> Lag:
        return Lag(1234, 0, exact=False)

    def delete_stream(self, name: str, *, despite: Sequence[str] = ()) -> None:
        more = {"despite": tuple(despite)} if despite else {}
        self._call("delete_stream", name=name, **more)

    def force(
        self,
        transaction: bytes,
        reason: str,
        outcome: bool | None = None,
        control_partition: int | None = None,
    ) -> None:
        at = {} if control_partition is None else {"control_partition": control_partition}
        self._call("force", transaction=transaction, reason=reason, outcome=outcome, **at)

    def abort(self, transaction: bytes, reason: str) -> None:
        self._call("abort", transaction=transaction, reason=reason)

    def read(self, name: str, **arguments: Any) -> Iterator[Event]:
        self._call("read", name=name, **arguments)
        return iter(self.events)

    def snapshot(self, *given: Any, **arguments: Any) -> FakeClient:
        self._call("snapshot", given=given, **arguments)
        return self

    def progress(self, streams: Sequence[str], group: str, **_: Any) -> int:
        self._call("progress", streams=streams, group=group)
        return 1_700_000_000_000_000 << 12

    def changes(self, name: str) -> Iterator[Event]:
        self._call("changes", name=name)
        return iter(self.events[-1:])

    def read_transactions(self, name: str, **arguments: Any) -> Iterator[Committed]:
        self._call("read_transactions", name=name, **arguments)
        found: Any = list(self.events)
        events: Events = found
        yield Committed(TXN_ID, 1_700_000_000_000_000 << 12, name, events)
