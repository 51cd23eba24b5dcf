"""Record batches of Kafka's format v2: read, written, copied and split, without a broker.

The bytes of one batch:

- `format`: the header, the CRC, and patching a batch for another producer. Start here.
- `compression`: the four codecs, with a limit on what a batch may unpack to.
- `records`: records one by one, in plain Python: decoding, encoding, and the strict `Reader` of a body.
- `framing`: dividing a journal batch into runs of one writer and one kind. `framing_plain` is its walk in plain
  Python, for small batches and as the oracle of tests.
- `columns_read`, `columns_write`: many records as numpy columns, without an object for each. Only they, and the
  modules that import them, need numpy.
- `kernels/`: the compiled code, which the files above load when it is worth it.

Batches for a merge, on a controller:

- `builder`: one new batch, from rows or from records of other batches.
- `one_shots`: the events of one-shots, from their commands' bytes to the streams' batches.
- `packer`: one batch after the other, up to a limit; it also decides which batches are copied whole.
- `split`: the records of plain writes, by segment.
- `splice`: all that a round merges into one partition, in commit order.
- `journal_refetch`: the journal batches that a merge needs, fetched again.

Nothing here knows brokers, clients or controllers, except by `anabranch.ports`.
"""
