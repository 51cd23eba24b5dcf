"""Decisions on a living stream's topics: other settings, and events deleted up to a time.

The stream's row states the change, and that its topics do not have it yet. The shell changes the topics, whatever
transactions are open; then the result is logged and answered. A new leader that finds a change without a result
makes it again.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.core import limits
from anabranch.core import rows as k
from anabranch.core.authorize import table_of
from anabranch.core.decisions.questions import make_safe
from anabranch.core.decisions.scale import asked, asker
from anabranch.core.decisions.scopes import active_stream, check_served, stream_info
from anabranch.core.decisions.times import admit_change, is_repeated
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.hybrid_time import to_text
from anabranch.core.legal_names import is_state, split_stream
from anabranch.core.round import ReplyTo
from anabranch.core.stream_settings import FIXED, KNOWN, TOPIC, check_settings
from anabranch.errors import AnabranchError, InvalidArgument, NotReady, UnsupportedSetting
from anabranch.schemas.records import (
    AlterStream,
    StreamChange,
    StreamList,
    StreamRow,
    TruncateStream,
)


def alter_stream(turn: Turn, command: AlterStream, to: ReplyTo | None) -> None:
    """Log a stream's new settings, which the shell then gives to the topics. Repeating it is harmless."""
    row = idle_row(turn, command.stream, to)
    if row is None:
        return
    named = command.settings.keys() | set(command.unset)
    if fixed := sorted(named & FIXED):
        raise UnsupportedSetting(f"{', '.join(fixed)} can't be altered: make a new stream")
    wrong = set(command.unset) - KNOWN | set(command.unset) & command.settings.keys()
    if wrong:
        raise UnsupportedSetting(
            f"{limits.cut(', '.join(sorted(wrong)))} can't be taken back: no such setting, or given, too"
        )
    settings = {n: v for n, v in row.settings.items() if n not in command.unset}
    settings |= command.settings
    check_settings(settings)
    wanted = ", ".join(f"{name}={settings.get(name, '')}" for name in sorted(named))
    admit_change(turn, k.stream_key(row.stream), to)
    what = f"{command.stream}: {wanted}"
    changed = replace(row, settings=settings)
    if named & TOPIC.keys():  # also unchanged ones: the topic may have been altered by hand
        turn.audit_later(command, row.stream, what)
        begin_change(turn, changed, StreamChange(row.settings, 0), to)
    else:
        turn.audit(command, what)
        turn.put(k.stream_key(row.stream), changed)
        turn.reply(to, StreamList((stream_info(turn, changed),)))


def truncate_stream(turn: Turn, command: TruncateStream, to: ReplyTo | None) -> None:
    """Log that a stream's events up to a commit timestamp are to be deleted. Repeating it is harmless."""
    row = idle_row(turn, command.stream, to)
    if row is None:
        return
    if is_state(command.stream):
        raise InvalidArgument(f"{command.stream} is the state of a processor: reset that instead")
    if command.stream in turn.state.tables:
        raise InvalidArgument(
            f"{command.stream} is a table: delete rows instead, or compact it (`anabranch table compact`)"
        )
    if table := table_of(turn.state, command.stream):
        raise InvalidArgument(
            f"{command.stream} has the base of table {table}: compact that again instead"
        )
    until = make_safe(turn, command.until)
    admit_change(turn, k.stream_key(row.stream), to)
    turn.audit_later(command, row.stream, f"{command.stream} up to {until}, {to_text(until)}")
    begin_change(turn, row, StreamChange(row.settings, until), to)


def idle_row(turn: Turn, stream: str, to: ReplyTo | None) -> StreamRow | None:
    """The row of a stream without a change under way; None if this command's own change is.

    `NotReady`: another's is.
    """
    check_served(turn, split_stream(stream)[0])
    row = active_stream(turn, stream)
    if row.change is None:
        return row
    if is_repeated(turn, k.stream_key(stream), to):
        return None
    raise NotReady(f"{stream} is being altered or truncated: ask again")


def begin_change(turn: Turn, row: StreamRow, change: StreamChange, to: ReplyTo | None) -> None:
    """Log a change of the stream's topics that the shell makes, and the asker that waits for it."""
    turn.put(k.stream_key(row.stream), replace(row, change=change, **asked(to)))


def stream_changed(turn: Turn, stream: str, error: AnabranchError | None = None) -> None:
    """Log that the topics are changed, or (``error``) can't be: then restore the former settings.

    Answer the asker.
    """
    row = turn.state.streams[stream]
    if row.change is None:
        return
    settings = row.settings if error is None else row.change.settings
    done = replace(row, settings=settings, change=None, **asked(None))
    turn.put(k.stream_key(stream), done)
    turn.audited(stream, done=error is None)
    answer = StreamList((stream_info(turn, done),)) if error is None else refuse(error)
    turn.reply(asker(row), answer)
