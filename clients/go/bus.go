package anabranch

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	mathrand "math/rand/v2"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Error is a refusal of a controller, or of this client, by a name of section 11.
type Error struct{ Name, Message string }

func (e *Error) Error() string { return e.Name + ": " + e.Message }

const (
	firstRepeat  = 2 * time.Second
	longestPause = 10 * time.Second
)

// waiting is a command that may be answered.
type waiting struct {
	digest  []byte         // of the command's bytes
	belongs func(any) bool // whether a result other than a refusal is its answer
	answer  chan any
}

// bus sends commands and receives replies (section 3): one idempotent producer, one partition of replies.
type bus struct {
	kafka     *kgo.Client
	commands  string
	partition []byte // of replies, for ab.reply

	mu      sync.Mutex
	waits   map[string]*waiting
	highest int64 // hybrid time (section 12)
}

func newBus(ctx context.Context, bootstrap []string, prefix string) (*bus, error) {
	// The client of all commands is idempotent, and waits for all replicas: these are kgo's defaults (R3.8).
	kafka, err := kgo.NewClient(
		kgo.SeedBrokers(bootstrap...),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerLinger(0),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtEnd()),
	)
	if err != nil {
		return nil, err
	}
	replies := prefix + ".replies"
	ends, err := kadm.NewClient(kafka).ListEndOffsets(ctx, replies)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		kafka.Close()
		return nil, &Error{"NotReady", err.Error()}
	}
	// The partition is read from the end that it had before the first command: no reply is missed.
	partition := mathrand.Int32N(int32(len(ends[replies])))
	from := kgo.NewOffset().At(ends[replies][partition].Offset)
	kafka.AddConsumePartitions(map[string]map[int32]kgo.Offset{replies: {partition: from}})
	b := &bus{
		kafka: kafka, commands: prefix + ".commands", waits: map[string]*waiting{},
		partition: binary.BigEndian.AppendUint32(nil, uint32(partition)),
	}
	go b.receive()
	return b, nil
}

// seen is the highest hybrid time that was received.
func (b *bus) seen() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.highest
}

// learn keeps a time; a lower one changes nothing (R12.3).
func (b *bus) learn(time int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.highest = max(b.highest, time)
}

func (b *bus) receive() {
	for {
		fetches := b.kafka.PollFetches(context.Background())
		if fetches.IsClientClosed() {
			return
		}
		fetches.EachRecord(b.take)
	}
}

// take hands an answer to the command that waits for it.
func (b *bus) take(record *kgo.Record) {
	b.mu.Lock()
	wait := b.waits[string(record.Key)]
	b.mu.Unlock()
	if wait == nil {
		return // R3.4
	}
	head, answer := parseReply(record.Value)
	if _, refused := answer.(refusal); !bytes.Equal(head.Command, wait.digest) || !refused && !wait.belongs(answer) {
		return // R2.2, R3.5, R3.6: the true answer follows
	}
	if _, is := answer.(scopeInfo); !is { // R12.2
		b.learn(head.HybridTime)
	}
	select {
	case wait.answer <- answer:
	default: // a second answer
	}
}

// expect makes a correlation id, under which answers are taken until forget.
func (b *bus) expect(command []byte, belongs func(any) bool) (string, *waiting) {
	cid := make([]byte, 16) // R3.1
	rand.Read(cid)
	digest := sha256.Sum256(command)
	wait := &waiting{digest[:8], belongs, make(chan any, 1)}
	b.mu.Lock()
	b.waits[string(cid)] = wait
	b.mu.Unlock()
	return string(cid), wait
}

func (b *bus) forget(cid string) {
	b.mu.Lock()
	delete(b.waits, cid)
	b.mu.Unlock()
}

func (b *bus) send(partition int32, cid string, command []byte, seen int64) {
	b.kafka.Produce(context.Background(), &kgo.Record{
		Topic: b.commands, Partition: partition, Value: command,
		Headers: []kgo.RecordHeader{
			{Key: "ab.cid", Value: []byte(cid)},
			{Key: "ab.reply", Value: b.partition},
			{Key: "ab.ht", Value: binary.BigEndian.AppendUint64(nil, uint64(seen))}, // R12.1
		},
	}, nil) // if it fails, the command is repeated
}

// ask sends a command until it is answered (section 11). The result is nil at the deadline. doubt says whether a copy
// was sent that is not answered: it may still be carried out.
func (b *bus) ask(until time.Time, partition int32, command []byte, belongs func(any) bool) (result any, doubt bool, err error) {
	retry := 20 * time.Millisecond
	for {
		var copies int
		result, copies = b.sendUntilAnswered(until, partition, command, belongs)
		if result == nil {
			return nil, true, nil
		}
		doubt = doubt || copies > 1
		refused, is := result.(refusal)
		if !is {
			return result, doubt, nil
		}
		err = &Error{refused.Code, refused.Message}
		// R11.6: only NotReady is tried again here, with a new correlation id (R3.7).
		if refused.Code != "NotReady" || !sleep(until, retry) {
			return nil, doubt, err
		}
		retry = min(2*retry, time.Second)
	}
}

func (b *bus) sendUntilAnswered(until time.Time, partition int32, command []byte, belongs func(any) bool) (any, int) {
	cid, wait := b.expect(command, belongs)
	defer b.forget(cid)
	seen, pause := b.seen(), firstRepeat
	for copies := 1; ; copies++ {
		b.send(partition, cid, command, seen) // R3.3: all copies are the same
		select {
		case result := <-wait.answer:
			return result, copies
		case <-time.After(min(pause, time.Until(until))):
		}
		if !time.Now().Before(until) {
			return nil, copies
		}
		pause = min(2*pause, longestPause) // R11.1
	}
}

// sleep waits, and returns false if the deadline comes first.
func sleep(until time.Time, pause time.Duration) bool {
	if time.Until(until) <= pause {
		return false
	}
	time.Sleep(pause)
	return true
}
