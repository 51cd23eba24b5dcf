"""A demonstration on real data, with kills, checked row by row: ``python -m examples.flights``."""
