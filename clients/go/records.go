// Package anabranch is a small client of anabranch: transactions on Kafka-compatible logs.
//
// It follows docs/protocol.md. Comments name the rules there, for example R3.3.
package anabranch

import (
	"reflect"

	"github.com/twmb/avro"
)

// level is the feature level of all records of this client (section 2).
const level = 0x01

// State is the state of a transaction.
type State int32

const (
	Open      State = 0
	Committed State = 3
	Aborted   State = 5
)

// The symbols of all states, in their order.
var states = []string{
	"OPEN", "COMMIT_IN_PROGRESS", "FINALIZE_IN_PROGRESS", "COMMITTED",
	"ABORT_IN_PROGRESS", "ABORTED", "PREPARED",
}

func (s State) String() string { return states[s] }

// Header is a header of an event. A nil value is null.
type Header struct {
	Name  string
	Value []byte
}

// Event is one event of a stream "scope/name". A nil key or value is null; Timestamp 0 is the present time.
type Event struct {
	Stream    string
	Key       []byte
	Value     []byte
	Headers   []Header
	Timestamp int64 // Unix milliseconds
}

// ID is the id of a transaction.
type ID = [16]byte

// The records of the protocol: the library makes Avro schemas of them, in which a pointer is a union with null. A field
// of type *unused is always null, and one of type []unused always empty.
type (
	unused    = bool
	findScope struct {
		Scope  string
		Create bool
		Near   *unused
	}
	begin struct {
		TxnID       ID
		Scope       string
		Name        *string
		KeepaliveMs int32
		Secret      [32]byte
		FencingHash *unused
		Snapshot    int64
	}
	touch struct {
		Token  []byte
		Stream string
		Writer int64
	}
	register struct {
		Token   []byte
		Receipt receipt
	}
	receipt struct {
		TxnID    ID
		Writer   int64
		Sequence int32
		Finished bool
		Extents  []extent
		Seen     int64
	}
	extent struct {
		Stream            string
		Partition         int32
		First, End, Count int64
		CRCSum            int64
	}
	commit struct {
		Token     []byte
		Own       []receipt
		Receipts  *[]receipt
		Name      *string
		WaitMs    int32
		Number    *int64
		Consumed  *unused
		Prepare   *unused
		Secret    *unused
		Validated []unused
	}
	oneShot struct {
		TxnID    ID
		Scope    string
		Name     *string
		Events   []event
		Consumed *unused
		Locks    []unused
	}
	event struct {
		Stream    string
		SegmentID int64
		Key       *[]byte
		Value     *[]byte
		Headers   []eventHeader
		Timestamp int64
	}
	eventHeader struct {
		Key   string
		Value *[]byte
	}
	abort struct {
		Token  []byte
		Reason string
		Secret *unused
	}
	resolve struct {
		TxnID ID
		Scope string
		Token *[]byte
	}
	heartbeat struct{ Tokens [][]byte }
	// reply is the head of an answer. Avro writes the branch of a union as a long; the result follows.
	reply struct {
		CorrelationID []byte
		Command       []byte
		HybridTime    int64
		Branch        int64
	}
	refusal   struct{ Code, Message string }
	scopeInfo struct {
		Scope     string
		Partition int32
	}
	begun struct {
		TxnID       ID
		KeepaliveMs int32
		BegunMs     int64
	}
	touched struct {
		Stream   string
		Epoch    int32
		Segments []segment
		IsTable  bool
	}
	segment struct {
		ID, Low, High int64
		Partition     int32
	}
	registered struct{ Sequence int32 }
	ended      struct{ NotOpen []Outcome }
	// Outcome is how a transaction stands.
	Outcome struct {
		TxnID           ID
		State           State
		Scope           string
		Name            *string
		CommitTimestamp int64 // hybrid time
		Committed       int64 // events
		Rejected        int64
		LeftOut         int64
		Reason          string
		BegunMs         int64
		FinishedMs      int64
		KeepaliveMs     int32
		Streams         []string
		Writers         []receipt
		Owner           string
		PreparedMs      int64
		PreparedBy      []byte
		Tables          []tableTime
		Snapshot        int64
		Broken          *brokenLock
	}
	tableTime struct {
		Table string
		Last  int64
	}
	brokenLock struct {
		Table     string
		Key       []byte
		Range     *lockedRange
		Timestamp int64
		By        []byte
	}
	lockedRange struct {
		Low  []byte
		High *[]byte
	}
)

// kind is the record type of a frame, and its schema.
type kind struct {
	number byte
	schema *avro.Schema
}

var kinds = map[reflect.Type]kind{
	reflect.TypeFor[findScope](): {0x01, avro.MustSchemaFor[findScope]()},
	reflect.TypeFor[begin]():     {0x04, avro.MustSchemaFor[begin]()},
	reflect.TypeFor[touch]():     {0x05, avro.MustSchemaFor[touch]()},
	reflect.TypeFor[register]():  {0x06, avro.MustSchemaFor[register]()},
	reflect.TypeFor[commit]():    {0x07, avro.MustSchemaFor[commit]()},
	reflect.TypeFor[oneShot]():   {0x08, avro.MustSchemaFor[oneShot]()},
	reflect.TypeFor[abort]():     {0x09, avro.MustSchemaFor[abort]()},
	reflect.TypeFor[resolve]():   {0x0a, avro.MustSchemaFor[resolve]()},
	reflect.TypeFor[heartbeat](): {0x0c, avro.MustSchemaFor[heartbeat]()},
	reflect.TypeFor[reply]():     {0x20, avro.MustSchemaFor[reply]()},
	reflect.TypeFor[receipt]():   {0x21, avro.MustSchemaFor[receipt]()},
}

func frame[T any](record T) []byte { // R2.1
	kind := kinds[reflect.TypeFor[T]()]
	data, err := kind.schema.AppendEncode([]byte{level, kind.number}, &record)
	if err != nil {
		panic(err) // the schema was made of this type
	}
	return data
}

// parse refuses an unknown level or type before it parses the body (R2.2), and returns what follows the record.
func parse[T any](data []byte) (record T, rest []byte, ok bool) {
	kind := kinds[reflect.TypeFor[T]()]
	if len(data) < 2 || data[0] != level || data[1] != kind.number {
		return record, nil, false
	}
	rest, err := kind.schema.Decode(data[2:], &record)
	return record, rest, err == nil
}

// results parse the answers to this client's commands, by their branch of Reply; nil: it is malformed.
var results = map[int64]func([]byte) any{
	0: result[refusal](), 1: result[scopeInfo](), 3: result[begun](), 4: result[touched](),
	5: result[registered](), 6: result[Outcome](), 7: result[ended](),
}

func result[T any]() func([]byte) any {
	schema := avro.MustSchemaFor[T]()
	return func(data []byte) any {
		var record T
		if rest, err := schema.Decode(data, &record); err != nil || len(rest) > 0 {
			return nil
		}
		return record
	}
}

// parseReply returns no answer for a body that is not exactly one record (R2.2).
func parseReply(data []byte) (head reply, answer any) {
	head, rest, ok := parse[reply](data)
	if decode := results[head.Branch]; ok && decode != nil {
		answer = decode(rest)
	}
	if outcome, is := answer.(Outcome); is && (outcome.State < 0 || int(outcome.State) >= len(states)) {
		answer = nil
	}
	return head, answer
}

// orNull is for fields in which nil is null.
func orNull(data []byte) *[]byte {
	if data == nil {
		return nil
	}
	return &data
}
