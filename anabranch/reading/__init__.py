"""Readers: ordered, of whole transactions, of snapshots and ranges."""
