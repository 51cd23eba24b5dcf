"""Record batches of Kafka's format v2: read, written, cut and put together, without a broker."""
