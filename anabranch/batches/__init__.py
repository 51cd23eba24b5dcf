"""Record batches of Kafka's format v2: read, written, split and merged, without a broker."""
