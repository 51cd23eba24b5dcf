"""The records on the wire: Avro schemas (`*.avsc`), and the code that reads and writes records by them.

- ``records``: a named tuple for each schema, made by ``making`` when it is imported. ``records.pyi`` describes them
  to type checkers; `python -m tests.schemas.records_stub` writes it.
- ``codec``: `encode` and `decode`, start here. Each record begins with its format version and its type.
- ``fast``: the same for the most frequent records, without fastavro.
- ``forms``: the same for the other records; their functions are made from their schemas.

The page docs/protocol.md has the meaning of each record. Everything may import this folder; it imports only
``errors`` of the rest of anabranch.
"""
