package anabranch

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"hash/crc32"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Client is a client of one cluster. Its methods may be called concurrently.
type Client struct {
	bus     *bus
	journal *kgo.Client
	timeout time.Duration
	scopes  sync.Map // of control partitions, which never change (section 4)
	stop    chan struct{}
}

// Connect finds the topics of a cluster. timeout is that of each call.
func Connect(bootstrap, prefix string, timeout time.Duration) (*Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	brokers := strings.Split(bootstrap, ",")
	bus, err := newBus(ctx, brokers, prefix)
	if err != nil {
		return nil, err
	}
	journal, err := kgo.NewClient( // R8.3: idempotent by default, without native transactions
		kgo.SeedBrokers(brokers...),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerLinger(2*time.Millisecond),
		kgo.RecordDeliveryTimeout(timeout),
	)
	if err != nil {
		bus.kafka.Close()
		return nil, err
	}
	return &Client{bus: bus, journal: journal, timeout: timeout, stop: make(chan struct{})}, nil
}

// Close ends all work. Open transactions are aborted when their keepalive ends.
func (c *Client) Close() {
	close(c.stop)
	c.bus.kafka.Close()
	c.journal.Close()
}

func (c *Client) until() time.Time { return time.Now().Add(c.timeout) }

// ask is for commands whose repetition is harmless whatever happened.
func (c *Client) ask(until time.Time, partition int32, command []byte, belongs func(any) bool) (any, error) {
	result, _, err := c.bus.ask(until, partition, command, belongs)
	if err == nil && result == nil {
		err = &Error{"DeadlineExceeded", "no answer in time: call again"}
	}
	return result, err
}

func is[T any](result any) bool {
	_, right := result.(T)
	return right
}

// about: only the outcome of this transaction belongs to a command (R3.6), unless it claims a name or number.
func about(txnID ID, claims bool) func(any) bool {
	return func(result any) bool {
		outcome, right := result.(Outcome)
		return right && (claims || outcome.TxnID == txnID)
	}
}

func (c *Client) findScope(until time.Time, scope string) (int32, error) {
	if known, is := c.scopes.Load(scope); is {
		return known.(int32), nil
	}
	result, err := c.ask(until, 0, frame(findScope{Scope: scope}), is[scopeInfo]) // R4.1
	if err != nil {
		return 0, err
	}
	partition := result.(scopeInfo).Partition
	c.scopes.Store(scope, partition)
	return partition, nil
}

// newID: control partition, Unix milliseconds, 8 random bytes (R5.1).
func newID(partition int32) (id ID) {
	binary.BigEndian.PutUint64(id[:], uint64(partition)<<48|uint64(time.Now().UnixMilli()))
	rand.Read(id[8:])
	return id
}

func partitionOf(txnID ID) int32 { return int32(binary.BigEndian.Uint16(txnID[:])) }

type place struct {
	stream    string
	partition int32
}

// Transaction is a handle of a transaction: of its beginner, or of a process that joined it as one more writer.
type Transaction struct {
	c     *Client
	ID    ID
	Token []byte
	scope string
	done  chan struct{} // closed when it is over

	mu       sync.Mutex
	over     error // of all later calls
	writer   int64 // R8.4
	touched  map[string]touched
	extents  map[place]*extent
	sequence int32
	last     *receipt
	failed   bool // a write failed: no more receipts (R8.6)
}

func (c *Client) handle(txnID ID, token []byte, scope string) *Transaction {
	writer := newID(0)
	return &Transaction{
		c: c, ID: txnID, Token: token, scope: scope, writer: int64(binary.BigEndian.Uint64(writer[8:])),
		touched: map[string]touched{}, extents: map[place]*extent{}, done: make(chan struct{}),
	}
}

// Begin begins a transaction. If its name is committed already, the outcome of that commit is returned instead (R5.5).
func (c *Client) Begin(scope string, name *string, keepalive time.Duration) (*Transaction, *Outcome, error) {
	until := c.until()
	partition, err := c.findScope(until, scope)
	if err != nil {
		return nil, nil, err
	}
	command := begin{TxnID: newID(partition), Scope: scope, Name: name, KeepaliveMs: int32(keepalive.Milliseconds())}
	rand.Read(command.Secret[:]) // R5.2
	belongs := func(result any) bool { return is[begun](result) || about(command.TxnID, name != nil)(result) }
	result, err := c.ask(until, partition, frame(command), belongs)
	if err != nil {
		return nil, nil, err
	}
	answer, began := result.(begun)
	if !began {
		outcome := result.(Outcome)
		return nil, &outcome, nil
	}
	t := c.handle(command.TxnID, makeToken(command, answer, c.bus.seen()), scope)
	go t.beat(keepalive)
	return t, nil, nil
}

// makeToken: all rights, no end, no caveats (R5.3).
func makeToken(command begin, answer begun, seen int64) []byte {
	token := append([]byte{2}, command.TxnID[:]...)
	token = binary.BigEndian.AppendUint32(token, uint32(answer.KeepaliveMs))
	token = binary.BigEndian.AppendUint64(token, uint64(answer.BegunMs))
	token = binary.BigEndian.AppendUint64(token, uint64(seen))
	for _, text := range []string{command.Scope, "open"} {
		token = append(append(token, byte(len(text))), text...)
	}
	token = append(token, 31)
	token = binary.BigEndian.AppendUint64(token, 0)
	mac := hmac.New(sha256.New, command.Secret[:])
	mac.Write(token)
	return mac.Sum(append(token, 0))
}

// Join makes a writer for a transaction of another process. The token is used as it is (R5.4).
func (c *Client) Join(token []byte) (*Transaction, error) {
	if len(token) < 38 || token[0] != 2 || len(token) < 38+int(token[37]) {
		return nil, &Error{"InvalidToken", "not a token of version 2"}
	}
	c.bus.learn(int64(binary.BigEndian.Uint64(token[29:37]))) // R12.3
	return c.handle(ID(token[1:17]), token, string(token[38:38+int(token[37])])), nil
}

// beat sends heartbeats every third of the keepalive (R5.6). They are answered only if the transaction is over (R5.7).
func (t *Transaction) beat(keepalive time.Duration) {
	command := frame(heartbeat{[][]byte{t.Token}})
	for over := false; !over; {
		cid, wait := t.c.bus.expect(command, is[ended])
		t.c.bus.send(partitionOf(t.ID), cid, command, t.c.bus.seen())
		select {
		case <-time.After(keepalive / 3):
		case <-wait.answer:
			over = true
		case <-t.done:
			over = true
		case <-t.c.stop:
			over = true
		}
		t.c.bus.forget(cid)
	}
}

// position is the place of a key (section 7).
func position(key []byte) int64 {
	h := crc32.ChecksumIEEE(key)
	h ^= h >> 16
	h *= 0x85ebca6b
	h ^= h >> 13
	h *= 0xc2b2ae35
	return int64(h ^ h>>16)
}

// touch adds a stream, under the writer's own number, before its first write there (R6.1).
func (t *Transaction) touch(until time.Time, stream string) (touched, error) {
	if known, is := t.touched[stream]; is {
		return known, nil // R6.2: the same segments until the end
	}
	command := frame(touch{t.Token, stream, t.writer})
	result, err := t.c.ask(until, partitionOf(t.ID), command, is[touched])
	if err != nil {
		return touched{}, t.end(err)
	}
	found := result.(touched)
	topic := journalOf(stream)
	missing := func(s segment) bool { // after a scaling, kgo may know the topic, but not all partitions yet
		first, _, _ := t.c.journal.PartitionLeader(topic, 0)
		leader, _, _ := t.c.journal.PartitionLeader(topic, s.Partition)
		return first >= 0 && leader < 0
	}
	for slices.ContainsFunc(found.Segments, missing) {
		t.c.journal.ForceMetadataRefresh()
		if !sleep(until, 50*time.Millisecond) {
			return touched{}, &Error{"DeadlineExceeded", "a new partition is not known yet"}
		}
	}
	t.touched[stream] = found
	return found, nil
}

// end notes an error after which the transaction is over: all later calls fail by it, and heartbeats stop (R5.7).
func (t *Transaction) end(err error) error {
	if e, is := err.(*Error); is && (e.Name == "TransactionAborted" || e.Name == "AlreadyCommitted") {
		if t.over == nil {
			close(t.done)
		}
		t.over = err
	}
	return err
}

// check returns why the transaction takes nothing more from this writer.
func (t *Transaction) check() error {
	if t.over == nil && t.failed {
		return &Error{"WriteFailed", "a write of this writer failed: it makes no more receipts"} // R8.6
	}
	return t.over
}

func journalOf(stream string) string { return strings.Replace(stream, "/", ".", 1) + ".journal" }

// Write writes events, and returns when all are acknowledged.
func (t *Transaction) Write(events []Event) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := cmp.Or(t.check(), checkHeaders(events)); err != nil {
		return err
	}
	until := t.c.until()
	records := make([]*kgo.Record, len(events))
	for i, event := range events {
		found, err := t.touch(until, event.Stream)
		if err != nil {
			return err
		}
		record := recordOf(event)
		for _, s := range found.Segments { // R7.1; without a key any segment will do
			if at := position(event.Key); event.Key == nil || s.Low <= at && at < s.High {
				record.Partition = s.Partition
				break
			}
		}
		header := binary.BigEndian.AppendUint64(t.ID[:len(t.ID):len(t.ID)], uint64(t.writer))
		header = binary.BigEndian.AppendUint32(header, uint32(found.Epoch))
		record.Headers = append(record.Headers, kgo.RecordHeader{Key: "ab.txn", Value: header}) // R8.1
		records[i] = record
	}
	if err := t.c.produce(until, records); err != nil {
		t.failed = true // the records may be in the journal or not (R8.6)
		return err
	}
	for i, record := range records {
		t.count(events[i].Stream, record)
	}
	return nil
}

// count adds a record to the extents of the next receipt (R9.1, R9.2).
func (t *Transaction) count(stream string, record *kgo.Record) {
	at := place{stream, record.Partition}
	if t.extents[at] == nil {
		t.extents[at] = &extent{Stream: stream, Partition: record.Partition, First: record.Offset}
	}
	x := t.extents[at]
	x.First = min(x.First, record.Offset)
	x.End = max(x.End, record.Offset+1)
	x.Count++
	x.CRCSum += int64(crc32.Update(crc32.ChecksumIEEE(record.Key), crc32.IEEETable, record.Value))
	x.CRCSum &= 1<<63 - 1
	t.last = nil
}

func checkHeaders(events []Event) error {
	for _, event := range events {
		for _, h := range event.Headers {
			if strings.HasPrefix(h.Name, "ab.") {
				return &Error{"InvalidArgument", "headers that begin with ab. are reserved"} // R8.5
			}
		}
	}
	return nil
}

func recordOf(event Event) *kgo.Record {
	record := &kgo.Record{Topic: journalOf(event.Stream), Key: event.Key, Value: event.Value}
	if event.Timestamp != 0 {
		record.Timestamp = time.UnixMilli(event.Timestamp)
	}
	for _, h := range event.Headers {
		record.Headers = append(record.Headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
	}
	return record
}

// produce waits until all records are acknowledged.
func (c *Client) produce(until time.Time, records []*kgo.Record) error {
	done := make(chan error, len(records))
	for _, record := range records {
		c.journal.Produce(context.Background(), record, func(_ *kgo.Record, err error) { done <- err })
	}
	late := time.After(time.Until(until))
	for range records {
		select {
		case err := <-done:
			if err != nil {
				return &Error{"WriteFailed", err.Error()}
			}
		case <-late:
			return &Error{"WriteFailed", "a write was not acknowledged in time"}
		}
	}
	return nil
}

// WritePlain writes records that commit by themselves (section 8). Their headers are unchanged (R8.7).
func (c *Client) WritePlain(events []Event) error {
	if err := checkHeaders(events); err != nil {
		return err
	}
	records := make([]*kgo.Record, len(events))
	for i, event := range events {
		records[i] = recordOf(event) // to partition 0: any will do
	}
	return c.produce(c.until(), records)
}

// receipt counts all records so far. Without a write since the last one, that one is returned.
func (t *Transaction) receipt(finished bool) receipt {
	if t.last != nil && t.last.Finished == finished {
		return *t.last
	}
	t.sequence++ // R9.3
	r := receipt{TxnID: t.ID, Writer: t.writer, Sequence: t.sequence, Finished: finished}
	r.Seen = t.c.bus.seen() // R9.4
	for _, x := range t.extents {
		r.Extents = append(r.Extents, *x)
	}
	t.last = &r
	return r
}

// Receipt registers a receipt, and returns it framed, for the process that commits.
func (t *Transaction) Receipt(finished bool) ([]byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.check(); err != nil {
		return nil, err
	}
	r := t.receipt(finished)
	command := frame(register{t.Token, r})
	if _, err := t.c.ask(t.c.until(), partitionOf(t.ID), command, is[registered]); err != nil {
		return nil, t.end(err)
	}
	return frame(r), nil
}

// Ending says how a transaction is committed. The zero value takes all registered writers.
type Ending struct {
	Receipts [][]byte // of the other writers to take; nil: all registered writers
	Name     *string  // to claim
	Number   *int64   // of the series of that name
}

// Commit commits: everything becomes visible at once.
func (t *Transaction) Commit(how Ending) (Outcome, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.check(); err != nil {
		return Outcome{}, err
	}
	command := commit{Token: t.Token, Name: how.Name, Number: how.Number}
	if len(t.touched) > 0 {
		command.Own = []receipt{t.receipt(true)} // R10.1
	}
	if how.Receipts != nil {
		command.Receipts = &[]receipt{}
	}
	for _, data := range how.Receipts {
		other, rest, ok := parse[receipt](data)
		if !ok || len(rest) > 0 {
			return Outcome{}, &Error{"InvalidArgument", "not a receipt"}
		}
		*command.Receipts = append(*command.Receipts, other)
	}
	make := func(wait time.Duration) []byte {
		command.WaitMs = int32(wait.Milliseconds())
		return frame(command)
	}
	outcome, err := t.c.untilKnown(t.ID, t.scope, &t.Token, how.Name != nil, make)
	if err == nil {
		t.end(&Error{"AlreadyCommitted", "the transaction is committed"})
	}
	return outcome, t.end(err)
}

// OneShot commits events as a transaction of one command.
func (c *Client) OneShot(scope string, name *string, events []Event) (Outcome, error) {
	if err := checkHeaders(events); err != nil {
		return Outcome{}, err
	}
	partition, err := c.findScope(c.until(), scope)
	if err != nil {
		return Outcome{}, err
	}
	command := oneShot{TxnID: newID(partition), Scope: scope, Name: name}
	for _, given := range events {
		made := event{given.Stream, -1, orNull(given.Key), orNull(given.Value), nil, -1} // of any segment, now
		if given.Timestamp != 0 {
			made.Timestamp = given.Timestamp
		}
		for _, h := range given.Headers {
			made.Headers = append(made.Headers, eventHeader{h.Name, orNull(h.Value)})
		}
		command.Events = append(command.Events, made)
	}
	framed := frame(command)
	make := func(time.Duration) []byte { return framed }
	return c.untilKnown(command.TxnID, scope, nil, name != nil, make)
}

// untilKnown sends a command that commits until its outcome is known. The id stays the same (R11.4). token is nil for
// a one-shot; claims says whether it has a name; make frames the command, with the time that the controller may wait.
func (c *Client) untilKnown(txnID ID, scope string, token *[]byte, claims bool, make func(time.Duration) []byte) (Outcome, error) {
	until, partition := c.until(), partitionOf(txnID)
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		// A third of the time is left for Resolve, and the controller waits for less than this call (R10.2).
		askUntil := time.Now().Add(time.Until(until) * 2 / 3)
		wait := min(time.Until(askUntil)*3/4, 600*time.Second)
		result, doubt, err := c.bus.ask(askUntil, partition, make(wait), about(txnID, claims))
		if err != nil && (!doubt || isFinal(err)) {
			return Outcome{}, err
		}
		if result == nil { // R11.2; R11.3: an earlier copy may be carried out, whatever this one was answered
			command := frame(resolve{txnID, scope, token})
			result, _, _ = c.bus.ask(until, partition, command, about(txnID, false))
		}
		outcome, known := result.(Outcome)
		switch {
		case !known:
		case outcome.State == Committed:
			return outcome, nil
		case outcome.State == Aborted || outcome.State == Open && err != nil:
			if err == nil {
				err = &Error{"TransactionAborted", "the transaction is aborted"}
			}
			return Outcome{}, err
		}
		if !sleep(until, pause) { // R11.5
			return Outcome{}, &Error{"OutcomeUnknown", "the outcome is not known: resolve it later"}
		}
	}
}

// isFinal: these refusals hold for all copies of a command.
func isFinal(err error) bool {
	e, is := err.(*Error)
	return is && (e.Name == "TransactionAborted" || e.Name == "AlreadyCommitted" || e.Name == "EventTooLarge")
}

// Abort ends the transaction without effect. Repeating it is harmless (R10.5).
func (t *Transaction) Abort() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	command := frame(abort{Token: t.Token, Reason: "aborted by the client"})
	if _, err := t.c.ask(t.c.until(), partitionOf(t.ID), command, about(t.ID, false)); err != nil {
		return err
	}
	t.end(&Error{"TransactionAborted", "the transaction is aborted"})
	return nil
}

// Resolve returns the state of a transaction; one that no controller knows is aborted first (section 11).
func (c *Client) Resolve(token []byte) (Outcome, error) {
	t, err := c.Join(token)
	if err != nil {
		return Outcome{}, err
	}
	command := frame(resolve{t.ID, t.scope, &token})
	result, err := c.ask(c.until(), partitionOf(t.ID), command, about(t.ID, false))
	if err != nil {
		return Outcome{}, err
	}
	return result.(Outcome), nil
}
