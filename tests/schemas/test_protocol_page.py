"""docs/protocol.md says what the code does: its examples are read from the page and checked."""

import ast
import hmac
import inspect
import json
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any, get_args, get_type_hints
from zlib import crc32

import pytest
from crc32c import crc32c

from anabranch import errors
from anabranch.core import ids, tokens
from anabranch.core.decisions.turn import DAY_MS
from anabranch.core.partitioner import even_ranges, position_of, record_checksum
from anabranch.schemas import records as r
from anabranch.schemas.codec import FORMAT_VERSION, TYPES, decode, encode, schema_of
from anabranch.topics.declarations import STREAM_SETTINGS
from tests.schemas.protocol_page import BLOCK, MS, PAGE, SECRET, TXN, WRITER, blocks, cid

TEXT = PAGE.read_text("utf-8")


def section(name: str) -> str:
    """A generated block of the page."""
    return next(match[3] for match in BLOCK.finditer(TEXT) if match[2] == name)


def cells(name: str) -> list[list[str]]:
    """The rows of a table on the page."""
    lines = [line for line in section(name).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def of_json(plain: Any, avro: Any) -> Any:
    """The value that the page's JSON stands for, read by the schema and not by the code above."""
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


SHOWN = re.findall(r"\*\*([^\n]+)\*\*\n\n```json\n([^`]+)\n```\n```hex\n([^`]+)\n```", TEXT)


def test_the_page_is_as_generated() -> None:
    generated = blocks()
    names = [name for _, name, _, _ in BLOCK.findall(TEXT)]
    assert sorted(names) == sorted(generated)
    for name in names:
        assert section(name) == generated[name], "python -m tests.schemas.protocol_page"


@pytest.mark.parametrize(("name", "text", "shown"), SHOWN, ids=[name for name, _, _ in SHOWN])
def test_an_example_is_what_its_bytes_say(name: str, text: str, shown: str) -> None:
    cls = getattr(r, re.split(r"[: ]", name)[0])
    record = of_json(json.loads(text), f"anabranch.{cls.__name__}")
    data = bytes.fromhex(shown)
    assert isinstance(record, cls)
    assert decode(data) == record
    assert encode(record) == data
    if ": " in name:
        assert type(record.result).__name__ == name.split()[1]


def test_every_kind_of_command_and_reply_has_an_example() -> None:
    shown = {name for name, _, _ in SHOWN}
    commands = {cls.__name__ for number, cls in TYPES.items() if number < 32} - {"AdoptScope"}
    branches = get_args(get_type_hints(r.Reply)["result"])
    replies = {f"Reply: {cls.__name__}" for cls in branches}
    assert shown >= commands | replies | {"Receipt", "EpochRecord", "CommitRecord", "JournalOp"}


def test_type_numbers() -> None:
    on_page = {int(row[0]): row[2].strip("`") for row in cells("types")}
    assert on_page == {number: cls.__name__ for number, cls in TYPES.items()}
    assert all(int(row[1], 16) == int(row[0]) for row in cells("types"))
    assert f"format version: {FORMAT_VERSION:02x}" in TEXT


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
        assert answer == ("commits" if holds else "`LookAgain`"), (since, last, locked)


def test_the_errors_are_those_of_the_code() -> None:
    tree = ast.parse(inspect.getsource(errors))
    bases = {
        node.name: getattr(node.bases[0], "id", "")
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.bases
    }
    kinds = {"RetryError", "BeginAgainError", "AskOutcomeError", "FixCallError"}
    on_page = {row[0].strip("`"): row[1] for row in cells("errors")}
    assert set(on_page) == {name for name, base in bases.items() if base in kinds}
    for code, kind in on_page.items():
        error = errors.error_of(code, "why") if code != "OutcomeUnknown" else None
        name = bases[code].removesuffix("Error")
        assert kind.replace(" ", "").lower().replace("the", "") in name.lower()
        assert error is None or (type(error).__name__, str(error)) == (code, "why")


def page_function() -> Callable[[bytes], int]:
    [code] = [c for c in re.findall(r"```python\n(.+?)```", TEXT, re.DOTALL) if "position" in c]
    scope: dict[str, Any] = {}
    exec(code, scope)  # noqa: S102
    found: Callable[[bytes], int] = scope["position"]
    return found


def test_key_positions() -> None:
    rows = cells("positions")
    function = page_function()
    long_ones = {"1000 times `x`": b"x" * 1000, "the bytes 00 to ff": bytes(range(256))}
    assert len(rows) >= 12
    for text, shown, crc, position, segment, fingerprint in rows:
        key = long_ones.get(text, bytes.fromhex(shown.replace("-", "")))
        if text.startswith("UTF-8, `"):
            assert key.decode() in text
        assert (f"{crc32(key):08x}", str(position_of(key))) == (crc, position)
        assert function(key) == int(position)
        assert int(fingerprint) % (1 << 64) == int(position) << 32 | crc32c(key)
        low, high = even_ranges(4)[int(segment)]
        assert low <= int(position) < high
    assert {segment for *_, segment, _ in rows} == {"0", "1", "2", "3"}


def test_dealing() -> None:
    """By the sentences above the table."""
    rows = cells("dealing")
    for key, low, high, offset, task in rows:
        at = -1 if key == "null" else int(key.partition(", ")[2])
        tasks = [int(low) * 4 >> 32, (int(high) - 1) * 4 >> 32]
        dealt = tasks[0] + int(offset) % (tasks[1] - tasks[0] + 1)
        assert int(task) == (at * 4 >> 32 if int(low) <= at < int(high) else dealt)
    assert {row[-1] for row in rows} == {"0", "1", "2", "3"}


def test_the_worked_position() -> None:
    values = re.findall(r"= ([0-9a-f]{8})\n", section("worked"))
    assert int(values[0], 16) == crc32(b"JFK")
    assert int(values[-1], 16) == position_of(b"JFK")
    assert f"= {position_of(b'JFK')}\n" in section("worked")


def test_checksums() -> None:
    def given(cell: str) -> bytes | None:
        return None if cell == "null" else bytes.fromhex(cell.replace("empty", ""))

    rows = cells("checksums")
    for key, value, checksum in rows:
        assert record_checksum(given(key), given(value)) == int(checksum)
    total = sum(int(checksum) for *_, checksum in rows[-3:])
    assert f"together: {total}." in section("checksums")


def test_headers() -> None:
    found = dict(re.findall(r"^(ab\.\w+) +([0-9a-f]+)$", TEXT, re.MULTILINE))
    txn_id, writer, epoch = ids.unpack_txn_header(bytes.fromhex(found["ab.txn"]))
    assert (txn_id, writer, epoch) == (TXN, WRITER, 0)
    assert len(bytes.fromhex(found["ab.cid"])) == 16
    assert int.from_bytes(bytes.fromhex(found["ab.reply"]), "big") == 5
    assert found["ab.cid"] == cid(1).hex()


def test_the_token() -> None:
    """From the page's words alone, without the code that it tells of."""
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
    answers = {name: json.loads(text) for name, text, _ in SHOWN}
    assert answers["Reply: Begun"]["result"]["Begun"]["begun_ms"] == found.begun_ms
    assert answers["Touch"]["token"] == b"".join(whole).hex()
    assert answers["Begin"]["secret"] == SECRET.hex()


def test_an_answer_names_the_command_before_it() -> None:
    """By the page's own rule: the first 8 bytes of the SHA-256 of the command's value."""
    values = {name: bytes.fromhex(data) for name, _, data in SHOWN}
    answers = {name: json.loads(text) for name, text, _ in SHOWN}
    pairs = {
        "ScopeInfo": "FindScope",
        "Begun": "Begin",
        "Touched": "Touch",
        "Outcome": "Commit",
        "Alive": "Heartbeat",
        "SeriesList": "ListSeries",
    }
    for answer, command in pairs.items():
        digest = sha256(values[command]).digest()[:8]
        assert answers[f"Reply: {answer}"]["command"] == digest.hex()


def test_the_settings_of_a_stream() -> None:
    [named] = re.findall(r"Settings are those of the stream's topic, as text: (.+?);", TEXT, re.S)
    assert set(re.findall(r"`([^`]+)`", named)) == STREAM_SETTINGS


def test_the_page_names_every_topic_and_header() -> None:
    for name in (ids.TXN_HEADER, ids.OP_HEADER, ids.CORRELATION_HEADER, ids.REPLY_HEADER):
        assert f"`{name}`" in TEXT
    for topic in ("commands", "control", "replies", "status"):
        assert f"`<prefix>.{topic}`" in TEXT


def test_every_form_that_is_said_to_be_taken_is_taken() -> None:
    forms = [
        bytes.fromhex(row.split(" | ")[1].strip(" |")) for row in section("also").splitlines()[2:]
    ]
    assert len(set(forms)) == 4
    assert {decode(form) for form in forms} == {r.Scale("nyc/a", 0, (1, 2), ())}
