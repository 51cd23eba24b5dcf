package anabranch;

import anabranch.Client.Event;
import anabranch.Client.Outcome;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.zip.CRC32;
import org.apache.avro.generic.GenericRecord;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;

/** A transaction, for its beginner, or for a process that joined it as one more writer. */
public final class Transaction {
    final Client client;
    final byte[] id;
    final byte[] token;
    final String scope;
    final Duration keepalive;
    private final long writer = Bus.RANDOM.nextLong(); // R8.4
    private final Map<String, GenericRecord> touched = new HashMap<>();
    private final Map<String, GenericRecord> extents = new HashMap<>(); // by stream and partition
    private int sequence;
    private GenericRecord receipt; // of all records so far
    private boolean failed; // a write failed: no more receipts (R8.6)
    private Failure over; // the error of all later calls
    private Outcome prepared;

    Transaction(Client client, byte[] id, byte[] token, String scope, Duration keepalive) {
        this.client = client;
        this.id = id;
        this.token = token;
        this.scope = scope;
        this.keepalive = keepalive;
    }

    /** The token, by which other processes join. Keep it secret. */
    public byte[] token() {
        return token.clone();
    }

    /** Write events, and return when all are acknowledged. */
    public synchronized void write(List<Event> events) {
        check();
        Client.checkHeaders(events);
        long until = client.until();
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        for (Event event : events) {
            GenericRecord to = touch(until, event.stream());
            var record = Client.record(event, partitionOf(to, event.key()));
            var header = ByteBuffer.allocate(28).put(id).putLong(writer).putInt((Integer) to.get("stream_epoch"));
            record.headers().add("ab.txn", header.array()); // R8.1
            records.add(record);
        }
        List<RecordMetadata> stored;
        try {
            stored = client.produce(until, records);
        } catch (Failure failure) {
            failed = true; // the records may be in the journal or not (R8.6)
            throw failure;
        }
        for (int i = 0; i < records.size(); i++) {
            count(events.get(i), stored.get(i));
        }
    }

    /** Add a stream, under the writer's own number, before its first write there (R6.1). */
    private GenericRecord touch(long until, String stream) {
        GenericRecord known = touched.get(stream); // R6.2: the same segments until the end
        if (known == null) {
            var command = Frame.record("Touch", "token", Frame.buffer(token), "stream", stream, "writer", writer);
            known = ask(command, until, "Touched");
            touched.put(stream, known);
        }
        return known;
    }

    private GenericRecord ask(GenericRecord command, long until, String answer) {
        try {
            return client.ask(until, Client.partitionOf(id), command, Client.is(answer));
        } catch (Failure failure) {
            throw ended(failure);
        }
    }

    private Failure ended(Failure failure) {
        if (failure.name.equals("TransactionAborted") || failure.name.equals("AlreadyCommitted")) {
            over = failure;
            client.open.remove(this);
        }
        return failure;
    }

    private void check() {
        if (over != null) {
            throw over;
        }
        if (failed) {
            throw new Failure("WriteFailed", "a write of this writer failed: it makes no more receipts"); // R8.6
        }
    }

    /** R7.1; without a key any segment will do. */
    private static int partitionOf(GenericRecord to, byte[] key) {
        for (Object one : (Collection<?>) to.get("segments")) {
            GenericRecord segment = (GenericRecord) one;
            long at = key == null ? (Long) segment.get("low") : position(key);
            if ((Long) segment.get("low") <= at && at < (Long) segment.get("high")) {
                return (Integer) segment.get("partition");
            }
        }
        throw new Failure("MalformedRecord", "the segments do not hold a key");
    }

    /** Section 7. */
    static long position(byte[] key) {
        int h = (int) checksum(key, null);
        h ^= h >>> 16;
        h *= 0x85ebca6b;
        h ^= h >>> 13;
        h *= 0xc2b2ae35;
        return (h ^ h >>> 16) & 0xffffffffL;
    }

    private static long checksum(byte[] key, byte[] value) {
        CRC32 crc = new CRC32();
        crc.update(key == null ? new byte[0] : key);
        crc.update(value == null ? new byte[0] : value);
        return crc.getValue();
    }

    /** Add a record to the extents of the next receipt (R9.1, R9.2). */
    private void count(Event event, RecordMetadata at) {
        GenericRecord x = extents.computeIfAbsent(event.stream() + " " + at.partition(), place -> Frame.record(
                "Extent", "stream", event.stream(), "partition", at.partition(),
                "first", at.offset(), "end", 0L, "count", 0L, "crc_sum", 0L));
        x.put("first", Math.min((Long) x.get("first"), at.offset()));
        x.put("end", Math.max((Long) x.get("end"), at.offset() + 1));
        x.put("count", (Long) x.get("count") + 1);
        x.put("crc_sum", (Long) x.get("crc_sum") + checksum(event.key(), event.value()) & Long.MAX_VALUE);
        receipt = null;
    }

    /** A receipt of all records so far. */
    private GenericRecord receipt(boolean finished) {
        check();
        if (receipt == null || !receipt.get("finished").equals(finished)) {
            receipt = Frame.record("Receipt", "txn_id", Frame.fixed("TxnId", id), "writer", writer,
                    "sequence", ++sequence, "finished", finished, // R9.3
                    "extents", List.copyOf(extents.values()), "seen", client.bus.seen()); // R9.4
        }
        return receipt;
    }

    /** Register a receipt, and return it framed, for the process that commits. */
    public synchronized byte[] receiptOf(boolean finished) {
        GenericRecord made = receipt(finished);
        ask(Frame.record("Register", "token", Frame.buffer(token), "receipt", made), client.until(), "Registered");
        return Frame.encode(made);
    }

    /**
     * Commit: everything becomes visible at once. ``receipts``: those of the other writers to take; null takes all
     * registered writers. ``name``, ``number``: claim a name, or a number of the series of that name.
     */
    public synchronized Outcome commit(List<byte[]> receipts, String name, Long number) {
        return finish(receipts, name, number, null);
    }

    /**
     * Make sure that the transaction can commit: the holder of the secret decides later, by ``Client.decide``.
     * ``attempt``: names this prepare; a repeated one has the same name.
     */
    public synchronized Outcome prepare(byte[] secret, byte[] attempt) {
        if (prepared == null) {
            prepared = finish(null, null, null, Frame.record("Prepare", "by", Frame.buffer(Bus.sha256(secret)), // R10.7
                    "attempt", Frame.buffer(attempt)));
        }
        return prepared;
    }

    private Outcome finish(List<byte[]> receipts, String name, Long number, GenericRecord prepare) {
        check();
        List<GenericRecord> own = touched.isEmpty() ? List.of() : List.of(receipt(true)); // R10.1
        List<GenericRecord> others = receipts == null ? null : new ArrayList<>();
        for (byte[] data : receipts == null ? List.<byte[]>of() : receipts) {
            GenericRecord one = Frame.decode("Receipt", data);
            if (one == null) {
                throw new Failure("InvalidArgument", "not a receipt");
            }
            others.add(one);
        }
        try {
            Outcome outcome = client.untilKnown(id, scope, token, name != null, wait -> Frame.record("Commit",
                    "token", Frame.buffer(token), "own", own, "receipts", others, "name", name,
                    "wait_ms", wait, "number", number, "prepare", prepare, "validated", List.of()));
            boolean isPrepared = outcome.state().equals("PREPARED");
            over = isPrepared ? new Failure("IllegalState", "the transaction is prepared") // R10.8
                    : new Failure("AlreadyCommitted", "the transaction is committed");
            client.open.remove(this);
            return outcome;
        } catch (Failure failure) {
            throw ended(failure);
        }
    }

    /** End the transaction without effect. Repeating it is harmless (R10.5). */
    public synchronized void abort() {
        client.ask(client.until(), Client.partitionOf(id), Client.abortCommand(token, null), Client.about(id, false));
        ended(new Failure("TransactionAborted", "the transaction is aborted"));
    }
}
