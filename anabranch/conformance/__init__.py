"""The conformance kit plays scenarios with a client in any language, and reports which rules it keeps.

The kit starts the client as a child process and gives it requests, as JSON lines (docs/conformance.md). The client
works on a real broker. Its commands pass through the kit (`anabranch.conformance.wire`), which can lose, delay and
forge answers, and which sees whether commands follow the protocol.
"""
