"""The calls of `anabranch.Client` that need more than one command, or more than commands.

- `streams`: streams and scalings. `admin`: lanes, grants, and what operators ask. `compact`: compaction of tables.
- `reading`: readers, snapshots and lags. `processors`: processors and their tasks.
"""
