package anabranch;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.util.HashMap;
import java.util.Map;
import java.util.regex.Pattern;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.DecoderFactory;
import org.apache.avro.io.EncoderFactory;

/** Section 2: records of the protocol, framed by feature level and type. The schemas are the project's own files. */
final class Frame {
    private static final byte LEVEL = 1;
    private static final Map<String, Integer> TYPES = Map.ofEntries(
            Map.entry("FindScope", 0x01), Map.entry("Begin", 0x04), Map.entry("Touch", 0x05),
            Map.entry("Register", 0x06), Map.entry("Commit", 0x07), Map.entry("OneShot", 0x08),
            Map.entry("Abort", 0x09), Map.entry("Resolve", 0x0a), Map.entry("Heartbeat", 0x0c),
            Map.entry("Reply", 0x20), Map.entry("Receipt", 0x21));
    private static final Pattern NAMED = Pattern.compile("\"anabranch\\.(\\w+)\"");
    private static final Map<String, Schema> SCHEMAS = new HashMap<>();
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final Schema.Parser PARSER = new Schema.Parser();

    static {
        TYPES.keySet().forEach(Frame::load);
    }

    private Frame() {}

    /** Parse a schema at this client's level, after those that it refers to. */
    private static void load(String name) {
        if (SCHEMAS.containsKey(name)) {
            return;
        }
        try (InputStream in = Frame.class.getResourceAsStream("/schemas/" + name + ".avsc")) {
            JsonNode schema = JSON.readTree(in);
            for (var fields = schema.path("fields").elements(); fields.hasNext();) {
                if (fields.next().path("level").asInt(LEVEL) > LEVEL) {
                    fields.remove();
                }
            }
            String text = schema.toString();
            NAMED.matcher(text).results().forEach(found -> load(found.group(1)));
            SCHEMAS.put(name, PARSER.parse(text));
        } catch (IOException error) {
            throw new IllegalStateException(error);
        }
    }

    /** A record with these fields: name, value, name, value. The others are null, or empty lists. */
    static GenericRecord record(String name, Object... fields) {
        load(name);
        GenericRecord made = new GenericData.Record(SCHEMAS.get(name));
        for (int i = 0; i < fields.length; i += 2) {
            made.put((String) fields[i], fields[i + 1]);
        }
        return made;
    }

    static GenericData.Fixed fixed(String name, byte[] bytes) {
        load(name);
        return new GenericData.Fixed(SCHEMAS.get(name), bytes);
    }

    static byte[] encode(GenericRecord record) {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        out.write(LEVEL);
        out.write(TYPES.get(record.getSchema().getName()));
        try {
            new GenericDatumWriter<GenericRecord>(record.getSchema())
                    .write(record, EncoderFactory.get().directBinaryEncoder(out, null));
        } catch (IOException error) {
            throw new IllegalStateException(error);
        }
        return out.toByteArray();
    }

    /** The record; null if the bytes are not exactly one record of this type (R2.2). */
    static GenericRecord decode(String name, byte[] data) {
        if (data == null || data.length < 2 || data[0] != LEVEL || data[1] != TYPES.get(name)) {
            return null;
        }
        try {
            var in = new ByteArrayInputStream(data, 2, data.length - 2);
            var decoder = DecoderFactory.get().directBinaryDecoder(in, null);
            GenericRecord record = new GenericDatumReader<GenericRecord>(SCHEMAS.get(name)).read(null, decoder);
            return in.available() == 0 ? record : null;
        } catch (IOException | RuntimeException error) {
            return null;
        }
    }

    static byte[] bytes(Object value) {
        if (value instanceof GenericData.Fixed fixed) {
            return fixed.bytes();
        }
        ByteBuffer buffer = ((ByteBuffer) value).duplicate();
        byte[] found = new byte[buffer.remaining()];
        buffer.get(found);
        return found;
    }

    static ByteBuffer buffer(byte[] bytes) {
        return bytes == null ? null : ByteBuffer.wrap(bytes);
    }
}
