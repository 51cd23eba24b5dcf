"""What goes through librdkafka: commands, single events, group membership."""
