"""Locks on what transactions read of tables, and their conflicts with the writes of others."""
