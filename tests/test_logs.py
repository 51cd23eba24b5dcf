"""The log as JSON: one line is one object, whatever is logged, warned of or raised."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from anabranch.cli.cluster import child_environment

BEGIN = "import logging, threading, warnings, gc\nfrom anabranch import logs\nlogs.start({form!r}, logging.INFO)\n"


def lines(program: str, form: str = "json") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN.format(form=form) + program],
        capture_output=True, text=True, env=child_environment(), timeout=60,
    )  # fmt: skip
    return done.stderr.splitlines()


def logged(program: str) -> Any:
    [line] = lines(program)
    assert line.isascii()
    return json.loads(line)


def test_a_line_has_time_level_logger_message_and_fields() -> None:
    found = logged(
        "with logs.about(control_partition=3, term=1) as fields:\n"
        "    fields['term'] = 2\n"
        "    logging.getLogger('anabranch.x').warning('a %s', 'b', extra={'stream': 's/t', 'txn': b'\\x01'})\n"
    )
    age = datetime.now(UTC) - datetime.fromisoformat(found.pop("time"))
    assert 0 <= age.total_seconds() < 60
    assert found == {
        "level": "WARNING",
        "logger": "anabranch.x",
        "message": "a b",
        "fields": {"control_partition": 3, "term": 2, "stream": "s/t", "txn": "01"},
    }


def test_fields_end_with_their_block_and_are_those_of_one_thread() -> None:
    program = (
        "say = lambda: logging.info('x')\n"
        "with logs.about(a=1):\n"
        "    with logs.about(b=2): say()\n"
        "    say()\n"
        "    other = threading.Thread(target=say); other.start(); other.join()\n"
    )
    found = [json.loads(line).get("fields") for line in lines(program)]
    assert found == [{"a": 1, "b": 2}, {"a": 1}, None]


@pytest.mark.parametrize(
    ("program", "level", "said"),
    [
        ("try: 1 / 0\nexcept ZeroDivisionError: logging.exception('x')", "ERROR", "ZeroDivisionError"),
        ("raise OSError('two\\nlines')", "CRITICAL", "two\nlines"),
        ("t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()", "ERROR", "ZeroDivisionError"),
        ("class A:\n  def __del__(self): 1 / 0\na = A(); del a", "ERROR", "ZeroDivisionError"),
    ],
    ids=["logged", "of the program", "of a thread", "of a finalizer"],
)  # fmt: skip
def test_a_traceback_is_in_the_line(program: str, level: str, said: str) -> None:
    found = logged(program)
    assert found["level"] == level
    assert said in found["exception"]
    assert "Traceback" in found["exception"]


def test_warnings_of_libraries_are_lines() -> None:
    found = logged("warnings.warn('old\\nthing', UserWarning)")
    assert (found["level"], found["logger"]) == ("WARNING", "py.warnings")
    assert "UserWarning: old\nthing" in found["message"]


def test_what_could_end_a_line_or_break_an_encoding_does_not() -> None:
    text = "\\n\\r\\x85\\u2028\\u202e\\ud800\\x1b"
    found = logged(f"logging.info('%s', '{text}', extra={{'stream': '{text}', 'other': object()}})")
    assert found["message"] == found["fields"]["stream"] == "\n\r\x85\u2028\u202e\ud800\x1b"


def test_a_line_of_text_has_no_control_characters() -> None:
    [line] = lines("logging.info('%s', 'a\\x1b[31m\\u202e')", "text")
    assert line.endswith("INFO    a\\x1b[31m\\u202e")
    assert datetime.fromisoformat(line.split()[0]).tzinfo is not None
