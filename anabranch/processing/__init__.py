"""Processors as programs: handlers, stores and timers, whose effects are in one commit (`docs/processing.md`)."""

from anabranch.extras import need

need("rocksdict", "mode", "prometheus_client", "numpy", "numba", extra="controller")
