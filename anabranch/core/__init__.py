"""The pure core: no I/O, no clock, no randomness, no threads.

- `transaction_states`, `stream_states`: the legal transitions.
- `rows`: the keys of the status table. `state`: the fold of the status log.
- `decisions`: from commands to rows and replies. `round`: all that one pass of the controller decided.
- `journal`: the index of what writers wrote to journals.
- `ids`, `legal_names`, `segments`, `partitioner`, `hybrid_time`, `tokens`: small parts.

The *shell* is the code of the controller around the core (`anabranch.processors`): it does all I/O.
"""
