"""The wire protocol: an Avro schema for each record, classes made from the schemas, and their codec."""
