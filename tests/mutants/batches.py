"""Planted bugs in the bytes of batches: compiled framing, splicing, what is read raw; see `catalogue`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from anabranch.batches import columns_read, framing
from anabranch.batches import format as batch
from anabranch.batches.columns_read import ColumnsBuilder, Longs
from anabranch.batches.kernels.scan import FIRST
from anabranch.kafka import data as wire_data
from tests.mutants.planting import Planted, wrapping

_CRC_AT = 17


@wrapping(framing, "_scan_compiled")
def late_first_offset(real: Any, *given: Any) -> tuple[list[list[int]] | None, Any]:
    """The compiled walk says of all runs of a batch but the first that they begin an offset late."""
    rows, keys = real(*given)
    for row in (rows or [])[1:]:
        row[FIRST] += 1
    return rows, keys


@wrapping(framing, "_run")
def first_writer_for_all(real: Any, row: list[int], body: Any, header: Any) -> Any:
    """A batch counts as one writer's if its first run is a WRITE: others' records are spliced along."""
    made = real(row, body, header)
    first = made.kind == framing.Kind.WRITE and made.first_delta == 0
    return made._replace(pure=True) if first else made


@wrapping(batch, "patch_parts")
def crc_left(real: Any, data: Any, *given: Any, **more: Any) -> tuple[bytes, memoryview]:
    """A spliced batch keeps the CRC that it had in the journal."""
    head, records = real(data, *given, **more)
    old = bytes(memoryview(data)[_CRC_AT : _CRC_AT + 4])
    return head[:_CRC_AT] + old + head[_CRC_AT + 4 :], records


@wrapping(wire_data, "visible")
def aborted_read(real: Any, answer: Any, committed: bool) -> Any:
    """The raw reader shows what aborted native transactions appended."""
    for raw, _ in real(answer, committed):
        yield raw, batch.read_header(raw.data).is_control


def marker_passed() -> Planted:
    """The raw reader passes over abort markers: what their producer commits later stays hidden."""
    return patch.object(wire_data, "is_abort_marker", lambda _: False)


@wrapping(columns_read.ColumnsBuilder, "add")
def beyond_the_range(real: Any, self: ColumnsBuilder, raw: Any, wanted: Longs, **more: Any) -> Any:
    """Reading in columns goes an offset beyond the end of each range: a segment's, or a snapshot's cut."""
    longer = wanted.copy()
    longer[1] += 1
    return real(self, raw, longer, **more)
