"""The pure core: no I/O, no clock, no randomness, no threads.

`transaction_states`, `stream_states` legal transitions · `rows` keys of the status table · `state` the fold of the
status log · `decisions` commands to records and replies · `journal` runs of each writer · `round` what a pass
decided, and how it is merged · `ids`, `legal_names`, `segments`, `partitioner`, `hybrid_time`, `tokens` the
small parts.
"""
