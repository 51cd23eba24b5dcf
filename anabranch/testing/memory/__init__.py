"""A cluster in memory: brokers, a real controller and clients, in one thread.

Start with `cluster.MemoryBrokers`. `log.MemoryLog` is the port `anabranch.ports.Log` over the partitions of
`broker.MemoryBroker`, and passes the same tests as the log of Kafka (`tests/contract`). `client` has the ports of
a client. Hooks and troubles are there for the simulator, which plays crashes and faults on the same code.
"""
