// Package anabranch is a small client of anabranch: transactions on Kafka-compatible logs.
//
// It follows docs/protocol.md. Comments name the rules there, for example R3.3.
package anabranch

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Record types, byte 1 of the frame (section 2).
const (
	typeFindScope = 0x01
	typeBegin     = 0x04
	typeTouch     = 0x05
	typeRegister  = 0x06
	typeCommit    = 0x07
	typeOneShot   = 0x08
	typeAbort     = 0x09
	typeResolve   = 0x0a
	typeHeartbeat = 0x0c
	typeReply     = 0x20
	typeReceipt   = 0x21
	level         = 0x01
)

var states = []string{
	"OPEN", "COMMIT_IN_PROGRESS", "FINALIZE_IN_PROGRESS", "COMMITTED",
	"ABORT_IN_PROGRESS", "ABORTED", "PREPARED",
}

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

// Outcome is how a transaction stands.
type Outcome struct {
	TxnID           []byte
	State           string
	Scope           string
	Name            *string
	CommitTimestamp int64
	Committed       int64
	Rejected        int64
	LeftOut         int64
}

type refusal struct{ code, message string }
type scopeInfo struct{ partition int32 }
type begun struct {
	keepaliveMs int32
	begunMs     int64
}
type segment struct {
	low, high int64
	partition int32
}
type touched struct {
	epoch    int32
	segments []segment
}
type registered struct{}
type ended struct{ notOpen []Outcome }

type extent struct {
	stream            string
	partition         int32
	first, end, count int64
	crcSum            int64
}

type receipt struct {
	txnID    []byte
	writer   int64
	sequence int32
	finished bool
	extents  []extent
	seen     int64
}

// encoder writes Avro's binary encoding: the fields of a record one after the other.
type encoder struct{ out []byte }

func command(kind byte) *encoder { return &encoder{out: []byte{level, kind}} } // R2.1

func (e *encoder) fixed(data []byte) { e.out = append(e.out, data...) }
func (e *encoder) long(n int64)      { e.out = binary.AppendVarint(e.out, n) } // zigzag, as int too
func (e *encoder) str(text string)   { e.bytes([]byte(text)) }
func (e *encoder) bytes(data []byte) { e.long(int64(len(data))); e.fixed(data) }
func (e *encoder) null()             { e.long(0) } // the first branch of each union here

func (e *encoder) flag(is bool) {
	if is {
		e.out = append(e.out, 1)
	} else {
		e.out = append(e.out, 0)
	}
}

func (e *encoder) orNull(data []byte) {
	if data == nil {
		e.null()
	} else {
		e.long(1)
		e.bytes(data)
	}
}

func (e *encoder) textOrNull(text *string) {
	if text == nil {
		e.null()
	} else {
		e.orNull(append([]byte{}, *text...))
	}
}

// An array is one block with its count, and an end.
func array[T any](e *encoder, items []T, put func(T)) {
	if len(items) > 0 {
		e.long(int64(len(items)))
		for _, item := range items {
			put(item)
		}
	}
	e.long(0)
}

func (e *encoder) receipt(r receipt) {
	e.fixed(r.txnID)
	e.long(r.writer)
	e.long(int64(r.sequence))
	e.flag(r.finished)
	array(e, r.extents, func(x extent) {
		e.str(x.stream)
		e.long(int64(x.partition))
		e.long(x.first)
		e.long(x.end)
		e.long(x.count)
		e.long(x.crcSum)
	})
	e.long(r.seen)
}

func (e *encoder) event(event Event) {
	e.str(event.Stream)
	e.long(-1) // any segment, if the key is null
	e.orNull(event.Key)
	e.orNull(event.Value)
	array(e, event.Headers, func(h Header) { e.str(h.Name); e.orNull(h.Value) })
	if event.Timestamp == 0 {
		e.long(-1)
	} else {
		e.long(event.Timestamp)
	}
}

var errMalformed = errors.New("not a record of this protocol")

// decoder reads it. After the first fault all reads return zero values, and err says it.
type decoder struct {
	in  []byte
	err error
}

func (d *decoder) fixed(size int64) []byte {
	if d.err != nil || size < 0 || size > int64(len(d.in)) {
		d.err = errMalformed
		return nil
	}
	data := d.in[:size]
	d.in = d.in[size:]
	return data
}

func (d *decoder) long() int64 {
	n, size := binary.Varint(d.in)
	if size <= 0 {
		d.err = errMalformed
		d.in = nil
		return 0
	}
	d.in = d.in[size:]
	return n
}

func (d *decoder) int() int32 {
	n := d.long()
	if n != int64(int32(n)) {
		d.err = errMalformed
	}
	return int32(n)
}

func (d *decoder) bytes() []byte { return d.fixed(d.long()) }
func (d *decoder) str() string   { return string(d.bytes()) }

func (d *decoder) flag() bool {
	data := d.fixed(1)
	if d.err != nil || data[0] > 1 {
		d.err = errMalformed
		return false
	}
	return data[0] == 1
}

func (d *decoder) branch(count int64) int64 {
	at := d.long()
	if at < 0 || at >= count {
		d.err = errMalformed
	}
	return at
}

// A block with a negative count has its size in bytes after the count.
func (d *decoder) array(item func()) {
	for d.err == nil {
		count := d.long()
		if count == 0 {
			return
		}
		if count < 0 {
			count = -count
			d.long()
		}
		for ; count > 0 && d.err == nil; count-- {
			item()
		}
	}
}

func (d *decoder) outcome() Outcome {
	var o Outcome
	o.TxnID = d.fixed(16)
	if at := d.branch(int64(len(states))); d.err == nil {
		o.State = states[at]
	}
	o.Scope = d.str()
	if d.branch(2) == 1 {
		name := d.str()
		o.Name = &name
	}
	o.CommitTimestamp = d.long()
	o.Committed, o.Rejected, o.LeftOut = d.long(), d.long(), d.long()
	d.str()                     // reason
	d.long()                    // begun
	d.long()                    // finished
	d.int()                     // keepalive
	d.array(func() { d.str() }) // streams
	d.array(d.skipReceipt)      // writers
	d.str()                     // owner
	d.long()                    // prepared_ms
	d.bytes()                   // prepared_by
	d.array(func() { d.str(); d.long() })
	d.long()              // snapshot
	if d.branch(2) == 1 { // broken
		d.str()
		d.bytes()
		if d.branch(2) == 1 {
			d.bytes()
			if d.branch(2) == 1 {
				d.bytes()
			}
		}
		d.long()
		d.bytes()
	}
	return o
}

func (d *decoder) skipReceipt() {
	d.fixed(16)
	d.long()
	d.int()
	d.flag()
	d.array(func() {
		d.str()
		d.int()
		d.long()
		d.long()
		d.long()
		d.long()
	})
	d.long()
}

func (d *decoder) touched() touched {
	d.str()
	t := touched{epoch: d.int()}
	d.array(func() {
		d.long()
		t.segments = append(t.segments, segment{d.long(), d.long(), d.int()})
	})
	d.flag()
	return t
}

// reply is an answer of a controller; result is one of the types above.
type reply struct {
	command    []byte
	hybridTime int64
	result     any
}

// parseReply refuses an unknown level or type before it parses the body, and a body that is not one record (R2.2).
func parseReply(data []byte) (reply, error) {
	if len(data) < 2 || data[0] != level || data[1] != typeReply {
		return reply{}, errMalformed
	}
	d := &decoder{in: data[2:]}
	d.bytes() // the correlation id again
	r := reply{command: d.bytes(), hybridTime: d.long()}
	switch branch := d.branch(22); branch {
	case 0:
		r.result = refusal{d.str(), d.str()}
	case 1:
		d.str()
		r.result = scopeInfo{d.int()}
	case 3:
		d.fixed(16)
		r.result = begun{d.int(), d.long()}
	case 4:
		r.result = d.touched()
	case 5:
		d.int()
		r.result = registered{}
	case 6:
		r.result = d.outcome()
	case 7:
		var e ended
		d.array(func() { e.notOpen = append(e.notOpen, d.outcome()) })
		r.result = e
	default: // an answer to a command that this client never sends
		return reply{}, fmt.Errorf("%w: result %d", errMalformed, branch)
	}
	if d.err != nil || len(d.in) > 0 {
		return reply{}, errMalformed
	}
	return r, nil
}
