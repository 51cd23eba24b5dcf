"""The pure core: no I/O, no clock, no randomness, no threads.

`states`, `stream_states` legal transitions · `rows` keys of the status table · `state` the fold of the status log ·
`turn` and `decide_*` commands to records and replies · `journal_index` runs of each writer ·
`round` what a pass decided, and how it is merged · `ids`, `keyspace`, `hybrid_time`, `tokens` the small parts.
"""
