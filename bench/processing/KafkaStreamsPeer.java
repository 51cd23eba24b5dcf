import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.time.Duration;
import java.time.Instant;
import java.util.Map;
import java.util.Properties;
import java.util.Random;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.JoinWindows;
import org.apache.kafka.streams.kstream.Joined;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.SessionWindows;
import org.apache.kafka.streams.kstream.StreamJoined;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.processor.StateRestoreListener;
import org.apache.kafka.streams.processor.api.ContextualProcessor;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.SessionStore;
import org.apache.kafka.streams.state.Stores;
import org.apache.kafka.streams.state.VersionedKeyValueStore;
import org.apache.kafka.streams.state.WindowStore;

/** The jobs of bench/processing with Kafka Streams: arguments source, target and work, then settings a=b. */
public class KafkaStreamsPeer {
    static final ObjectMapper JSON = new ObjectMapper();

    /** Parse, change n, write. A count below zero stands for n + 1. */
    static byte[] changed(byte[] value, long count) {
        try {
            ObjectNode node = (ObjectNode) JSON.readTree(value);
            node.put("n", count < 0 ? node.get("n").asLong() + 1 : count);
            return JSON.writeValueAsBytes(node);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    /** Two objects as one; fields of the first count. */
    static byte[] merged(byte[] one, byte[] two) {
        try {
            ObjectNode node = (ObjectNode) JSON.readTree(two);
            node.setAll((ObjectNode) JSON.readTree(one));
            return JSON.writeValueAsBytes(node);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    static class Count extends ContextualProcessor<byte[], byte[], byte[], byte[]> {
        public void process(Record<byte[], byte[]> record) {
            KeyValueStore<byte[], Long> store = context().getStateStore("counts");
            Long before = store.get(record.key());
            long count = before == null ? 1 : before + 1;
            store.put(record.key(), count);
            context().forward(record.withValue(changed(record.value(), count)));
        }
    }

    /** A versioned store of what comes. A key "read" asks for so many random reads as of now. */
    static class Rows extends ContextualProcessor<byte[], byte[], byte[], byte[]> {
        public void process(Record<byte[], byte[]> record) {
            VersionedKeyValueStore<byte[], byte[]> store = context().getStateStore("rows");
            long number = Long.parseLong(new String(record.value()));
            if (new String(record.key()).equals("read")) {
                Random random = new Random(1);
                long began = System.nanoTime();
                for (long i = 0; i < number; i++) {
                    store.get(String.format("%016d", random.nextInt(100_000)).getBytes(), System.currentTimeMillis());
                }
                say("read", "us", (System.nanoTime() - began) / 1000.0 / number);
                return;
            }
            store.put(record.key(), record.value(), record.timestamp());
            Instant now = Instant.now();
            say("stored", "n", number, "us", now.getEpochSecond() * 1_000_000 + now.getNano() / 1000);
        }
    }

    static synchronized void say(String what, Object... fields) {
        StringBuilder line = new StringBuilder("{\"said\":\"" + what + "\",\"at\":" + System.currentTimeMillis());
        for (int i = 0; i < fields.length; i += 2) {
            line.append(",\"").append(fields[i]).append("\":").append(fields[i + 1]);
        }
        System.out.println(line.append("}"));
    }

    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        for (int i = 3; i < arguments.length; i++) {
            String[] pair = arguments[i].split("=", 2);
            settings.put(pair[0], pair[1]);
        }
        var bytes = Serdes.ByteArray();
        StreamsBuilder builder = new StreamsBuilder();
        KStream<byte[], byte[]> events = builder.stream(arguments[0], Consumed.with(bytes, bytes));
        KStream<byte[], byte[]> outputs;
        if (arguments[2].equals("map")) {
            outputs = events.mapValues(value -> changed(value, -1));
        } else if (arguments[2].equals("window")) {
            var counts = events.groupByKey(Grouped.with(bytes, bytes))
                    .windowedBy(TimeWindows.ofSizeWithNoGrace(Duration.ofDays(1)))
                    .count(Materialized.<byte[], Long, WindowStore<Bytes, byte[]>>with(bytes, Serdes.Long())
                            .withCachingDisabled());
            outputs = counts.toStream((window, count) -> window.key())
                    .mapValues(count -> ("{\"n\":" + count + "}").getBytes());
        } else if (arguments[2].equals("session")) {
            var counts = events.groupByKey(Grouped.with(bytes, bytes))
                    .windowedBy(SessionWindows.ofInactivityGapWithNoGrace(Duration.ofHours(1)))
                    .count(Materialized.<byte[], Long, SessionStore<Bytes, byte[]>>with(bytes, Serdes.Long())
                            .withCachingDisabled());
            // A session that grows is a deletion and a new one.
            outputs = counts.toStream((window, count) -> window.key()).filter((key, count) -> count != null)
                    .mapValues(count -> ("{\"n\":" + count + "}").getBytes());
        } else if (arguments[2].equals("table")) {
            var rows = builder.table(settings.getProperty("bench.other"), Consumed.with(bytes, bytes));
            outputs = events.join(rows, KafkaStreamsPeer::merged, Joined.with(bytes, bytes, bytes));
        } else if (arguments[2].equals("join")) {
            var others = builder.stream(settings.getProperty("bench.other"), Consumed.with(bytes, bytes));
            outputs = events.join(others, KafkaStreamsPeer::merged,
                    JoinWindows.ofTimeDifferenceWithNoGrace(Duration.ofHours(1)),
                    StreamJoined.with(bytes, bytes, bytes));
        } else if (arguments[2].equals("rows")) {
            builder.addStateStore(Stores.versionedKeyValueStoreBuilder(
                    Stores.persistentVersionedKeyValueStore("rows", Duration.ofHours(1)), bytes, bytes)
                    .withLoggingEnabled(Map.of()));
            outputs = events.process(Rows::new, "rows");
        } else {
            // Without a cache, as by default; with one it came out slower.
            builder.addStateStore(Stores.keyValueStoreBuilder(
                    Stores.persistentKeyValueStore("counts"), bytes, Serdes.Long()).withLoggingEnabled(Map.of()));
            outputs = events.process(Count::new, "counts");
        }
        if (!arguments[1].isEmpty()) {
            outputs.to(arguments[1], Produced.with(bytes, bytes));
        }
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        streams.setGlobalStateRestoreListener(new StateRestoreListener() {
            public void onRestoreStart(TopicPartition place, String store, long first, long end) {
                say("restoring", "partition", place.partition());
            }

            public void onBatchRestored(TopicPartition place, String store, long end, long rows) {}

            public void onRestoreEnd(TopicPartition place, String store, long rows) {
                say("restored", "partition", place.partition(), "rows", rows);
            }
        });
        Runtime.getRuntime().addShutdownHook(new Thread(() -> streams.close(Duration.ofSeconds(20))));
        streams.start();
        while (true) {
            Thread.sleep(200);
            // Copies of a partition's store here, working or standing by, and the rows that they lack.
            long stores = 0, lag = 0;
            if (streams.state() == KafkaStreams.State.RUNNING) {
                for (var each : streams.allLocalStorePartitionLags().values()) {
                    for (var one : each.values()) {
                        stores += 1;
                        lag += one.offsetLag();
                    }
                }
            }
            say(streams.state().toString(), "stores", stores, "lag", lag);
        }
    }
}
