"""Processors as programs: handlers, stores and timers, whose effects are one commit (``docs/processing.md``)."""
