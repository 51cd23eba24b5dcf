"""The in-memory twin of brokers and RocksDB, for simulation and unit tests."""
