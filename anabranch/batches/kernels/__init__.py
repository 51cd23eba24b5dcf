"""Compiled walks over the bytes of batches and of history records; the only importer of numba.

- `parts`: numbers, CRCs and key positions, for all others; and the cache of compiled code.
- `scan`: the runs of a journal batch. `copy`: records into another batch, by offsets or by keys.
- `columns_read`, `columns_write`: records into columns, and columns into records.
- `history`: the commits of one partition, from records of a stream's history.

Each walk is loaded by one module of `anabranch.batches` or `anabranch.reading`, which prepares and checks its
arrays; no other module imports it, as numba takes a second to load. The oracle of each, in plain Python, is named
at its top. The audit has a walk of its own (`anabranch.audit.kernel`), which shares nothing with these except the
cache.
"""

from anabranch.extras import need

need("numpy", "numba")
