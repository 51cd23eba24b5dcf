"""`anabranch bridge`: a plain topic into a stream, exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from anabranch.cli.options import ClusterOptions, argument, option
from anabranch.cli.output import print_line
from anabranch.cli.session import parse_kafka

TASKS = 64


def command(
    options: ClusterOptions,
    topic: Annotated[str, argument("TOPIC", "The topic to read.")],
    stream: Annotated[str, option("SCOPE/STREAM", "The stream to write; create it before.")],
    source: Annotated[
        str | None, option("--from HOST:PORT", "The topic's cluster (default: the stream's).")
    ] = None,
    from_file: Annotated[
        Path | None, option("FILE", "librdkafka options of that cluster, as of --kafka-file.")
    ] = None,
    group: Annotated[
        str | None,
        option("GROUP", "Begin where this consumer group of Kafka's stands (once, at first)."),
    ] = None,
    tasks: Annotated[
        int, option("", "Most partitions of the topic, ever: a power of two.", min=1, max=1024)
    ] = TASKS,
    dead_letter: Annotated[
        str | None,
        option(
            "--dead-letter SCOPE/STREAM",
            "Where to copy records that the stream does not accept, such as too large ones; else it ends at one.",
        ),
    ] = None,
    once: Annotated[
        bool, option("--once", "End when all is copied that the topic has, by then.")
    ] = False,
    strict: Annotated[
        bool,
        option(
            "--strict/--lossy",
            "If retention removed records before they were copied: end, or go on without them.",
        ),
    ] = True,
) -> None:
    """Copy a plain topic into a stream, each record once, until Ctrl-C or SIGTERM.

    A processor named STREAM-bridge keeps the positions, in the commits of what it copies. Run it on several
    machines: they share the partitions. Keys, values, headers and timestamps stay; records of Kafka's own
    transactions come once they are committed. A header name that begins with "ab." gets a "_" before it, and bytes
    of a name that are not UTF-8 become U+FFFD; a timestamp before 1970 or after 9999 becomes the time of the copy.
    """
    from contextlib import closing

    import pyarrow as pa

    from anabranch.processing.app import Processor
    from anabranch.processing.plain import Cluster, import_group, outputs_of, plain_ports
    from anabranch.processing.worker import make_processor, run_worker
    from anabranch.reading.tasks.lag import input_lags
    from anabranch.schemas.records import ProcessorInfo

    app = Processor(
        f"{stream}-bridge",
        tasks=tasks,
        dead_letter=dead_letter,
        on_lost="stop" if strict else "skip",
    )
    config = parse_kafka(None, file=from_file)
    records, output = app.topic(topic, bootstrap=source, config=config), app.output(stream)

    @app.on(records, batch=True)
    def copy(batch: pa.RecordBatch) -> None:
        output.write_batch(outputs_of(batch))

    def copied(info: ProcessorInfo) -> bool:
        with closing(ports.committed_log(options.timeout)) as log:
            lags = input_lags(log, info, options.timeout)
        return not any(lag.trouble or lag.most.events for lag in lags)

    with options.client() as client:
        client.describe(stream)
        made = make_processor(client, app)
        ports = plain_ports(client, Cluster(source, config))
        if group is not None and not any(
            task.sequence for task in client.processor(app.name).tasks
        ):
            count = import_group(client, ports, app.name, group, options.timeout)
            print_line(f"{count} partitions go on where group {group} stands")
        if not options.json:
            print_line(f"{topic} to {stream}, by processor {made.processor}; Ctrl-C ends it")
        run_worker(app, client, until=copied if once else None)
