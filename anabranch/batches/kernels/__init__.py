"""Compiled walks over record batches; the only importer of numba."""

from anabranch.extras import need

need("numpy", "numba")
