"""Compiled walks over record batches; the only importer of numba."""
