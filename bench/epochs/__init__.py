"""Benches of stream epochs: rolling commits, scalings, reading in order, big merges beside small ones."""
