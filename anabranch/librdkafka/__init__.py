"""Everything that uses confluent-kafka (librdkafka): commands, journals of single events, groups, access rights.

Only this folder imports `confluent_kafka`. The data path of controllers and readers has a client of its own,
`anabranch.kafka`, which this folder may import.

**Where to start.** `options.Options` turns a user's options into the configs of all handles. `command_bus` sends a
command and waits for its answer: the whole life of a handle can be read there.

- `options`: options of users, defaults of ours, tokens, and librdkafka's log lines.
- `configuration`: what the environment and the configuration file say about the cluster, for clients, commands and
  Spark.
- `handles`: making a producer or consumer, noticing that it has lost all brokers, freeing it, also after a fork.
- `reconnecting_consumer`: a consumer that gets a new handle when the old one has lost all brokers.
- `command_bus`: commands and their answers, as `anabranch.client.ports.CommandBus`.
- `journal_writer`: journals, as `anabranch.client.ports.Journals`. Single events go through librdkafka, and columns
  through `column_journal`, which uses a producer of `anabranch.kafka`, and is loaded late as it needs numpy.
- `groups`: the controllers' group, a reader's member of a group, and all groups for operators.
- `admin`: rights, topics and offsets for clients, by requests that `anabranch.kafka` does not have.

**Rules.** A handle is used by one thread, and never freed in a forked child. Errors are `anabranch.errors`.
"""
