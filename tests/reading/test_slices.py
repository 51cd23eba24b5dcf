"""Slices of runs: the same events singly, as an Arrow batch and in parts, from columns as from records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.batches.records import Record
from anabranch.protocol.ids import TXN_HEADER
from anabranch.reading.decoded import RecordsBlock, Run, Stretch
from anabranch.reading.event_columns import batch_of
from anabranch.reading.slices import EVENT_BYTES, Piece, Slice, Slices
from anabranch.types import Event
from tests.reading.test_decoded import columns

_KEYS = (None, b"", b"k", b"another")
_VALUES = (None, b"", b"value")
_HEADERS: tuple[tuple[tuple[str, bytes | None], ...], ...] = (
    (),
    (("h", None),),
    (("h", b"1"), ("", b"2")),
    ((TXN_HEADER, b"t" * 16),),
)


def piece(*slices: Slice) -> Piece:
    return Piece("s/t", 1, Slices("s/t", list(slices)), [7 for one in slices for _ in one.tasks])


def bytes_of(events: Sequence[Event]) -> list[int]:
    return [len(e.key or b"") + len(e.value or b"") + EVENT_BYTES for e in events]


@settings(deadline=None)
@given(st.data())
def test_a_share_is_the_same_in_all_its_forms(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    keys, values = st.sampled_from(_KEYS), st.sampled_from(_VALUES)
    headers = st.sampled_from(_HEADERS)
    records = [
        Record(2 * n, 1000 + n, data.draw(keys), data.draw(values), data.draw(headers))
        for n in range(count)
    ]
    low = data.draw(st.integers(0, count - 1))
    length = data.draw(st.integers(1, count - low))
    stretch = Stretch(length, data.draw(st.sampled_from((None, b"x" * 16))), 5, 6)
    chosen = data.draw(st.none() | st.sets(st.integers(0, length - 1), min_size=1).map(sorted))
    for block in (columns(records), RecordsBlock(records)):
        run = Run(block, 3, low, stretch)
        wanted = [e for n, e in enumerate(run.events("s/t")) if chosen is None or n in chosen]
        made = Slice(run, [7] * len(wanted), None if chosen is None else np.array(chosen))
        found = piece(made)
        assert [*found.events] == [*found.events] == wanted
        assert len(found.events) == len(wanted)
        assert found.batch().equals(batch_of(wanted)), found.batch()
        assert made.last() == (6, wanted[-1].offset)
        assert made.ends().tolist() == np.cumsum(bytes_of(wanted)).tolist()
        at = data.draw(st.integers(1, len(wanted)))
        parts = [part for part in made.split(at) if part.tasks]
        assert len(parts[0].tasks) == at
        assert [*piece(*parts).events] == wanted
        assert piece(*parts).batch().equals(batch_of(wanted))
