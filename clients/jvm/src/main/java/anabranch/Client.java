package anabranch;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.Function;
import java.util.function.Predicate;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;
import org.apache.avro.generic.GenericRecord;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** A client of one cluster. Any thread may use it. Comments name the rules of docs/protocol.md, for example R3.3. */
public final class Client implements AutoCloseable {
    /** A header; a null value is null in the record. */
    public record Header(String name, byte[] value) {}

    /** An event of a stream "scope/name". Null key and value are null; a null timestamp is the present time. */
    public record Event(String stream, byte[] key, byte[] value, List<Header> headers, Long timestamp) {}

    /** How a transaction stands. */
    public record Outcome(
            byte[] txnId, String state, long commitTimestamp, long committed, long rejected, long leftOut) {
        static Outcome of(GenericRecord o) {
            return new Outcome(Frame.bytes(o.get("txn_id")), o.get("state").toString(), (Long) o.get("commit_timestamp"),
                    (Long) o.get("committed"), (Long) o.get("rejected"), (Long) o.get("left_out"));
        }
    }

    /** What begin found: a transaction, or the outcome of the one that committed under the name before. */
    public record Begun(Transaction transaction, Outcome outcome) {}

    final Bus bus;
    private final KafkaProducer<byte[], byte[]> journal;
    private final long timeoutMs;
    private final Map<String, Integer> scopes = new ConcurrentHashMap<>(); // control partitions never change
    final Set<Transaction> open = ConcurrentHashMap.newKeySet();
    private volatile boolean closed;

    /** ``timeout``: of each call. */
    public Client(String bootstrap, String prefix, Duration timeout) {
        timeoutMs = timeout.toMillis();
        bus = new Bus(bootstrap, prefix, timeout);
        var options = new HashMap<>(Bus.options(bootstrap, 2));
        options.put("request.timeout.ms", (int) Math.max(timeoutMs / 2, 1000));
        options.put("delivery.timeout.ms", (int) Math.max(timeoutMs, 1500));
        options.put("max.block.ms", timeoutMs);
        options.put("metadata.max.age.ms", 500); // new partitions of a scaled stream are known soon
        journal = new KafkaProducer<>(options, new ByteArraySerializer(), new ByteArraySerializer());
        var heart = new Thread(this::beat, "anabranch-heartbeats");
        heart.setDaemon(true);
        heart.start();
    }

    /** Open transactions are aborted when their keepalive ends. */
    @Override
    public void close() {
        closed = true;
        bus.close();
        journal.close(Duration.ofSeconds(5));
    }

    long until() {
        return System.nanoTime() / 1_000_000 + timeoutMs;
    }

    /** For commands whose repetition is harmless whatever happened. */
    GenericRecord ask(long until, int to, GenericRecord command, Predicate<GenericRecord> belongs) {
        Bus.Answer answer = bus.ask(until, to, command, belongs);
        if (answer.refusal() != null) {
            throw answer.refusal();
        }
        if (answer.result() == null) {
            throw new Failure("DeadlineExceeded", "no answer in time: call again");
        }
        return answer.result();
    }

    static Predicate<GenericRecord> is(String kind) {
        return result -> Bus.kind(result).equals(kind);
    }

    /** Only the outcome of this transaction belongs to a command (R3.6), unless it claims a name or number. */
    static Predicate<GenericRecord> about(byte[] txnId, boolean claims) {
        return result -> Bus.kind(result).equals("Outcome")
                && (claims || Arrays.equals(Frame.bytes(result.get("txn_id")), txnId));
    }

    private int findScope(long until, String scope) {
        Integer known = scopes.get(scope);
        if (known == null) { // R4.1
            var command = Frame.record("FindScope", "scope", scope, "create", false);
            known = (Integer) ask(until, 0, command, is("ScopeInfo")).get("control_partition");
            scopes.put(scope, known);
        }
        return known;
    }

    /** Control partition, Unix milliseconds, 8 random bytes (R5.1). */
    private static byte[] newId(int partition) {
        return ByteBuffer.allocate(16).putLong((long) partition << 48 | System.currentTimeMillis())
                .put(Bus.random(8)).array();
    }

    static int partitionOf(byte[] txnId) {
        return ByteBuffer.wrap(txnId).getShort() & 0xffff;
    }

    /** Begin a transaction. If the name is committed already, its outcome is the answer (R5.5). */
    public Begun begin(String scope, String name, Duration keepalive) {
        long until = until();
        int partition = findScope(until, scope);
        byte[] txnId = newId(partition);
        byte[] secret = Bus.random(32); // R5.2
        var command = Frame.record("Begin", "txn_id", Frame.fixed("TxnId", txnId), "scope", scope, "name", name,
                "keepalive_ms", (int) keepalive.toMillis(), "secret", Frame.fixed("Secret", secret), "snapshot", 0L);
        var result = ask(until, partition, command, is("Begun").or(about(txnId, name != null)));
        if (Bus.kind(result).equals("Outcome")) {
            return new Begun(null, Outcome.of(result));
        }
        var transaction = new Transaction(this, txnId, makeToken(txnId, secret, scope, result), scope, keepalive);
        open.add(transaction);
        return new Begun(transaction, null);
    }

    /** All rights, no end, no caveats (R5.3). */
    private byte[] makeToken(byte[] txnId, byte[] secret, String scope, GenericRecord begun) {
        byte[] scopeBytes = scope.getBytes(StandardCharsets.US_ASCII);
        byte[] lane = "open".getBytes(StandardCharsets.US_ASCII);
        var token = ByteBuffer.allocate(200).put((byte) 2).put(txnId).putInt((Integer) begun.get("keepalive_ms"))
                .putLong((Long) begun.get("begun_ms")).putLong(bus.seen())
                .put((byte) scopeBytes.length).put(scopeBytes).put((byte) lane.length).put(lane)
                .put((byte) 31).putLong(0);
        try {
            Mac mac = Mac.getInstance("HmacSHA256");
            mac.init(new SecretKeySpec(secret, "HmacSHA256"));
            mac.update(token.array(), 0, token.position());
            token.put((byte) 0).put(mac.doFinal());
        } catch (GeneralSecurityException error) {
            throw new IllegalStateException(error);
        }
        return Arrays.copyOf(token.array(), token.position());
    }

    /** Join a transaction of another process as one more writer. The token is used as it is (R5.4). */
    public Transaction join(byte[] token) {
        if (token.length < 38 || token[0] != 2 || token.length < 38 + token[37]) {
            throw new Failure("InvalidToken", "not a token of version 2");
        }
        bus.learn(ByteBuffer.wrap(token).getLong(29)); // R12.3
        String scope = new String(token, 38, token[37], StandardCharsets.US_ASCII);
        return new Transaction(this, Arrays.copyOfRange(token, 1, 17), token, scope, null);
    }

    /** Heartbeats every third of the shortest keepalive, one to each control partition (R5.6). */
    private void beat() {
        long last = 0;
        List<ByteBuffer> posted = new ArrayList<>();
        while (!closed) {
            Bus.sleep(Long.MAX_VALUE, 50);
            long pause = open.stream().mapToLong(t -> t.keepalive.toMillis() / 3).min().orElse(Long.MAX_VALUE);
            long now = System.nanoTime() / 1_000_000;
            if (pause == Long.MAX_VALUE || now - last < pause - 50) {
                continue;
            }
            last = now;
            Map<Integer, List<ByteBuffer>> tokens = new HashMap<>();
            open.forEach(t -> tokens.computeIfAbsent(partitionOf(t.id), n -> new ArrayList<>()).add(ByteBuffer.wrap(t.token)));
            posted.forEach(bus::forget); // an answer may come until the next heartbeat
            posted.clear();
            tokens.forEach((to, some) -> posted.add(bus.post(to, Frame.record("Heartbeat", "tokens", some), this::ended)));
        }
    }

    /** The answer to a heartbeat: transactions that are over (R5.7). */
    private boolean ended(GenericRecord result) {
        if (!Bus.kind(result).equals("Ended")) {
            return false;
        }
        for (Object one : (Collection<?>) result.get("not_open")) {
            Outcome outcome = Outcome.of((GenericRecord) one);
            open.removeIf(t -> Arrays.equals(t.id, outcome.txnId()) && outcome.state().equals("ABORTED"));
        }
        return true;
    }

    /** Commit events as a transaction of one command. */
    public Outcome oneShot(String scope, String name, List<Event> events) {
        checkHeaders(events);
        int partition = findScope(until(), scope);
        byte[] txnId = newId(partition);
        List<GenericRecord> made = new ArrayList<>();
        for (Event event : events) {
            List<GenericRecord> headers = new ArrayList<>();
            event.headers.forEach(h -> headers.add(
                    Frame.record("EventHeader", "key", h.name, "value", Frame.buffer(h.value))));
            made.add(Frame.record("Event", "stream", event.stream, "segment_id", -1L, "key", Frame.buffer(event.key),
                    "value", Frame.buffer(event.value), "headers", headers,
                    "timestamp", event.timestamp == null ? -1L : event.timestamp));
        }
        var command = Frame.record("OneShot", "txn_id", Frame.fixed("TxnId", txnId), "scope", scope, "name", name,
                "events", made, "locks", List.of());
        return untilKnown(txnId, scope, null, name != null, wait -> command);
    }

    private static GenericRecord resolveCommand(byte[] txnId, String scope, byte[] token) {
        return Frame.record("Resolve", "txn_id", Frame.fixed("TxnId", txnId), "scope", scope,
                "token", Frame.buffer(token));
    }

    /**
     * Send a command that commits until its outcome is known, always with the same transaction id (R11.4).
     * ``token``: null for a one-shot. ``claims``: a name or number. ``make``: the command with a wait_ms.
     */
    Outcome untilKnown(byte[] txnId, String scope, byte[] token, boolean claims, Function<Integer, GenericRecord> make) {
        long until = until();
        int to = partitionOf(txnId);
        for (long pause = 20;; pause = Math.min(2 * pause, 1000)) {
            // A third of the time is left for Resolve, and the controller waits for less than this call (R10.2).
            long askMs = Bus.left(until) * 2 / 3;
            var command = make.apply((int) Math.min(Math.max(askMs * 3 / 4, 0), 600_000));
            var answer = bus.ask(until - Bus.left(until) + askMs, to, command, about(txnId, claims));
            Failure refusal = answer.refusal();
            if (refusal != null && (!answer.inDoubt() || refusal.isFinal())) {
                throw refusal;
            }
            if (answer.result() == null) { // R11.2; R11.3: an earlier copy may be carried out
                answer = bus.ask(until, to, resolveCommand(txnId, scope, token), about(txnId, false));
            }
            Outcome outcome = answer.result() == null ? null : Outcome.of(answer.result());
            String state = outcome == null ? "" : outcome.state();
            boolean prepares = token != null && command.get("prepare") != null;
            if (state.equals("COMMITTED") || prepares && state.equals("PREPARED")) {
                return outcome;
            }
            if (refusal != null && (state.equals("OPEN") || state.equals("ABORTED"))) {
                throw refusal;
            }
            if (state.equals("ABORTED")) {
                throw new Failure("TransactionAborted", "the transaction is aborted");
            }
            if (!Bus.sleep(until, pause)) { // R11.5
                throw new Failure("OutcomeUnknown", "the outcome is not known: resolve it later");
            }
        }
    }

    static GenericRecord abortCommand(byte[] token, byte[] secret) {
        return Frame.record("Abort", "token", Frame.buffer(token), "reason", "aborted by the client",
                "secret", Frame.buffer(secret));
    }

    /** Commit or abort a prepared transaction by its id and its coordinator's secret, from any client (R10.8). */
    public Outcome decide(byte[] txnId, byte[] secret, boolean commit) {
        long until = until();
        int waitMs = (int) Math.min(Bus.left(until) * 3 / 4, 600_000);
        var command = !commit ? abortCommand(txnId, secret)
                : Frame.record("Commit", "token", Frame.buffer(txnId), "own", List.of(), "wait_ms", waitMs,
                        "secret", Frame.buffer(secret), "validated", List.of());
        Bus.Answer answer = bus.ask(until, partitionOf(txnId), command, about(txnId, false));
        if (answer.refusal() != null) {
            throw answer.refusal();
        }
        if (answer.result() == null) {
            throw new Failure("OutcomeUnknown", "the decision was not answered: repeat it");
        }
        return Outcome.of(answer.result());
    }

    /** The state of a transaction; one that no controller knows is aborted first (section 11). */
    public Outcome resolve(byte[] token) {
        Transaction t = join(token);
        return Outcome.of(ask(until(), partitionOf(t.id), resolveCommand(t.id, t.scope, token), about(t.id, false)));
    }

    /** Write records that commit by themselves (section 8). Their headers are unchanged (R8.7). */
    public void writePlain(List<Event> events) {
        checkHeaders(events);
        produce(until(), events.stream().map(event -> record(event, 0)).toList()); // any partition will do
    }

    static void checkHeaders(List<Event> events) {
        if (events.stream().anyMatch(e -> e.headers.stream().anyMatch(h -> h.name.startsWith("ab.")))) {
            throw new Failure("InvalidArgument", "headers that begin with ab. are reserved"); // R8.5
        }
    }

    static String journalOf(String stream) {
        return stream.replace('/', '.') + ".journal";
    }

    static ProducerRecord<byte[], byte[]> record(Event event, int partition) {
        var record = new ProducerRecord<>(
                journalOf(event.stream), partition, event.timestamp, event.key, event.value);
        event.headers.forEach(h -> record.headers().add(new RecordHeader(h.name, h.value)));
        return record;
    }

    /** Write records, and wait until all are acknowledged. */
    List<RecordMetadata> produce(long until, List<ProducerRecord<byte[], byte[]>> records) {
        try {
            List<Future<RecordMetadata>> sent = records.stream().map(journal::send).toList();
            List<RecordMetadata> stored = new ArrayList<>();
            for (Future<RecordMetadata> one : sent) {
                stored.add(one.get(Math.max(Bus.left(until), 0), TimeUnit.MILLISECONDS));
            }
            return stored;
        } catch (TimeoutException | ExecutionException | InterruptedException | KafkaException error) {
            throw new Failure("WriteFailed", String.valueOf(error.getMessage()));
        }
    }
}
