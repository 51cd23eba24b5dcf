"""The compiled walks over a record batch's body: cutting it into runs, and copying runs into a new one.

Import it only through `anabranch.batches.framing`: numba takes a second to load.
"""

from __future__ import annotations

from anabranch.batches.kernels.copy import (
    BASE_TIMESTAMP,
    COPIED,
    MAX_TIMESTAMP,
    NEXT_DELTA,
    SOURCE_AT,
    STATE_SIZE,
    TARGET_AT,
    copy,
    copy_placed,
    place,
)
from anabranch.batches.kernels.parts import (
    MALFORMED_RESULT,
    NO_ROOM,
)
from anabranch.batches.kernels.scan import (
    BYTES,
    CHECKSUM,
    COLUMNS,
    COUNT,
    DOUBLE_OP,
    DOUBLE_TXN,
    FIRST,
    HIGH,
    KEYLESS,
    KIND,
    LAST,
    LOW,
    MALFORMED,
    NO_TEXT,
    OP,
    PLAIN,
    RESERVED,
    TXN_AND_OP,
    TXN_AT,
    TXN_LENGTH,
    WRITE,
    scan,
)

__all__ = [
    "BASE_TIMESTAMP",
    "BYTES",
    "CHECKSUM",
    "COLUMNS",
    "COPIED",
    "COUNT",
    "DOUBLE_OP",
    "DOUBLE_TXN",
    "FIRST",
    "HIGH",
    "KEYLESS",
    "KIND",
    "LAST",
    "LOW",
    "MALFORMED",
    "MALFORMED_RESULT",
    "MAX_TIMESTAMP",
    "NEXT_DELTA",
    "NO_ROOM",
    "NO_TEXT",
    "OP",
    "PLAIN",
    "RESERVED",
    "SOURCE_AT",
    "STATE_SIZE",
    "TARGET_AT",
    "TXN_AND_OP",
    "TXN_AT",
    "TXN_LENGTH",
    "WRITE",
    "copy",
    "copy_placed",
    "place",
    "scan",
]
