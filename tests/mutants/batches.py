"""Planted bugs in the bytes of batches: compiled framing, splicing, what is read raw; see `catalogue`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from anabranch.batches import columns_read, framing
from anabranch.batches import format as batch
from anabranch.batches.columns_read import ColumnsBuilder, Longs
from anabranch.batches.kernels.scan import FIRST
from anabranch.kafka import data as wire_data

Planted = AbstractContextManager[object]
_CRC_AT = 17


def late_first_offset() -> Planted:
    """The compiled walk says of all runs of a batch but the first that they begin an offset late."""
    real = framing._scan_compiled

    def scan(*given: Any) -> tuple[list[list[int]] | None, Any]:
        rows, keys = real(*given)
        for row in (rows or [])[1:]:
            row[FIRST] += 1
        return rows, keys

    return patch.object(framing, "_scan_compiled", scan)


def first_writer_for_all() -> Planted:
    """A batch counts as one writer's if its first run is a WRITE: others' records are spliced along."""
    real = framing._run

    def run(row: list[int], body: Any, header: Any) -> framing.Run:
        made = real(row, body, header)
        first = made.kind == framing.Kind.WRITE and made.first_delta == 0
        return made._replace(pure=True) if first else made

    return patch.object(framing, "_run", run)


def crc_left() -> Planted:
    """A spliced batch keeps the CRC that it had in the journal."""
    real = batch.patch_parts

    def patch_parts(data: Any, *given: Any, **more: Any) -> tuple[bytes, memoryview]:
        head, records = real(data, *given, **more)
        old = bytes(memoryview(data)[_CRC_AT : _CRC_AT + 4])
        return head[:_CRC_AT] + old + head[_CRC_AT + 4 :], records

    return patch.object(batch, "patch_parts", patch_parts)


def aborted_read() -> Planted:
    """The raw reader shows what aborted native transactions appended."""
    real = wire_data.visible

    def visible(answer: Any, committed: bool) -> Any:
        for raw, _ in real(answer, committed):
            yield raw, batch.read_header(raw.data).is_control

    return patch.object(wire_data, "visible", visible)


def marker_passed() -> Planted:
    """The raw reader passes over abort markers: what their producer commits later stays hidden."""
    return patch.object(wire_data, "is_abort_marker", lambda _: False)


def beyond_the_range() -> Planted:
    """Reading in columns goes an offset beyond the end of each range: a segment's, or a snapshot's cut."""
    real = ColumnsBuilder.add

    def add(self: ColumnsBuilder, raw: Any, wanted: Longs, **more: Any) -> Any:
        longer = wanted.copy()
        longer[1] += 1
        return real(self, raw, longer, **more)

    return patch.object(columns_read.ColumnsBuilder, "add", add)
