"""The wire protocol: one Avro schema a record, the records as classes made of them, and their codec."""
