"""All that uses librdkafka: commands, journal writes of single events, group membership, admin requests."""
