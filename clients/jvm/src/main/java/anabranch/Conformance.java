package anabranch;

import anabranch.Client.Event;
import anabranch.Client.Header;
import anabranch.Client.Outcome;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** The client as a child of the conformance kit (docs/conformance.md). */
final class Conformance {
    private static final ObjectMapper JSON = new ObjectMapper();
    private final Map<String, Transaction> handles = new ConcurrentHashMap<>();
    private final AtomicLong numbers = new AtomicLong();
    private final PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    private volatile Client client;
    private volatile String bootstrap;

    public static void main(String[] arguments) throws IOException {
        var child = new Conformance();
        ExecutorService threads = Executors.newCachedThreadPool();
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode request = JSON.readTree(line);
            threads.execute(() -> child.answer(request));
        }
        System.exit(0);
    }

    private void answer(JsonNode request) {
        ObjectNode answer = JSON.createObjectNode().put("id", request.get("id").asLong());
        try {
            answer.set("ok", carryOut(request));
        } catch (Failure failure) {
            answer.put("error", failure.name).put("message", failure.getMessage());
        } catch (RuntimeException | IOException | InterruptedException error) {
            answer.put("error", "Failed").put("message", error.toString());
        }
        synchronized (out) {
            out.println(answer);
            out.flush();
        }
    }

    private JsonNode carryOut(JsonNode r) throws IOException, InterruptedException {
        ObjectNode none = JSON.createObjectNode();
        Transaction txn = r.hasNonNull("txn") ? handles.get(r.get("txn").asText()) : null;
        switch (r.get("op").asText()) {
            case "hello":
                return none.put("client", "anabranch-jvm (kafka-clients)");
            case "connect":
                connect(r);
                return none;
            case "begin":
                var keepalive = Duration.ofMillis(r.get("keepalive_ms").asLong());
                var begun = client.begin(r.get("scope").asText(), text(r.get("name")), keepalive);
                return begun.outcome() != null ? outcome(begun.outcome())
                        : none.put("txn", keep(begun.transaction())).put("token", begun.transaction().token());
            case "join":
                return none.put("txn", keep(client.join(r.get("token").binaryValue())));
            case "write":
                txn.write(events(r));
                return none;
            case "receipt":
                return none.put("receipt", txn.receiptOf(r.get("finished").asBoolean()));
            case "commit":
                List<byte[]> receipts = r.hasNonNull("receipts") ? new ArrayList<>() : null;
                if (receipts != null) {
                    for (JsonNode one : r.get("receipts")) {
                        receipts.add(one.binaryValue());
                    }
                }
                Long number = r.hasNonNull("number") ? r.get("number").asLong() : null;
                return outcome(txn.commit(receipts, text(r.get("name")), number));
            case "prepare":
                return outcome(txn.prepare(r.get("secret").binaryValue(), r.get("attempt").binaryValue()));
            case "decide":
                byte[] id = r.get("txn_id").binaryValue(), secret = r.get("secret").binaryValue();
                return outcome(client.decide(id, secret, r.get("commit").asBoolean()));
            case "read":
                return read(r.get("stream").asText());
            case "abort":
                txn.abort();
                return none;
            case "resolve":
                return outcome(client.resolve(r.get("token").binaryValue()));
            case "one_shot":
                return outcome(client.oneShot(r.get("scope").asText(), text(r.get("name")), events(r)));
            case "plain":
                client.writePlain(events(r));
                return none;
            case "load":
                return load(r);
            default:
                throw new Failure("NotOffered", r.get("op").asText());
        }
    }

    private void connect(JsonNode r) {
        if (client != null) {
            client.close();
        }
        handles.clear();
        bootstrap = r.get("bootstrap").asText();
        client = new Client(bootstrap, r.get("prefix").asText(),
                Duration.ofMillis(r.get("timeout_ms").asLong()));
    }

    private String keep(Transaction transaction) {
        String name = "" + numbers.incrementAndGet();
        handles.put(name, transaction);
        return name;
    }

    private static String text(JsonNode node) {
        return node.isNull() ? null : node.asText();
    }

    private static byte[] bytes(JsonNode node) throws IOException {
        return node.isNull() ? null : node.binaryValue();
    }

    private static List<Event> events(JsonNode r) throws IOException {
        List<Event> events = new ArrayList<>();
        for (JsonNode e : r.get("events")) {
            List<Header> headers = new ArrayList<>();
            for (JsonNode pair : e.get("headers")) {
                headers.add(new Header(pair.get(0).asText(), bytes(pair.get(1))));
            }
            Long time = e.hasNonNull("timestamp") ? e.get("timestamp").asLong() : null;
            events.add(new Event(e.get("stream").asText(), bytes(e.get("key")), bytes(e.get("value")), headers, time));
        }
        return events;
    }

    private static ObjectNode outcome(Outcome o) {
        ObjectNode made = JSON.createObjectNode().put("txn_id", o.txnId()).put("state", o.state())
                .put("commit_timestamp", o.commitTimestamp()).put("committed", o.committed())
                .put("rejected", o.rejected()).put("left_out", o.leftOut());
        return JSON.createObjectNode().set("outcome", made);
    }

    /** A stream as any consumer reads it, with read_committed, up to its end (section 13). */
    private JsonNode read(String stream) {
        ArrayNode events = JSON.createArrayNode();
        Map<String, Object> options = Map.of("bootstrap.servers", bootstrap, "isolation.level", "read_committed");
        var bytes = new ByteArrayDeserializer();
        try (var consumer = new KafkaConsumer<>(options, bytes, bytes)) {
            List<TopicPartition> places = consumer.partitionsFor(stream.replace('/', '.')).stream()
                    .map(info -> new TopicPartition(info.topic(), info.partition())).toList();
            consumer.assign(places);
            consumer.seekToBeginning(places);
            var ends = consumer.endOffsets(places);
            while (places.stream().anyMatch(place -> consumer.position(place) < ends.get(place))) {
                consumer.poll(Duration.ofMillis(100)).forEach(record -> events.add(event(record)));
            }
        }
        return JSON.createObjectNode().set("events", events);
    }

    private static ObjectNode event(ConsumerRecord<byte[], byte[]> record) {
        ArrayNode headers = JSON.createArrayNode();
        for (var header : record.headers()) {
            if (!header.key().startsWith("ab.")) {
                headers.addArray().add(header.key()).add(header.value());
            }
        }
        ObjectNode made = JSON.createObjectNode().put("key", record.key()).put("value", record.value())
                .put("timestamp", record.timestamp()).putNull("commit_timestamp");
        return made.set("headers", headers);
    }

    /** One-shots, as many at the same time as asked for. */
    private JsonNode load(JsonNode r) throws InterruptedException {
        int inFlight = r.get("in_flight").asInt();
        byte[] value = new byte[r.get("value_bytes").asInt()];
        long began = System.nanoTime();
        long end = began + (long) (r.get("duration_s").asDouble() * 1e9);
        var committed = new AtomicLong();
        ExecutorService threads = Executors.newFixedThreadPool(inFlight);
        for (int n = 0; n < inFlight; n++) {
            int thread = n;
            threads.execute(() -> {
                for (int number = 0; System.nanoTime() < end; number++) {
                    List<Event> events = new ArrayList<>();
                    for (int i = 0; i < r.get("count").asInt(); i++) {
                        byte[] key = (thread + "-" + number + "-" + i).getBytes(StandardCharsets.US_ASCII);
                        events.add(new Event(r.get("stream").asText(), key, value, List.of(), null));
                    }
                    client.oneShot(r.get("scope").asText(), null, events);
                    committed.incrementAndGet();
                }
            });
        }
        threads.shutdown();
        threads.awaitTermination(10, TimeUnit.MINUTES);
        return JSON.createObjectNode().put("committed", committed.get())
                .put("seconds", (System.nanoTime() - began) / 1e9);
    }
}
