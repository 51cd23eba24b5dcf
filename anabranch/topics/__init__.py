"""Kafka topics: their names, declared settings and rights, and the code that creates, grows and alters them."""
