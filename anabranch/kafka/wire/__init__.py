"""The Kafka protocol as far as the log needs it: connections, messages, what error codes mean."""
