"""The Kafka client of the data path, over raw connections: whole record batches in and out, native transactions.

librdkafka can't be used here: it gives no raw batches, and no control over a producer's requests under way.
`anabranch.librdkafka` uses it for commands, consumer groups and access rights.

**Where to start.** `log.KafkaLog` is `anabranch.ports.Log` on brokers: each of its methods is one call here. Follow
`fetch` to see how a call finds its broker, repeats, and gives up. Then read `produce` and `transactional_producer`.

Files, from the wire up. Each may import the files above it:

- `calls`: the calls of the protocol and their versions; requests and answers by kio's generated messages, and the
  errors of one call (`ConnectionBroken`, `MalformedAnswer`, `AuthenticationFailed`). `data`: the calls whose cost
  matters (Produce, Fetch, EndTxn), packed and unpacked by hand. `codes`: what a broker's error code means: repeat,
  ask for the leader again, refuse, doubt.
- `sasl`, `oauth_tokens`, `settings`: how a client proves who it is; options by librdkafka's names.
- `connection`: one socket with requests in flight, and the pool of idle connections.
- `health`: which brokers failed, are skipped, or may be former leaders. Decisions by a clock, without I/O.
- `cluster`: metadata (brokers, leaders, topic ids), and `repeat`, which repeats a call until its deadline.
- `admin`: topics and offsets. `fetch`: reading.
- `produce`: links to brokers, shared by three producers: `transactional_producer` with its `coordinator` and its
  search for `lost_markers`; `idempotent_producer` for journals; `sender` for answers that may get lost.
- `log`: all these parts as one port.
- `needs`: the calls that a cluster must offer, and which brokers offer them. `probe`: a trial of everything that a
  cluster must give, and what a controller asks for before it starts (decision 0039).

**Rules.** Deadlines are monotonic times, made once for each call of a port and passed down. A call that changes
something is never repeated by `Cluster.repeat` unless it is safe to repeat. Errors that leave this folder are those
of `anabranch.ports`; `repeat` turns a last `ConnectionBroken` into such an error. These parts of anabranch may be
imported here: `ports`, `errors`, `backoff`, `clock`, `core`, `batches` and `topics`.
"""

import sys

# kio imports hypothesis if it is installed, to register its types there: that takes a third of a process's start.
if "hypothesis" not in sys.modules:
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        import kio.static.primitive  # noqa: F401
    finally:
        del sys.modules["hypothesis"]
