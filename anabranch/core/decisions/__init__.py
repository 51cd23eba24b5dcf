"""Decisions: what a command, a commit or a due deadline puts on the log."""
