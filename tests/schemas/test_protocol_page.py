"""docs/protocol.md and its test vectors say what the code does: they are read from the files and checked."""

import ast
import hmac
import inspect
import json
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any, get_args, get_type_hints
from zlib import crc32

from crc32c import crc32c

from anabranch import errors
from anabranch.core.decisions.turn import DAY_MS
from anabranch.protocol import ids, tokens
from anabranch.protocol.partitioner import even_ranges, position_of, record_checksum
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import TYPES, decode, encode, schema_of
from anabranch.topics.declarations import STREAM_SETTINGS
from tests.schemas.protocol_page import (
    BLOCK,
    IN_THE_TEXT,
    MS,
    NEVER_SENT,
    PAGE,
    ROWS_PAGE,
    SECRET,
    TXN,
    VECTORS,
    WRITER,
    blocks,
    cid,
    vectors,
)

TEXT = PAGE.read_text("utf-8")
BOTH = TEXT + ROWS_PAGE.read_text("utf-8")
FOUND = json.loads(VECTORS.read_text("utf-8"))
RECORDS: list[dict[str, Any]] = FOUND["records"]
VALUES = {each["name"]: each["value"] for each in RECORDS}
BYTES = {each["name"]: bytes.fromhex(each["hex"]) for each in RECORDS}


def section(name: str) -> str:
    """A generated block of the pages."""
    return next(match[3] for match in BLOCK.finditer(BOTH) if match[2] == name)


def cells(name: str) -> list[list[str]]:
    """The rows of a table on the page."""
    lines = [line for line in section(name).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def of_json(plain: Any, avro: Any) -> Any:
    """The value that a vector's JSON stands for, read by the schema and not by the code that wrote it."""
    if isinstance(avro, list):
        if isinstance(plain, dict):
            branches = [branch for branch in avro if branch != "null"]
            if len(branches) == 1:  # nullable: the page does not name the branch
                return of_json(plain, branches[0])
            [(name, inner)] = plain.items()
            return of_json(inner, f"anabranch.{name}")
        return None if plain is None else of_json(plain, avro[1])
    if isinstance(avro, dict) and avro["type"] == "array":
        return tuple(of_json(item, avro["items"]) for item in plain)
    if isinstance(avro, dict) and avro["type"] == "map":
        return plain
    name = avro if isinstance(avro, str) else avro.get("name", avro["type"])
    if name in ("bytes", "anabranch.TxnId", "anabranch.Secret"):
        return bytes.fromhex(plain)
    cls = getattr(r, name.removeprefix("anabranch."), None)
    if isinstance(cls, type):
        fields = schema_of(cls)["fields"]
        assert set(plain) == {field["name"] for field in fields}
        return cls(*[of_json(plain[field["name"]], field["type"]) for field in fields])
    return plain


def test_the_pages_are_as_generated() -> None:
    generated = blocks()
    names = [name for _, name, _, _ in BLOCK.findall(BOTH)]
    assert sorted(names) == sorted(generated)
    for name in names:
        assert section(name) == generated[name], "python -m tests.schemas.protocol_page"


def test_the_vectors_are_as_generated() -> None:
    assert VECTORS.read_text("utf-8") == vectors(), "python -m tests.schemas.protocol_page"


def test_each_vector_is_what_its_bytes_say() -> None:
    for name in VALUES:
        [cls] = [getattr(r, each["type"]) for each in RECORDS if each["name"] == name]
        record = of_json(VALUES[name], f"anabranch.{cls.__name__}")
        assert isinstance(record, cls), name
        assert decode(BYTES[name]) == record, name
        assert encode(record) == BYTES[name], name
        assert re.split(r"[: ]", name)[0] == cls.__name__, name
        if ": " in name:
            assert type(record.result).__name__ == name.split()[1], name


def test_the_examples_in_the_text_are_vectors() -> None:
    shown = re.findall(r"\*\*([^\n]+)\*\*\n\n```json\n([^`]+)\n```\n```hex\n([^`]+)\n```", TEXT)
    assert [name for name, _, _ in shown] == list(IN_THE_TEXT)
    for name, text, data in shown:
        assert (json.loads(text), bytes.fromhex(data)) == (VALUES[name], BYTES[name])


def test_every_kind_of_command_and_reply_has_a_vector() -> None:
    commands = {cls.__name__ for number, cls in TYPES.items() if number < 32} - {"AdoptScope"}
    branches = get_args(get_type_hints(r.Reply)["result"])
    replies = {f"Reply: {cls.__name__}" for cls in branches}
    others = {"Receipt", "EpochRecord", "CommitRecord", "JournalOp"}
    assert set(VALUES) >= commands | replies | others


def test_type_numbers() -> None:
    on_page = re.findall(r"\b([0-9a-f]{2}) (\w+)", section("types"))
    on_page += {(row[2], row[1].strip("`")) for row in cells("rows")}
    known = {number: cls.__name__ for number, cls in TYPES.items()}
    assert sorted((int(number, 16), name) for number, name in on_page) == sorted(known.items())
    assert "byte 0    feature level: 01" in TEXT


def test_locks_are_judged_as_the_page_says() -> None:
    """By the rule alone: what was written above `since`, who has read all of it, and what the leader remembers."""
    writes, newest, reach = {b"ann": 100, b"bob": 200, b"cat": 200}, 200, 50
    for since_text, last_text, locked, answer in cells("judged"):
        since, last = int(since_text), int(last_text)
        keys = [key.encode() for key in re.findall("`(.+?)`", locked)]
        low, high = keys[0], keys[1] if len(keys) > 1 else b"\xff"
        if not locked.startswith("["):
            high = low + b"\0"
        read_all = last == max([at for at in writes.values() if at <= since], default=0)
        untouched = not any(low <= key < high and at > since for key, at in writes.items())
        remembers = newest <= since or since >= reach
        holds = read_all and untouched and remembers
        assert answer == ("commits" if holds else "`Revalidate`"), (since, last, locked)


def test_the_errors_are_those_that_controllers_send() -> None:
    kinds = {
        "Retry later": errors.RetryError,
        "Begin again, with a new id": errors.BeginAgainError,
        "Ask the outcome, by `Resolve`": errors.AskOutcomeError,
        "Fix the call": errors.FixCallError,
    }
    on_page: dict[str, str] = {}
    for part in section("errors").split("\n\n"):
        head, _, *rows = [line.strip("|").split("|")[0].strip() for line in part.splitlines()]
        on_page |= {row.strip("`"): head for row in rows}
    for code, kind in on_page.items():
        error = errors.error_of(code, "why")
        assert type(error).__name__ == code
        assert isinstance(error, kinds[kind])
    tree = ast.parse(inspect.getsource(errors))
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    every = {name for name in classes if issubclass(getattr(errors, name), tuple(kinds.values()))}
    every -= {base.__name__ for base in kinds.values()}
    assert set(on_page) == every - NEVER_SENT
    controllers = PAGE.parents[1] / "anabranch"
    folders = [controllers / name for name in ("core", "controller", "topics", "protocol")]
    sources = "".join(file.read_text("utf-8") for each in folders for file in each.rglob("*.py"))
    named = {name for name in every if re.search(rf"\b{name}\b", sources)}
    assert named - {"NotLeader"} == set(on_page)


def page_function() -> Callable[[bytes], int]:
    [code] = [c for c in re.findall(r"```python\n(.+?)```", TEXT, re.DOTALL) if "position" in c]
    scope: dict[str, Any] = {}
    exec(code, scope)  # noqa: S102
    found: Callable[[bytes], int] = scope["position"]
    return found


def test_a_key_has_the_position_that_the_page_says() -> None:
    function = page_function()
    assert len(FOUND["key_positions"]) >= 12
    for each in FOUND["key_positions"]:
        key, position = bytes.fromhex(each["key"]), each["position"]
        if each["what"].startswith("UTF-8: ") and "U+" not in each["what"]:
            assert key.decode() in each["what"]
        assert (f"{crc32(key):08x}", position_of(key)) == (each["crc32"], position)
        assert function(key) == position
        assert each["fingerprint"] % (1 << 64) == position << 32 | crc32c(key)
        low, high = even_ranges(4)[each["segment_of_4"]]
        assert low <= position < high
    assert {each["segment_of_4"] for each in FOUND["key_positions"]} == {0, 1, 2, 3}


def test_a_key_has_the_task_that_the_page_says() -> None:
    """By the sentences of section 10."""
    for each in FOUND["tasks"]:
        low, high, at = each["segment_low"], each["segment_high"], each["position"]
        tasks = [low * 4 >> 32, (high - 1) * 4 >> 32]
        dealt = tasks[0] + each["offset"] % (tasks[1] - tasks[0] + 1)
        own = at is not None and low <= at < high
        assert each["task_of_4"] == (at * 4 >> 32 if own else dealt)
        assert (at is None) == (each["key"] is None)
        assert at is None or at == position_of(bytes.fromhex(each["key"]))
    assert {each["task_of_4"] for each in FOUND["tasks"]} == {0, 1, 2, 3}
    [without] = re.findall(r"without a key at offset (\d+) belongs\s+to task (\d) of 4", TEXT)
    keyed = re.findall(r"key `JFK`\s+\(position\s+(\d+)\)\s+belongs\s+to\s+task (\d)", TEXT)
    every = [each for each in FOUND["tasks"] if each["segment_high"] == 1 << 32]
    assert (int(without[0]), int(without[1])) in [(e["offset"], e["task_of_4"]) for e in every]
    assert [(int(at), int(task)) for at, task in keyed] == [
        (each["position"], each["task_of_4"]) for each in every if each["key"] == b"JFK".hex()
    ]


def test_the_worked_position() -> None:
    values = re.findall(r"= ([0-9a-f]{8})\n", section("worked"))
    assert int(values[0], 16) == crc32(b"JFK")
    assert int(values[-1], 16) == position_of(b"JFK")
    assert f"= {position_of(b'JFK')}\n" in section("worked")


def test_checksums() -> None:
    def given(value: str | None) -> bytes | None:
        return None if value is None else bytes.fromhex(value)

    known = {}
    for each in FOUND["checksums"]:
        key, value = given(each["key"]), given(each["value"])
        assert crc32((key or b"") + (value or b"")) == each["checksum"]
        assert record_checksum(key, value) == each["checksum"]
        known[key, value] = each["checksum"]
    assert len(known) == 8
    [shown] = re.findall(r"key `(\w+)` and value `(\w+)` have the checksum (\d+)", TEXT)
    assert known[shown[0].encode(), shown[1].encode()] == int(shown[2])


def test_the_headers_of_the_page_are_read_back() -> None:
    found = dict(re.findall(r"^(ab\.\w+) +([0-9a-f]+)$", TEXT, re.MULTILINE))
    txn_id, writer, epoch = ids.unpack_txn_header(bytes.fromhex(found["ab.txn"]))
    assert (txn_id, writer, epoch) == (TXN, WRITER, 0)
    assert len(bytes.fromhex(found["ab.cid"])) == 16
    assert int.from_bytes(bytes.fromhex(found["ab.reply"]), "big") == 5
    assert found["ab.cid"] == cid(1).hex()


def test_a_token_is_made_from_the_words_of_the_page() -> None:
    """From the page's words alone, without the code that it describes."""
    shown = "\n".join(section("token").splitlines()[1:-1]).split("\n\n")
    whole, narrowed = ([bytes.fromhex(line) for line in text.split("\n")] for text in shown)
    assert [len(part) for part in whole] == [1, 16, 4, 8, 8, 4, 5, 1, 8, 1, 32]
    assert whole[1][:2] == (3).to_bytes(2, "big")
    assert whole[5:7] == [b"\3nyc", b"\4open"]
    key = hmac.digest(SECRET, b"".join(whole[:9]), "sha256")
    assert key == whole[-1]
    assert narrowed[:9] == whole[:9]
    assert narrowed[9] == b"\3"
    for caveat in narrowed[10:-1]:
        assert caveat[0] == len(caveat) - 1
        key = hmac.digest(key, caveat[1:], "sha256")
    assert key == narrowed[-1]
    found = tokens.peek(b"".join(narrowed))
    assert tokens.is_genuine(found, SECRET)
    expected = tokens.Token(
        TXN, 60_000, MS + 12, "nyc", "open", 3, MS + 12 + DAY_MS, frozenset({"etl"})
    )
    assert found == expected
    assert VALUES["Reply: Begun"]["result"]["Begun"]["begun_ms"] == found.begun_ms
    assert VALUES["Touch"]["token"] == b"".join(whole).hex()
    assert VALUES["Begin"]["secret"] == SECRET.hex()


def test_an_answer_names_the_command_before_it() -> None:
    """By the page's own rule: the first 8 bytes of the SHA-256 of the command's value."""
    pairs = {
        "ScopeInfo": "FindScope",
        "Begun": "Begin",
        "Touched": "Touch",
        "Outcome": "Commit",
        "Ended": "Heartbeat",
        "SeriesList": "ListSeries",
    }
    for answer, command in pairs.items():
        digest = sha256(BYTES[command]).digest()[:8]
        assert VALUES[f"Reply: {answer}"]["command"] == digest.hex()


def test_the_settings_of_a_stream() -> None:
    [named] = re.findall(r"Settings are those of the stream's topic, as text: (.+?);", TEXT, re.S)
    assert set(re.findall(r"`([^`]+)`", named)) == STREAM_SETTINGS


def test_the_page_names_every_topic_and_header() -> None:
    for name in (ids.TXN_HEADER, ids.OP_HEADER, ids.CORRELATION_HEADER, ids.REPLY_HEADER):
        assert f"`{name}`" in TEXT
    for topic in ("commands", "control", "replies", "status"):
        assert f"`<prefix>.{topic}`" in TEXT
