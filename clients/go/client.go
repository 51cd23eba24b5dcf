package anabranch

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"hash/crc32"
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

	mu     sync.Mutex
	scopes map[string]int32 // control partitions, which never change (section 4)
	stop   chan struct{}
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
		bus.close()
		return nil, err
	}
	c := &Client{bus: bus, journal: journal, timeout: timeout, scopes: map[string]int32{}, stop: make(chan struct{})}
	return c, nil
}

// Close ends all work. Open transactions are aborted when their keepalive ends.
func (c *Client) Close() {
	close(c.stop)
	c.bus.close()
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
	_, refused := result.(refusal)
	_, right := result.(T)
	return refused || right
}

// about: only the outcome of this transaction belongs to a command (R3.6), unless it claims a name or number.
func about(txnID []byte, claims bool) func(any) bool {
	return func(result any) bool {
		outcome, right := result.(Outcome)
		return is[Outcome](result) && (!right || claims || bytes.Equal(outcome.TxnID, txnID))
	}
}

func (c *Client) findScope(until time.Time, scope string) (int32, error) {
	c.mu.Lock()
	partition, known := c.scopes[scope]
	c.mu.Unlock()
	if known {
		return partition, nil
	}
	e := command(typeFindScope)
	e.str(scope)
	e.flag(false)
	e.null()
	result, err := c.ask(until, 0, e.out, is[scopeInfo]) // R4.1
	if err != nil {
		return 0, err
	}
	partition = result.(scopeInfo).partition
	c.mu.Lock()
	c.scopes[scope] = partition
	c.mu.Unlock()
	return partition, nil
}

func random(size int) []byte {
	data := make([]byte, size)
	rand.Read(data)
	return data
}

// newID: control partition, Unix milliseconds, 8 random bytes (R5.1).
func newID(partition int32) []byte {
	id := binary.BigEndian.AppendUint64(nil, uint64(partition)<<48|uint64(time.Now().UnixMilli()))
	return append(id, random(8)...)
}

func partitionOf(txnID []byte) int32 { return int32(binary.BigEndian.Uint16(txnID)) }

type place struct {
	stream    string
	partition int32
}

// Transaction is a handle of a transaction: of its beginner, or of a process that joined it as one more writer.
type Transaction struct {
	c     *Client
	ID    []byte
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
	prepared *Outcome
}

func (c *Client) handle(txnID, token []byte, scope string) *Transaction {
	return &Transaction{
		c: c, ID: txnID, Token: token, scope: scope, writer: int64(binary.BigEndian.Uint64(random(8))),
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
	txnID, secret := newID(partition), random(32) // R5.2
	e := command(typeBegin)
	e.fixed(txnID)
	e.str(scope)
	e.textOrNull(name)
	e.long(keepalive.Milliseconds())
	e.fixed(secret)
	e.null()  // fencing_hash
	e.long(0) // snapshot
	belongs := func(result any) bool { return is[begun](result) || about(txnID, name != nil)(result) }
	result, err := c.ask(until, partition, e.out, belongs)
	if err != nil {
		return nil, nil, err
	}
	answer, began := result.(begun)
	if !began {
		outcome := result.(Outcome)
		return nil, &outcome, nil
	}
	t := c.handle(txnID, makeToken(txnID, secret, scope, answer, c.bus.seen()), scope)
	go t.beat(keepalive)
	return t, nil, nil
}

// makeToken: all rights, no end, no caveats (R5.3).
func makeToken(txnID, secret []byte, scope string, b begun, seen int64) []byte {
	token := append([]byte{2}, txnID...)
	token = binary.BigEndian.AppendUint32(token, uint32(b.keepaliveMs))
	token = binary.BigEndian.AppendUint64(token, uint64(b.begunMs))
	token = binary.BigEndian.AppendUint64(token, uint64(seen))
	for _, text := range []string{scope, "open"} {
		token = append(append(token, byte(len(text))), text...)
	}
	token = append(token, 31)
	token = binary.BigEndian.AppendUint64(token, 0)
	mac := hmac.New(sha256.New, secret)
	mac.Write(token)
	return mac.Sum(append(token, 0))
}

// Join makes a writer for a transaction of another process. The token is used as it is (R5.4).
func (c *Client) Join(token []byte) (*Transaction, error) {
	if len(token) < 38 || token[0] != 2 || len(token) < 38+int(token[37]) {
		return nil, &Error{"InvalidToken", "not a token of version 2"}
	}
	c.bus.learn(int64(binary.BigEndian.Uint64(token[29:37]))) // R12.3
	return c.handle(token[1:17], token, string(token[38:38+int(token[37])])), nil
}

// beat sends heartbeats every third of the keepalive (R5.6). They are answered only if the transaction is over (R5.7).
func (t *Transaction) beat(keepalive time.Duration) {
	e := command(typeHeartbeat)
	array(e, [][]byte{t.Token}, e.bytes)
	for over := false; !over; {
		cid, wait := t.c.bus.expect(e.out, is[ended])
		t.c.bus.send(partitionOf(t.ID), cid, e.out, t.c.bus.seen())
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
	e := command(typeTouch)
	e.bytes(t.Token)
	e.str(stream)
	e.long(t.writer)
	result, err := t.c.ask(until, partitionOf(t.ID), e.out, is[touched])
	if err != nil {
		return touched{}, t.end(err)
	}
	found := result.(touched)
	topic := journalOf(stream)
	for _, s := range found.segments { // after a scaling, kgo may not know all partitions yet
		for known := true; known; {
			first, _, _ := t.c.journal.PartitionLeader(topic, 0)
			leader, _, _ := t.c.journal.PartitionLeader(topic, s.partition)
			if known = first >= 0 && leader < 0; known {
				t.c.journal.ForceMetadataRefresh()
				if !sleep(until, 50*time.Millisecond) {
					return touched{}, &Error{"DeadlineExceeded", "a new partition is not known yet"}
				}
			}
		}
	}
	t.touched[stream] = found
	return found, nil
}

// end notes an error after which the transaction is over.
func (t *Transaction) end(err error) error {
	if e, is := err.(*Error); is && (e.Name == "TransactionAborted" || e.Name == "AlreadyCommitted") {
		t.takeNoMore(err)
	}
	return err
}

// takeNoMore lets all later calls fail by this error, and stops the heartbeats (R5.7, R10.8).
func (t *Transaction) takeNoMore(err error) {
	if t.over == nil {
		close(t.done)
	}
	t.over = err
}

func journalOf(stream string) string { return strings.Replace(stream, "/", ".", 1) + ".journal" }

// Write writes events, and returns when all are acknowledged.
func (t *Transaction) Write(events []Event) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over != nil {
		return t.over
	}
	if t.failed {
		return &Error{"WriteFailed", "an earlier write of this writer failed"}
	}
	if err := checkHeaders(events); err != nil {
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
		for _, s := range found.segments { // R7.1; without a key any segment will do
			if at := position(event.Key); event.Key == nil || s.low <= at && at < s.high {
				record.Partition = s.partition
				break
			}
		}
		header := binary.BigEndian.AppendUint64(append([]byte{}, t.ID...), uint64(t.writer))
		header = binary.BigEndian.AppendUint32(header, uint32(found.epoch))
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
		t.extents[at] = &extent{stream: stream, partition: record.Partition, first: record.Offset}
	}
	x := t.extents[at]
	x.first = min(x.first, record.Offset)
	x.end = max(x.end, record.Offset+1)
	x.count++
	x.crcSum += int64(crc32.Update(crc32.ChecksumIEEE(record.Key), crc32.IEEETable, record.Value))
	x.crcSum &= 1<<63 - 1
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
func (t *Transaction) receipt(finished bool) (receipt, error) {
	if t.failed {
		return receipt{}, &Error{"WriteFailed", "a write of this writer failed: it makes no more receipts"} // R8.6
	}
	if t.last != nil && t.last.finished == finished {
		return *t.last, nil
	}
	t.sequence++                                                                                                // R9.3
	r := receipt{txnID: t.ID, writer: t.writer, sequence: t.sequence, finished: finished, seen: t.c.bus.seen()} // R9.4
	for _, x := range t.extents {
		r.extents = append(r.extents, *x)
	}
	t.last = &r
	return r, nil
}

// Receipt registers a receipt, and returns it framed, for the process that commits.
func (t *Transaction) Receipt(finished bool) ([]byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over != nil {
		return nil, t.over
	}
	r, err := t.receipt(finished)
	if err != nil {
		return nil, err
	}
	e := command(typeRegister)
	e.bytes(t.Token)
	e.receipt(r)
	if _, err := t.c.ask(t.c.until(), partitionOf(t.ID), e.out, is[registered]); err != nil {
		return nil, t.end(err)
	}
	framed := &encoder{out: []byte{level, typeReceipt}}
	framed.receipt(r)
	return framed.out, nil
}

// Ending says how a transaction is committed or prepared. The zero value takes all registered writers.
type Ending struct {
	Receipts [][]byte // of the other writers to take; nil: all registered writers
	Name     *string  // to claim
	Number   *int64   // of the series of that name
	Secret   []byte   // of the coordinator of a prepared transaction, 32 bytes
	Attempt  []byte   // names a prepare: a repeated one has the same name
}

// Commit commits: everything becomes visible at once.
func (t *Transaction) Commit(how Ending) (Outcome, error) { return t.finish(how, false) }

// Prepare makes sure that the transaction can commit. Whoever has the secret decides later, by Decide.
func (t *Transaction) Prepare(how Ending) (Outcome, error) { return t.finish(how, true) }

func (t *Transaction) finish(how Ending, prepares bool) (Outcome, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.prepared != nil && prepares {
		return *t.prepared, nil
	}
	if t.over != nil {
		return Outcome{}, t.over
	}
	var own []receipt
	if len(t.touched) > 0 || t.failed {
		mine, err := t.receipt(true)
		if err != nil {
			return Outcome{}, err
		}
		own = append(own, mine) // R10.1
	}
	for _, data := range how.Receipts {
		if len(data) < 2 || data[0] != level || data[1] != typeReceipt {
			return Outcome{}, &Error{"InvalidArgument", "not a receipt"}
		}
	}
	make := func(wait time.Duration) []byte { return how.command(t.Token, own, wait, prepares) }
	outcome, err := t.c.untilKnown(doubtful{t.ID, t.scope, t.Token, how.Name != nil, prepares, make})
	switch {
	case err != nil:
		return outcome, t.end(err)
	case outcome.State == "PREPARED":
		t.prepared = &outcome
		t.takeNoMore(&Error{"IllegalState", "the transaction is prepared"})
	default:
		t.end(&Error{"AlreadyCommitted", "the transaction is committed"})
	}
	return outcome, nil
}

func (how Ending) command(token []byte, own []receipt, wait time.Duration, prepares bool) []byte {
	e := command(typeCommit)
	e.bytes(token)
	array(e, own, e.receipt)
	if how.Receipts == nil {
		e.null()
	} else {
		e.long(1)
		array(e, how.Receipts, func(framed []byte) { e.fixed(framed[2:]) }) // as they were handed on
	}
	e.textOrNull(how.Name)
	e.long(wait.Milliseconds())
	if how.Number == nil {
		e.null()
	} else {
		e.long(1)
		e.long(*how.Number)
	}
	e.null() // consumed
	if prepares {
		by := sha256.Sum256(how.Secret) // R10.7
		e.long(1)
		e.bytes(by[:])
		e.bytes(how.Attempt)
		e.null() // the secret
	} else {
		e.null()
		e.orNull(how.Secret)
	}
	e.long(0) // validated
	return e.out
}

// Decide commits or aborts a prepared transaction, from any client (R10.8).
func (c *Client) Decide(txnID, secret []byte, commit bool) (Outcome, error) {
	until, data := c.until(), abortCommand(txnID, secret)
	if commit {
		data = Ending{Secret: secret}.command(txnID, nil, time.Until(until)*3/4, false)
	}
	result, _, err := c.bus.ask(until, partitionOf(txnID), data, about(txnID, false))
	if err != nil {
		return Outcome{}, err
	}
	if result == nil {
		return Outcome{}, &Error{"OutcomeUnknown", "the decision was not answered: repeat it"}
	}
	return result.(Outcome), nil
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
	txnID := newID(partition)
	e := command(typeOneShot)
	e.fixed(txnID)
	e.str(scope)
	e.textOrNull(name)
	array(e, events, e.event)
	e.null()  // consumed
	e.long(0) // locks
	make := func(time.Duration) []byte { return e.out }
	return c.untilKnown(doubtful{txnID, scope, nil, name != nil, false, make})
}

// doubtful is a command that commits: it is sent until its outcome is known. The id stays the same (R11.4).
type doubtful struct {
	txnID    []byte
	scope    string
	token    []byte // nil: a one-shot
	claims   bool   // a name or number
	prepares bool
	make     func(wait time.Duration) []byte
}

func (d doubtful) resolve() []byte {
	e := command(typeResolve)
	e.fixed(d.txnID)
	e.str(d.scope)
	e.orNull(d.token)
	return e.out
}

func (c *Client) untilKnown(d doubtful) (Outcome, error) {
	until, partition := c.until(), partitionOf(d.txnID)
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		// A third of the time is left for Resolve, and the controller waits for less than this call (R10.2).
		askUntil := time.Now().Add(time.Until(until) * 2 / 3)
		wait := min(time.Until(askUntil)*3/4, 600*time.Second)
		result, doubt, err := c.bus.ask(askUntil, partition, d.make(wait), about(d.txnID, d.claims))
		if err != nil && (!doubt || isFinal(err)) {
			return Outcome{}, err
		}
		if result == nil { // R11.2; R11.3: an earlier copy may be carried out, whatever this one was answered
			result, _, _ = c.bus.ask(until, partition, d.resolve(), about(d.txnID, false))
		}
		outcome, known := result.(Outcome)
		switch {
		case !known:
		case outcome.State == "COMMITTED" || d.prepares && outcome.State == "PREPARED":
			return outcome, nil
		case outcome.State == "ABORTED" || outcome.State == "OPEN" && err != nil:
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
	_, err := t.c.ask(t.c.until(), partitionOf(t.ID), abortCommand(t.Token, nil), about(t.ID, false))
	if err != nil {
		return err
	}
	t.end(&Error{"TransactionAborted", "the transaction is aborted"})
	return nil
}

func abortCommand(token, secret []byte) []byte {
	e := command(typeAbort)
	e.bytes(token)
	e.str("aborted by the client")
	e.orNull(secret)
	return e.out
}

// Resolve returns the state of a transaction; one that no controller knows is aborted first (section 11).
func (c *Client) Resolve(token []byte) (Outcome, error) {
	t, err := c.Join(token)
	if err != nil {
		return Outcome{}, err
	}
	d := doubtful{txnID: t.ID, scope: t.scope, token: token}
	result, err := c.ask(c.until(), partitionOf(t.ID), d.resolve(), about(t.ID, false))
	if err != nil {
		return Outcome{}, err
	}
	return result.(Outcome), nil
}
