"""The log of a process on standard error: lines of text, or JSON with one object for each line.

Commands call `start`, and so do processes that they start. The log of a program that uses the library is its own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

FORMATS = ("text", "json")
# The format of the text lines of services.
LINE = "%(asctime)s %(levelname)-7s %(message)s"

# C0, DEL, C1, line ends, controls of the writing direction, and surrogates, which can't be encoded.
ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_about: ContextVar[Mapping[str, object] | None] = ContextVar("about", default=None)
_defect = logging.getLogger("anabranch")


def escaped(text: str) -> str:
    r"""A text with control characters written as `\n`, `\x1b`, `\u202e`."""
    return ACTS.sub(lambda found: repr(found[0])[1:-1], text)


@contextmanager
def about(**fields: object) -> Iterator[dict[str, object]]:
    """Give fields to all lines that this thread logs within the ``with`` block. Returns them; they may change."""
    own = {**(_about.get() or {}), **fields}
    token = _about.set(own)
    try:
        yield own
    finally:
        _about.reset(token)


class TextLines(logging.Formatter):
    """Lines of text, with the time and its zone. Control characters are escaped."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        local = datetime.fromtimestamp(record.created).astimezone()
        return local.isoformat(timespec="milliseconds")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))


class JsonLines(logging.Formatter):
    """A JSON object for each record. Its text is ASCII, so that no character ends a line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        document: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        given = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if fields := {**(_about.get() or {}), **given}:
            document["fields"] = fields
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=_text)


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def is_json() -> bool:
    """Whether the log of this process is JSON."""
    return any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers)


def start(form: str, level: int, line: str = LINE) -> None:
    """Log to standard error, unless logging is configured already; then at ``level`` at least.

    ``form``: of `FORMATS`. ``line``: the format of a line of text. As JSON, Python's warnings, and errors
    that no code handles, become lines of the log, too.
    """
    root = logging.getLogger()
    if is_json():
        root.setLevel(min(root.level, level))
        return
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonLines())
        logging.captureWarnings(True)
        sys.excepthook = _unhandled
        threading.excepthook = _unhandled_in_thread
        sys.unraisablehook = _not_raised
        logging.getLogger("anabranch.cli").setLevel(logging.INFO)  # what commands say themselves
    else:
        handler.setFormatter(TextLines(line))
    logging.basicConfig(level=level, handlers=[handler])


def take_other_lines(logger: str) -> None:
    """Make lines of this log, by a logger, of what child processes write to standard error from now on.

    Lines that are JSON objects already stay as they are. Only for a log that is JSON.
    """
    shown = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and is_json():
            handler.setStream(shown)
    taking, giving = os.pipe()
    os.dup2(giving, 2)
    os.close(giving)

    def take() -> None:
        with os.fdopen(taking, encoding="utf-8", errors="backslashreplace") as lines:
            for line in lines:
                if _is_object(line):
                    shown.write(line)
                    shown.flush()
                elif line.strip():
                    logging.getLogger(logger).warning("%s", line.rstrip())

    threading.Thread(target=take, name="other-lines", daemon=True).start()


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _unhandled(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    _defect.critical("an error ends the process: %r", error, exc_info=(kind, error, trace))


def _unhandled_in_thread(given: Any) -> None:
    if given.exc_type is SystemExit:  # as Python's own
        return
    name = given.thread.name if given.thread is not None else "of which nothing is known"
    _defect.error(
        "an error ends the thread %s: %r",
        name,
        given.exc_value,
        exc_info=(given.exc_type, given.exc_value, given.exc_traceback),
    )


def _not_raised(given: Any) -> None:
    _defect.error(
        "%s %r: %r",
        given.err_msg or "an error can't be raised in",
        given.object,
        given.exc_value,
        exc_info=(given.exc_type, given.exc_value, given.exc_traceback),
    )
