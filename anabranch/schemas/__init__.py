"""The wire protocol: one Avro schema a record, the records as dataclasses, and their codec."""
