"""Raw access to brokers: a log, and producers of whole batches, over Kafka's protocol."""
