"""Names, ids, keys, times, tokens, limits and records, as they are on the wire. No I/O, and no decisions.

A client in another language has to do the same as these modules, byte for byte; `docs/protocol.md` describes it,
and `docs/protocol-examples.json` has examples with their bytes.

=================  ===================================================================================
`ids`              ids of transactions, of writers and of commands, and the headers that carry them
`legal_names`      which names of scopes, streams, lanes and groups are allowed
`partitioner`      the position of a key, and the control partition of a scope
`hybrid_time`      64 bits of time: microseconds and a counter
`tokens`           the secret of a transaction, and the tokens that are derived from it
`limits`           the most that a command, an event, a name or a list may have
`defaults`         values that callers may change: keepalives, intervals, pauses, time-outs
`schemas`          the records: `*.avsc`, classes made of them, and the codec
=================  ===================================================================================

All layers above import this folder; this folder imports `anabranch.errors` alone. Start with `ids`, then read
`protocol/schemas/Begin.avsc` and its neighbours.
"""
