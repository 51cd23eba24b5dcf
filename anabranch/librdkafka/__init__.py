"""The parts on librdkafka: commands, single events, group membership."""
