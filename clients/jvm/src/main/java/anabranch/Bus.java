package anabranch;

import java.nio.ByteBuffer;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.Predicate;
import org.apache.avro.generic.GenericRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.InterruptException;
import org.apache.kafka.common.errors.WakeupException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Section 3: commands by one idempotent producer, replies from one partition. */
final class Bus implements AutoCloseable {
    static final SecureRandom RANDOM = new SecureRandom();
    private static final long FIRST_REPEAT_MS = 2_000;
    private static final long LONGEST_PAUSE_MS = 10_000;

    /** An answer; ``inDoubt``: a copy of the command was sent that is not answered, and may be carried out. */
    record Answer(GenericRecord result, Failure refusal, boolean inDoubt) {}

    private record Waiting(byte[] digest, Predicate<GenericRecord> belongs, CompletableFuture<GenericRecord> answer) {}

    private final KafkaProducer<byte[], byte[]> producer;
    private final KafkaConsumer<byte[], byte[]> consumer;
    private final String commands;
    private final byte[] partition; // of replies, for ab.reply
    private final Map<ByteBuffer, Waiting> waiting = new ConcurrentHashMap<>();
    private final AtomicLong seen = new AtomicLong(); // the highest hybrid time received (section 12)
    private final Thread receiver;

    Bus(String bootstrap, String prefix, Duration timeout) {
        commands = prefix + ".commands";
        String replies = prefix + ".replies";
        consumer = new KafkaConsumer<>(
                Map.of("bootstrap.servers", bootstrap, "enable.auto.commit", false, "auto.offset.reset", "latest"),
                new ByteArrayDeserializer(), new ByteArrayDeserializer());
        var partitions = consumer.partitionsFor(replies, timeout);
        if (partitions == null || partitions.isEmpty()) {
            consumer.close();
            throw new Failure("NotReady", "there is no topic " + replies);
        }
        // The partition's end is asked for before the first command is sent.
        var place = new TopicPartition(replies, RANDOM.nextInt(partitions.size()));
        long end = consumer.endOffsets(List.of(place), timeout).get(place);
        consumer.assign(List.of(place));
        consumer.seek(place, end);
        partition = ByteBuffer.allocate(4).putInt(place.partition()).array();
        producer = new KafkaProducer<>(options(bootstrap, 0), new ByteArraySerializer(), new ByteArraySerializer());
        receiver = new Thread(this::receive, "anabranch-replies");
        receiver.setDaemon(true);
        receiver.start();
    }

    /** An idempotent producer outside of native transactions (R3.8, R8.3). */
    static Map<String, Object> options(String bootstrap, int lingerMs) {
        return Map.of("bootstrap.servers", bootstrap, "enable.idempotence", true, "acks", "all", "linger.ms", lingerMs);
    }

    @Override
    public void close() {
        consumer.wakeup();
        producer.close(Duration.ofSeconds(5));
    }

    long seen() {
        return seen.get();
    }

    /** Keep a time; a lower one changes nothing (R12.3). */
    void learn(long time) {
        seen.accumulateAndGet(time, Math::max);
    }

    private void receive() {
        try (consumer) {
            while (true) {
                consumer.poll(Duration.ofSeconds(1)).forEach(record -> {
                    Waiting wait = record.key() == null ? null : waiting.get(ByteBuffer.wrap(record.key()));
                    GenericRecord reply = wait == null ? null : Frame.decode("Reply", record.value()); // R3.4, R2.2
                    if (reply == null || !Arrays.equals(Frame.bytes(reply.get("command")), wait.digest)) {
                        return; // R3.5
                    }
                    GenericRecord result = (GenericRecord) reply.get("result");
                    String kind = kind(result);
                    if (!kind.equals("Refusal") && !wait.belongs.test(result)) {
                        return; // R3.6
                    }
                    if (!kind.equals("ScopeInfo")) { // R12.2
                        learn((Long) reply.get("hybrid_time"));
                    }
                    wait.answer.complete(result);
                });
            }
        } catch (WakeupException | InterruptException closed) {
            return;
        }
    }

    static String kind(GenericRecord record) {
        return record.getSchema().getName();
    }

    static byte[] random(int size) {
        byte[] bytes = new byte[size];
        RANDOM.nextBytes(bytes);
        return bytes;
    }

    /** Send once, without waiting. ``belongs`` takes the answers until the id is forgotten. */
    ByteBuffer post(int to, GenericRecord command, Predicate<GenericRecord> belongs) {
        byte[] payload = Frame.encode(command);
        ByteBuffer cid = expect(payload, belongs).getKey();
        send(to, cid.array(), payload, seen());
        return cid;
    }

    void forget(ByteBuffer cid) {
        waiting.remove(cid);
    }

    static byte[] sha256(byte[] data) {
        try {
            return MessageDigest.getInstance("SHA-256").digest(data);
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error);
        }
    }

    private Map.Entry<ByteBuffer, Waiting> expect(byte[] payload, Predicate<GenericRecord> belongs) {
        var wait = new Waiting(Arrays.copyOf(sha256(payload), 8), belongs, new CompletableFuture<>());
        ByteBuffer cid = ByteBuffer.wrap(random(16)); // R3.1
        waiting.put(cid, wait);
        return Map.entry(cid, wait);
    }

    /** Completed once the broker has the command, or the producer has given up. */
    private CompletableFuture<Void> send(int to, byte[] cid, byte[] payload, long time) {
        var record = new ProducerRecord<byte[], byte[]>(commands, to, null, payload);
        record.headers().add("ab.cid", cid).add("ab.reply", partition)
                .add("ab.ht", ByteBuffer.allocate(8).putLong(time).array()); // R12.1
        var sent = new CompletableFuture<Void>();
        producer.send(record, (where, error) -> sent.complete(null)); // if it fails, the command is repeated
        return sent;
    }

    /** Send a command until it is answered (section 11); without a result and a refusal at the deadline. */
    Answer ask(long until, int to, GenericRecord command, Predicate<GenericRecord> belongs) {
        byte[] payload = Frame.encode(command);
        boolean inDoubt = false;
        for (long pause = 20;; pause = Math.min(2 * pause, 1000)) {
            var expected = expect(payload, belongs);
            GenericRecord result = null;
            long time = seen();
            long repeat = FIRST_REPEAT_MS;
            try {
                for (int copies = 1; result == null; copies++, repeat = Math.min(2 * repeat, LONGEST_PAUSE_MS)) {
                    // R3.3: all copies are the same. A producer's first record may take seconds.
                    await(send(to, expected.getKey().array(), payload, time), left(until));
                    result = await(expected.getValue().answer, Math.min(repeat, left(until))); // R11.1
                    inDoubt |= copies > 1;
                    if (result == null && left(until) <= 0) {
                        return new Answer(null, null, true);
                    }
                }
            } finally {
                forget(expected.getKey());
            }
            if (!kind(result).equals("Refusal")) {
                return new Answer(result, null, inDoubt);
            }
            var refusal = new Failure(result.get("code").toString(), result.get("message").toString());
            // R11.6: only NotReady is tried again, with a new correlation id (R3.7).
            if (!refusal.name.equals("NotReady") || !sleep(until, pause)) {
                return new Answer(null, refusal, inDoubt);
            }
        }
    }

    static long left(long until) {
        return until - System.nanoTime() / 1_000_000;
    }

    /** Wait, and return false if the deadline comes first. */
    static boolean sleep(long until, long pause) {
        if (left(until) <= pause) {
            return false;
        }
        await(new CompletableFuture<>(), pause);
        return true;
    }

    private static <T> T await(CompletableFuture<T> future, long ms) {
        try {
            return future.get(Math.max(ms, 0), TimeUnit.MILLISECONDS);
        } catch (TimeoutException late) {
            return null;
        } catch (InterruptedException | ExecutionException error) {
            throw new IllegalStateException(error);
        }
    }
}
