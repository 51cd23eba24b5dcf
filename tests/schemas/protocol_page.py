"""The generated blocks of docs/protocol.md and docs/inside/status-rows.md, and docs/protocol-examples.json.

``python -m tests.schemas.protocol_page`` writes all three.
"""

import inspect
import json
import re
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_type_hints
from zlib import crc32

from anabranch import errors
from anabranch.conformance.rules import RULES
from anabranch.core.decisions.turn import DAY_MS
from anabranch.core.journal_index import REASONS
from anabranch.core.journal_runs import CRC_MODULUS
from anabranch.core.locks.recent_writes import RecentWrites, RecentWritesDraft
from anabranch.core.locks.table_writes import Write, fingerprint
from anabranch.core.rows import Entry
from anabranch.protocol import hybrid_time, ids, tokens
from anabranch.protocol.partitioner import SPACE, even_ranges, position_of, record_checksum
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import TYPES, encode, schema_of
from anabranch.reading.history import HistorySearch
from anabranch.reading.task_reader import Assignment

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
ROWS_PAGE = PAGE.parent / "inside" / "status-rows.md"
VECTORS = PAGE.with_name("protocol-examples.json")
BLOCK = re.compile(r"(<!-- generated: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

# -- the story of the examples --------------------------------------------------------------------

MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
TXN = ids.make_txn_id(3, MS, 0x0123456789ABCDEF)
SHOT = ids.make_txn_id(3, MS + 5000, 0xFEDCBA9876543210)
SECRET = bytes(range(32, 64))
TOKEN = tokens.make(SECRET, tokens.Token(TXN, 60_000, MS + 12, "nyc", "open"))
NARROWED = tokens.narrow(TOKEN, rights=3, not_after_ms=MS + 12 + DAY_MS, lane="etl")
WRITER = 0x1122334455667788
FENCING_TOKEN = bytes(range(64, 80))
MOVING = ids.make_marked_id(3, MS + 9000, 0x0123456789ABCDEF)
CREATED = hybrid_time.from_us((MS - 1000) * 1000)
STAMP = hybrid_time.from_us((MS + 2500) * 1000 + 7)
EVENTS = [(b"UA", b"1545"), (b"AA", b"1141"), (b"UA", b"1714")]
SEGMENTS = tuple(
    r.SegmentRange(ids.segment_id(0, i), low, high, i)
    for i, (low, high) in enumerate(even_ranges(2))
)


def _segment_of(key: bytes) -> int:
    return next(i for i, s in enumerate(SEGMENTS) if s.low <= position_of(key) < s.high)


def _extents() -> tuple[r.Extent, ...]:
    found = []
    for i in range(2):
        mine = [(k, v) for k, v in EVENTS if _segment_of(k) == i]
        if mine:
            crc_sum = sum(record_checksum(k, v) for k, v in mine) % CRC_MODULUS
            found.append(r.Extent("nyc/flights", i, 17, 17 + len(mine), len(mine), crc_sum))
    return tuple(found)


RECEIPT = r.Receipt(TXN, WRITER, 1, True, _extents())
OUTCOME = r.Outcome(
    txn_id=TXN,
    state="COMMITTED",
    scope="nyc",
    name=None,
    commit_timestamp=STAMP,
    committed=3,
    rejected=0,
    left_out=0,
    reason="",
    begun_ms=MS + 12,
    finished_ms=MS + 2500,
    keepalive_ms=60_000,
    streams=("nyc/flights",),
    writers=(RECEIPT,),
    owner="open",
)
OPEN_INFO = r.OpenInfo(
    outcome=OUTCOME._replace(state="OPEN", commit_timestamp=0, writers=()),
    uncommitted_bytes=4096,
    age_ms=60_000,
    silent_ms=4_000,
    left_ms=26_000,
    writer_count=1,
    writers=(r.WriterInfo(WRITER, "open", "loader 7", 2, True),),
    staged_merges=(r.StagedMergeInfo("nyc/flights", 0, 1, 2, 1, False),),
    locks=2,
    journals={"nyc/flights": 8192},
    ends=f"anabranch txn abort {TXN.hex()}",
)
INPUTS = (r.ProcessorInput("nyc/flights", "6ba7b8109dad41d180b400c04fd430c8", 0, 0),)
AT = (r.TaskPosition(0, 12, STAMP),)
LOCKS = (
    r.TableLocks(
        "bank/accounts",
        STAMP,
        STAMP - 4096,
        tuple(sorted(map(fingerprint, (b"ann", b"bob")))),
        (r.LockedRange(b"c", b"d"),),
    ),
)
CONSUMED = r.Consumed("nyc/delays", FENCING_TOKEN, (r.TaskStep((0, 1), 3, AT),))
VECTOR = tuple(
    r.Position(i, 40 + sum(e.count for e in RECEIPT.extents if e.partition == i)) for i in range(2)
)


def cid(number: int) -> bytes:
    return sha256(b"correlation id %d" % number).digest()[:16]


def _reply(number: int, result: Any) -> r.Reply:
    """The answer to the example before it."""
    command = ids.command_digest(encode(COMMANDS[number]))
    return r.Reply(cid(number), command, STAMP if number > 6 else CREATED, result)


IDS = ("Ab3TqYPzQ0mCkq1vSxGk2A", "h0LhXNQzTgGAEqPw5cYyUg")
COMMIT = r.Commit(TOKEN, (RECEIPT,), None, None, 30_000)
COMMANDS: dict[int, Any] = {
    1: r.FindScope("nyc", create=True),
    2: r.CreateStream("nyc/flights", 2, {"retention.ms": "-1"}),
    3: r.Begin(TXN, "nyc", None, 60_000, SECRET),
    4: r.Touch(TOKEN, "nyc/flights"),
    5: r.Register(TOKEN, RECEIPT),
    6: COMMIT,
    7: COMMIT,
    8: r.ListTransactions(None, include_finished=True, limit=100, before=None),
    9: r.Heartbeat((TOKEN,)),
    10: r.SafeTime("nyc", None),
    11: r.ListSeries("nyc", None, None),
    12: r.ListCommands(),
    13: r.SetLane("etl", False, IDS, {"open": 1000}),
    14: r.SetGrant("etl", "nyc/*", 7),
    15: r.ListAudit(None),
    17: r.LockReads(
        TOKEN,
        WRITER,
        1,
        (LOCKS[0]._replace(since=0, last=0),),
        validated=(r.Validated(WRITER, 0, STAMP - 8192),),
        tables=("bank/rates",),
    ),
    16: r.TakeTasks("nyc/delays", FENCING_TOKEN, "host:4711", (0, 1), (0, 0)),
    18: r.SafeTime("bank", None, ("bank/accounts",)),
    19: r.SetFeatureLevel(None),
    20: r.DescribeLeader(),
    21: r.TakeTurn(TXN, None, "bank/accounts", 4711, ("bank/accounts",), 10_000),
}
EXAMPLES: dict[str, Any] = {
    "SetFeatureLevel": COMMANDS[19],
    "Reply: FeatureLevel": _reply(19, r.FeatureLevel(1, 1)),
    "DescribeLeader": COMMANDS[20],
    "TakeTurn": COMMANDS[21],
    "Reply: LeaderInfo": _reply(20, r.LeaderInfo(7, "host:4711", MS, 42, 4096)),
    "FindScope": COMMANDS[1],
    "Reply: ScopeInfo": _reply(1, r.ScopeInfo("nyc", 3)),
    "CreateStream": COMMANDS[2],
    "CreateStream at level 2": replace(COMMANDS[2], description="Flights from JFK, LGA and EWR"),
    "Reply: StreamList": _reply(
        2,
        r.StreamList(
            (
                r.StreamInfo(
                    "nyc/flights",
                    "ACTIVE",
                    0,
                    0,
                    SEGMENTS,
                    {"retention.ms": "-1"},
                    {"plain_write": 1},
                    {"0": 17, "1": 17},
                    2,
                    {"0": 12},
                    0,
                    "",
                ),
            )
        ),
    ),
    "Begin": COMMANDS[3],
    "Reply: Begun": _reply(3, r.Begun(TXN, 60_000, MS + 12)),
    "Heartbeat": COMMANDS[9],
    "Touch": COMMANDS[4],
    "Reply: Touched": _reply(4, r.Touched("nyc/flights", 0, SEGMENTS)),
    "Receipt": RECEIPT,
    "Register": COMMANDS[5],
    "Reply: Registered": _reply(5, r.Registered(1)),
    "Commit": COMMIT,
    "Commit as number 17": r.Commit(TOKEN, (), (RECEIPT,), "spark/9d1c/sink", 30_000, 17),
    "Reply: Refusal": _reply(
        6, r.Refusal("ReceiptMismatch", "a receipt and the journal disagree in count")
    ),
    "Reply: Outcome": _reply(7, OUTCOME),
    "EpochRecord": r.EpochRecord(
        0,
        0,
        CREATED,
        tuple(r.EpochSegment(s.segment_id, s.low, s.high, s.partition, 0) for s in SEGMENTS),
        (),
        tuple(r.Position(i, 0) for i in range(2)),
        -1,
    ),
    "CommitRecord": r.CommitRecord(
        TXN,
        0,
        STAMP,
        tuple(
            r.SegmentCommit(ids.segment_id(0, e.partition), e.partition, 40, 40 + e.count, e.count)
            for e in RECEIPT.extents
        ),
        VECTOR,
        11,
    ),
    "OneShot": r.OneShot(
        SHOT,
        "nyc",
        "night-of-2026-01-01",
        (
            r.Event("nyc/flights", -1, b"UA", b"1545", (r.EventHeader("source", b"demo"),), -1),
            r.Event("nyc/flights", ids.segment_id(0, 1), None, b"", (), MS),
        ),
    ),
    "Resolve": r.Resolve(SHOT, "nyc"),
    "GetState": r.GetState(TXN),
    "Abort": r.Abort(TOKEN, "no longer needed"),
    "Scale": r.Scale("nyc/flights", 4, (), ()),
    "Scale by hand": r.Scale(
        "nyc/flights", 0, (1,), (r.KeyRange(1 << 31, 3 << 30), r.KeyRange(3 << 30, 1 << 32))
    ),
    "ForgetStream": r.ForgetStream("nyc/flights"),
    "DeleteStream": r.DeleteStream("nyc/flights"),
    "AlterStream": r.AlterStream("nyc/flights", {"retention.ms": "60000"}, ("segment.ms",)),
    "TruncateStream": r.TruncateStream("nyc/flights", 7_353_714_396_035_592_192),
    "RecoverStream": r.RecoverStream("nyc/flights"),
    "Force": r.Force(TOKEN, "its stream nyc/weather is lost"),
    "DescribeStreams": r.DescribeStreams("nyc", None),
    "ListOpen": r.ListOpen("nyc", None, 100),
    "Reply: OpenList": _reply(8, r.OpenList((OPEN_INFO,))),
    "ListRuns": r.ListRuns(
        TOKEN, "nyc/flights", (r.RunsWanted(WRITER, 1, 0, 2), r.RunsWanted(WRITER, 0, 0, 1))
    ),
    "Reply: RunList": _reply(
        11,
        r.RunList((r.RunPlace(WRITER, 1, 0, 2, 2, 4096, 4096),), (r.RunsWanted(WRITER, 0, 0, 1),)),
    ),
    "LabelWriter": r.LabelWriter(TOKEN, RECEIPT.writer, "loader 7"),
    "ListTransactions": COMMANDS[8],
    "Reply: TransactionList": _reply(8, r.TransactionList(())),
    "Reply: Ended": _reply(9, r.Ended((OUTCOME._replace(streams=(), writers=()),))),
    "ListCommands": COMMANDS[12],
    "Reply: CommandList": _reply(
        12,
        r.CommandList(
            42, 43, (r.QuarantineRow(17, MS, "unreadable", "a batch that is cut", "open"),), 3, 12
        ),
    ),
    "SafeTime": COMMANDS[10],
    "Reply: SafeTimeReply": _reply(10, r.SafeTimeReply("nyc", STAMP)),
    "ListSeries": COMMANDS[11],
    "Reply: SeriesList": _reply(
        11, r.SeriesList((r.SeriesInfo("spark/9d1c/sink", 17, TXN, (0, 15, 17, 17)),), more=False)
    ),
    "SetSeries": r.SetSeries("nyc", "spark/9d1c/sink", 17, 16),
    "SetLane": COMMANDS[13],
    "ListLanes": r.ListLanes(),
    "Reply: LaneList": _reply(
        13,
        r.LaneList(
            (r.LaneInfo("etl", False, "", IDS, {"open": 1000}, {"open": 3}, 17, 18),),
        ),
    ),
    "SetGrant": COMMANDS[14],
    "ListGrants": r.ListGrants(),
    "Reply: GrantList": _reply(14, r.GrantList((r.GrantRow("etl", "nyc/*", 7),))),
    "ListAudit": COMMANDS[15],
    "Reply: AuditList": _reply(
        15,
        r.AuditList(
            (r.AuditRow(MS, "admin", "SetGrant", "etl on nyc/*: describe, safe-time, write"),),
            None,
        ),
    ),
    "CreateProcessor": r.CreateProcessor("nyc/delays", 2, INPUTS),
    "AlterProcessor": r.AlterProcessor(
        "nyc/delays", 0, ("nyc/flights",), (r.ProcessorInput("nyc/weather", "", 0, 0),)
    ),
    "CopyProcessor": r.CopyProcessor("nyc/delays-2", "nyc/delays", 0, 0, "copying"),
    "DescribeProcessors": r.DescribeProcessors("nyc", "nyc/delays"),
    "TakeTasks": COMMANDS[16],
    "Reply: ProcessorList": _reply(
        16,
        r.ProcessorList(
            (
                r.ProcessorInfo(
                    "nyc/delays",
                    2,
                    INPUTS,
                    0,
                    (
                        r.TaskInfo(0, 1, "host:4711", MS, 0, bytes(16), 0, None, ()),
                        r.TaskInfo(1, 1, "host:4711", MS, 2, MOVING, STAMP, TXN, AT),
                    ),
                ),
            )
        ),
    ),
    "Consumed": CONSUMED,
    "OneShot that moves positions": r.OneShot(
        MOVING, "nyc", None, (r.Event("nyc/late", -1, b"UA", b"1545", (), -1),), CONSUMED
    ),
    "OneShot with locks": r.OneShot(
        SHOT, "bank", None, (r.Event("bank/accounts", -1, b"ann", b"95", (), -1),), None, LOCKS
    ),
    "OneShot that follows another": r.OneShot(
        SHOT,
        "bank",
        None,
        (r.Event("bank/accounts", -1, b"ann", b"95", (), -1),),
        None,
        LOCKS,
        (),
        (r.FollowedRows(TXN, "bank/accounts", (4711,)),),
        MOVING,
    ),
    "Reply: Revalidate": _reply(
        10, r.Revalidate(STAMP, (r.TableTime("bank/accounts", STAMP - 4096),))
    ),
    "SafeTime of tables": COMMANDS[18],
    "Reply: SafeTimeReply of tables": _reply(
        18, r.SafeTimeReply("bank", STAMP, (r.TableTime("bank/accounts", STAMP - 4096),))
    ),
    "Begin of a transaction that reads tables": replace(COMMANDS[3], snapshot=STAMP - 8192),
    "LockReads": COMMANDS[17],
    "ListLocks": r.ListLocks(TOKEN, WRITER, 0),
    "ListTableLocks": r.ListTableLocks("nyc", 100),
    "Reply: TableLockList": _reply(
        5,
        r.TableLockList((r.TableLockInfo(TXN, "nyc/a", 2, 1, True, False, (bytes(16),), ()),)),
    ),
    "Reply: ReadsLocked": _reply(
        17,
        r.ReadsLocked(
            STAMP - 8192,
            STAMP,
            tuple(r.TableTime(table, STAMP - 4096) for table in ("bank/accounts", "bank/rates")),
            r.BrokenLock("bank/accounts", b"ann", None, STAMP - 4096, SHOT),
        ),
    ),
    "Commit with validated locks": replace(COMMIT, validated=(r.Validated(WRITER, 1, STAMP),)),
    "ReleaseTasks": r.ReleaseTasks("nyc/delays", FENCING_TOKEN, (0, 1)),
    "JournalOp": r.JournalOp("FINALIZE_COMMIT", TXN, 0, STAMP),
}
IN_THE_TEXT = ("Begin",)

# -- writing the blocks ---------------------------------------------------------------------------


def as_json(value: Any, *, tagged: bool = False) -> Any:
    """A record as the page shows it; ``tagged``: with the name of its union branch."""
    if r.is_record(type(value)) and type(value) is not tuple:
        plain = {
            name: as_json(getattr(value, name), tagged=name == "result")
            for name in get_type_hints(type(value))
        }
        return {type(value).__name__: plain} if tagged else plain
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [as_json(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def json_lines(value: Any, indent: str = "", room: int = 100) -> str:
    """JSON that is broken into lines only where it has to be."""
    flat = json.dumps(value)
    if len(indent) + len(flat) <= room or not isinstance(value, dict | list) or not value:
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        items = [f"{json.dumps(k)}: {json_lines(v, inner, room)}" for k, v in value.items()]
        opening, closing = "{", "}"
    else:
        items = [json_lines(v, inner, room) for v in value]
        opening, closing = "[", "]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"


def hex_lines(data: bytes) -> str:
    """32 bytes a line, in groups of four."""
    return "\n".join(data[i : i + 32].hex(" ", -4) for i in range(0, len(data), 32))


def example(name: str) -> str:
    record = EXAMPLES[name]
    text = json_lines(as_json(record))
    return f"**{name}**\n\n```json\n{text}\n```\n```hex\n{hex_lines(encode(record))}\n```\n"


def table(head: str, rows: list[list[Any]]) -> str:
    columns = head.split(" | ")
    lines = [f"| {head} |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def types_block() -> str:
    """The type numbers of all records but status rows, as byte 1, in lines of five."""
    others, messages = (32, 33, 34), (14, *range(57, 64))
    commands = {n: c for n, c in TYPES.items() if n < 64 and n not in (*others, *messages)}
    between = {n: TYPES[n] for n in messages}
    rest = {n: c for n, c in TYPES.items() if n in others or 96 <= n <= 98}
    lines = []
    for kind, types in (
        ("commands:", commands),
        ("messages between controllers:", between),
        ("other records:", rest),
    ):
        names = [f"{n:02x} {c.__name__:21}" for n, c in sorted(types.items())]
        lines += [kind, *["".join(names[i : i + 5]).rstrip() for i in range(0, len(names), 5)]]
    return "```\n" + "\n".join(lines) + "\n```\n"


def header_lines(headers: list[tuple[str, bytes]]) -> str:
    return "```headers\n" + "".join(f"{n:8} {v.hex()}\n" for n, v in headers) + "```\n"


def key_vectors() -> list[dict[str, Any]]:
    """Keys with their positions, segments in a new stream of four, and fingerprints."""
    keys: list[tuple[str, bytes]] = [
        ("empty", b""),
        ("one byte, zero", b"\0"),
        ("one byte", b"a"),
        ("one byte, high", b"\xff"),
        ("UA", b"UA"),
        ("JFK", b"JFK"),
        ("123456789", b"123456789"),
        ("N14228", b"N14228"),
        ("key-1", b"key-1"),
        ("key-2", b"key-2"),
        ("UTF-8: Zürich", "Zürich".encode()),
        ("UTF-8: 東京", "東京".encode()),
        ("UTF-8: an aeroplane, U+2708", "\u2708".encode()),
        ("64-bit number 1", (1).to_bytes(8, "big")),
        ("64-bit number -1", b"\xff" * 8),
        ("32 zero bytes", bytes(32)),
        ("1000 times x", b"x" * 1000),
        ("the bytes 00 to ff", bytes(range(256))),
    ]
    return [
        {
            "what": what,
            "key": key.hex(),
            "crc32": f"{crc32(key):08x}",
            "position": position_of(key),
            "segment_of_4": position_of(key) * 4 >> 32,
            "fingerprint": fingerprint(key),
        }
        for what, key in keys
    ]


def task_vectors() -> list[dict[str, Any]]:
    """Events of four tasks, in segments that have all keys, the middle half, and less than a task's."""
    whole, middle, little = (0, SPACE), (SPACE // 4, SPACE * 3 // 4), (SPACE // 8, SPACE // 8 + 100)
    cases: list[tuple[bytes | None, int, tuple[int, int]]] = [
        *((None, offset, whole) for offset in (0, 1, 6)),
        *((None, offset, middle) for offset in (7, 8)),
        (None, 9, little),
        *((key, 9, whole) for key in (b"UA", b"JFK")),
        (b"key-2", 9, middle),
        *((b"JFK", offset, middle) for offset in (9, 10)),
    ]
    found = []
    for key, offset, (low, high) in cases:
        assignment = Assignment(cast("HistorySearch", None), 4)
        found.append(
            {
                "key": None if key is None else key.hex(),
                "position": None if key is None else position_of(key),
                "segment_low": low,
                "segment_high": high,
                "offset": offset,
                "task_of_4": int(assignment.tasks_of([key], [offset], (low, high))[0]),
            }
        )
    return found


def worked_block() -> str:
    steps = [crc32(b"JFK")]
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        steps.append(steps[-1] ^ steps[-1] >> shift)
        steps.append(steps[-1] * factor & 0xFFFFFFFF)
    texts = ["crc32(JFK)", "h ^ h >> 16", "h * 85ebca6b", "h ^ h >> 13", "h * c2b2ae35"]
    texts.append("h ^ h >> 16")
    shown = "".join(f"{t:12} = {h:08x}\n" for t, h in zip(texts, steps, strict=False))
    return f"```\n{shown}{'position':12} = {steps[-1]}\n```\n"


def checksum_vectors() -> list[dict[str, Any]]:
    pairs: list[tuple[bytes | None, bytes | None]] = [
        (None, None),
        (b"", b""),
        (None, b"abc"),
        (b"abc", None),
        (b"a", b"bc"),
        (b"UA", b"1545"),
        (b"AA", b"1141"),
        (b"UA", b"1714"),
    ]
    return [
        {"key": as_json(key), "value": as_json(value), "checksum": record_checksum(key, value)}
        for key, value in pairs
    ]


# Errors that only client libraries and tools raise, or that controllers keep to themselves.
NEVER_SENT = frozenset(
    (
        "DeadlineExceeded",
        "WriteFailed",
        "SessionFull",
        "NotLeader",
        "RowsFailed",
        "NoLedger",
        "LedgerMoved",
        "LedgerDiffers",
        "BatchTooLarge",
        "WouldDelete",
        "RowExists",
        "RowMissing",
        "DerivationFailed",
        "UniqueViolation",
        "NonTransactional",
        "NotForkSafe",
        "UndecodableValue",
    )
)


def errors_block() -> str:
    """The codes of refusals, by kind."""
    kinds = {
        "Retry later": errors.RetryError,
        "Begin again, with a new id": errors.BeginAgainError,
        "Ask the outcome, by `Resolve`": errors.AskOutcomeError,
        "Fix the call": errors.FixCallError,
    }
    tables = []
    for kind, base in kinds.items():
        rows = [
            [f"`{name}`", " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())]
            for name, cls in vars(errors).items()
            if inspect.isclass(cls) and issubclass(cls, base) and cls is not base
            if name not in NEVER_SENT
        ]
        tables.append(table(f"{kind} | meaning", rows))
    return "\n".join(tables)


def rows_block() -> str:
    record_of = {
        Entry.TERM: (r.TermRow, "empty"),
        Entry.ROUND: (r.RoundRow, "empty"),
        Entry.SCOPE: (r.ScopeRow, "scope"),
        Entry.STREAM: (r.StreamRow, "scope/stream"),
        Entry.NAME: (r.NameRow, "scope/name"),
        Entry.EPOCH: (r.EpochRow, "scope/stream/ and the epoch, 4 bytes"),
        Entry.LOW_WATER: (r.LowWaterRow, "scope/stream/ and the partition, 4 bytes"),
        Entry.PLAIN: (r.PlainRow, "scope/stream/ and the partition, 4 bytes"),
        Entry.SERIES: (r.SeriesRow, "scope/series"),
        Entry.FORGOTTEN: (r.ForgottenRow, "scope/stream"),
        Entry.RETIRED: (r.RetiredRow, "scope/stream/ and the partition, 4 bytes"),
        Entry.TXN: (r.TxnRow, "empty"),
        Entry.PARTICIPANT: (r.ParticipantRow, "scope/stream"),
        Entry.WRITER: (r.WriterRow, "writer, 8 bytes"),
        Entry.PENDING_COMMIT: (r.PendingCommitRow, "empty"),
        Entry.STAGED_MERGE: (r.StagedMergeRow, "scope/stream/ and the segment's number, 4 bytes"),
        Entry.MOVED: (
            r.MovedRow,
            "scope/stream/, the partition, 4 bytes, and the new offset, 8 bytes",
        ),
        Entry.YIELDED: (r.YieldedRow, "empty"),
        Entry.PREPARED: (r.PreparedRow, "empty"),
        Entry.LABEL: (r.LabelRow, "writer, 8 bytes"),
        Entry.READ_LOCK: (
            r.ReadLockRow,
            "writer and number from 1 on, 8 bytes each",
        ),
        Entry.READS: (r.ReadsRow, "empty"),
        Entry.VOTES: (r.VotesRow, "empty"),
        Entry.PARTITION: (r.PartitionRow, "the participant's control partition, 2 bytes"),
        Entry.COORDINATOR: (r.CoordinatorRow, "empty"),
        Entry.SUSPECT: (r.SuspectRow, "empty"),
        Entry.QUARANTINED: (r.QuarantineRow, "the offset, 8 bytes, and the lane"),
        Entry.LANE: (r.LaneRow, "lane"),
        Entry.LANE_POSITION: (r.LanePositionRow, "lane"),
        Entry.GRANT: (r.GrantRow, "lane, a blank, pattern"),
        Entry.AUDIT: (r.AuditRow, "Unix milliseconds, 8 bytes, and a number, 4 bytes"),
        Entry.AUDIT_DUE: (r.AuditRow, "scope/stream, whose topics have yet to follow"),
        Entry.PROCESSOR: (r.ProcessorRow, "scope/processor"),
        Entry.TASK: (r.TaskRow, "scope/processor/ and the task, 4 bytes"),
        Entry.TABLE: (r.TableRow, "scope/stream"),
        Entry.BASE: (r.BaseRow, "scope/table"),
        Entry.REJECTED: (r.RejectedRow, "scope/stream"),
        Entry.FEATURE: (r.FeatureRow, "empty"),
        Entry.CHANGED: (r.ChangedRow, "entry type, 1 byte, and identifier of the row of the thing"),
    }
    also = {
        Entry.READ_LOCK: (r.ValidatedRow, "writer, and number 0, 8 bytes each"),
        Entry.TABLE: (r.FormerTableRow, "scope/stream"),
        Entry.PENDING_COMMIT: (r.FormerPendingCommitRow, "empty"),
    }
    number_of = {cls: number for number, cls in TYPES.items()}
    rows = []
    for entry in Entry:
        for cls, identifier in filter(None, (record_of[entry], also.get(entry))):
            doc = schema_of(cls)["doc"].removeprefix("Status row").lstrip(": ")
            rows.append([int(entry), f"`{cls.__name__}`", f"{number_of[cls]:02x}", identifier, doc])
    return table("entry type | row | type | identifier | what", rows)


def token_block() -> str:
    ends = (0, 1, 17, 21, 29, 37, 41, 46, 47, 55, 56)
    shown = []
    for token, caveats in ((TOKEN, ()), (NARROWED, (59, 69, 74))):
        cuts = pairwise((*ends, *caveats, len(token)))
        shown.append("\n".join(token[start:end].hex() for start, end in cuts))
    return "```token\n" + "\n\n".join(shown) + "\n```\n"


def judged_block() -> str:
    """How a leader judges locks on a table with these commits."""
    window = RecentWritesDraft(RecentWrites(reach=50))
    for at, before, keys in ((100, 0, [b"ann"]), (200, 100, [b"bob", b"cat"])):
        window.add("bank/a", Write.of(at, keys), before)
    rows: list[list[Any]] = []
    for since, last, locked in (
        (200, 200, "`bob`"),
        (150, 100, "`ann`"),
        (150, 100, "`bob`"),
        (150, 100, "`dan`, which has no row"),
        (150, 100, "[`c`, `d`)"),
        (150, 100, "[`bobby`, `cat`)"),
        (150, 100, "[`d`, the end)"),
        (150, 0, "`ann`"),
        (250, 100, "`ann`"),
        (100, 100, "`ann`"),
        (50, 0, "`dan`"),
        (49, 0, "`dan`"),
    ):
        keys = [key.encode() for key in re.findall("`(.+?)`", locked)]
        ranged = locked.startswith("[")
        ranges = (r.LockedRange(keys[0], keys[1] if len(keys) > 1 else None),) if ranged else ()
        points = () if ranged else (fingerprint(keys[0]),)
        holds = window.holds(r.TableLocks("bank/a", since, last, points, ranges), 200)
        rows.append([since, last, locked, "commits" if holds else "`Revalidate`"])
    return table("`since` | `last` | locked | answer", rows)


def rules_block() -> str:
    rows = (f"| {rule} | {text} |\n" for rule, text in RULES.items())
    return "| id | rule |\n|---|---|\n" + "".join(rows)


def blocks() -> dict[str, str]:
    found = {
        "types": types_block(),
        "headers command": header_lines(
            [
                (ids.CORRELATION_HEADER, cid(1)),
                (ids.REPLY_HEADER, (5).to_bytes(4, "big")),
            ]
        ),
        "headers write": header_lines([(ids.TXN_HEADER, ids.pack_txn_header(TXN, WRITER, 0))]),
        "token": token_block(),
        "worked": worked_block(),
        "reasons": ", ".join(f"`{reason}`" for reason in REASONS) + ".\n",
        "errors": errors_block(),
        "judged": judged_block(),
        "rows": rows_block(),
        "rules": rules_block(),
    }
    return found | {f"example {name}": example(name) for name in IN_THE_TEXT}


def vectors() -> str:
    """The file of test vectors: JSON, a line for each short value."""
    records = [
        {
            "name": name,
            "type": type(record).__name__,
            "value": as_json(record),
            "hex": encode(record).hex(),
        }
        for name, record in EXAMPLES.items()
    ]
    found = {
        "about": "Test vectors of the protocol: docs/protocol.md, section 15, explains the fields.",
        "records": records,
        "key_positions": key_vectors(),
        "checksums": checksum_vectors(),
        "tasks": task_vectors(),
    }
    return json_lines(found) + "\n"


if __name__ == "__main__":
    made = blocks()
    for page in (PAGE, ROWS_PAGE):
        text = BLOCK.sub(lambda m: m[1] + made[m[2]] + m[4], page.read_text("utf-8"))
        page.write_text(text, "utf-8")
    VECTORS.write_text(vectors(), "utf-8")
