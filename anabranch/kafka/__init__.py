"""The raw way to brokers: a log and producers of whole batches over Kafka's protocol."""
