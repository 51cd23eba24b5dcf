// The client as a child of the conformance kit (docs/conformance.md): `anabranch conformance -- ./conformance`.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"anabranch"
)

type request struct {
	ID          int64       `json:"id"`
	Op          string      `json:"op"`
	Bootstrap   string      `json:"bootstrap"`
	Prefix      string      `json:"prefix"`
	TimeoutMs   int64       `json:"timeout_ms"`
	Scope       string      `json:"scope"`
	Stream      string      `json:"stream"`
	Name        *string     `json:"name"`
	Number      *int64      `json:"number"`
	KeepaliveMs int64       `json:"keepalive_ms"`
	Txn         string      `json:"txn"`
	Token       []byte      `json:"token"`
	Receipts    *[][]byte   `json:"receipts"`
	Finished    bool        `json:"finished"`
	Events      []jsonEvent `json:"events"`
	InFlight    int         `json:"in_flight"`
	DurationS   float64     `json:"duration_s"`
	Count       int         `json:"count"`
	ValueBytes  int         `json:"value_bytes"`
}

// A pointer tells null from empty bytes.
type jsonEvent struct {
	Stream    string            `json:"stream"`
	Key       *[]byte           `json:"key"`
	Value     *[]byte           `json:"value"`
	Headers   []json.RawMessage `json:"headers"`
	Timestamp *int64            `json:"timestamp"`
}

func orNil(data *[]byte) []byte {
	if data == nil {
		return nil
	}
	return append([]byte{}, *data...)
}

func eventsOf(given []jsonEvent) ([]anabranch.Event, error) {
	events := make([]anabranch.Event, len(given))
	for i, g := range given {
		events[i] = anabranch.Event{Stream: g.Stream, Key: orNil(g.Key), Value: orNil(g.Value)}
		if g.Timestamp != nil {
			events[i].Timestamp = *g.Timestamp
		}
		for _, raw := range g.Headers {
			var name string
			var value *[]byte
			if err := json.Unmarshal(raw, &[]any{&name, &value}); err != nil {
				return nil, err
			}
			events[i].Headers = append(events[i].Headers, anabranch.Header{Name: name, Value: orNil(value)})
		}
	}
	return events, nil
}

type child struct {
	mu        sync.Mutex
	bootstrap string
	client    *anabranch.Client
	handles   map[string]*anabranch.Transaction
	out       *bufio.Writer
}

func (c *child) keep(t *anabranch.Transaction) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := fmt.Sprint(len(c.handles) + 1)
	c.handles[name] = t
	return name
}

func (c *child) write(answer map[string]any) {
	line, _ := json.Marshal(answer)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out.Write(append(line, '\n'))
	c.out.Flush()
}

func outcomeOf(o anabranch.Outcome, err error) (any, error) {
	return map[string]any{"outcome": map[string]any{
		"txn_id": o.TxnID[:], "state": o.State.String(), "commit_timestamp": o.CommitTimestamp,
		"committed": o.Committed, "rejected": o.Rejected, "left_out": o.LeftOut,
	}}, err
}

func (c *child) answer(r request) {
	result, err := c.do(r)
	var named *anabranch.Error
	switch {
	case errors.As(err, &named):
		c.write(map[string]any{"id": r.ID, "error": named.Name, "message": named.Message})
	case err != nil:
		c.write(map[string]any{"id": r.ID, "error": "Failed", "message": err.Error()})
	default:
		c.write(map[string]any{"id": r.ID, "ok": result})
	}
}

func (c *child) do(r request) (any, error) {
	none := map[string]any{}
	if r.Op == "hello" {
		return map[string]any{"client": "anabranch-go (franz-go)"}, nil
	}
	if r.Op == "connect" {
		return none, c.connect(r)
	}
	events, err := eventsOf(r.Events)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	client, txn := c.client, c.handles[r.Txn]
	c.mu.Unlock()
	if client == nil || txn == nil && r.Txn != "" {
		return nil, &anabranch.Error{Name: "IllegalState", Message: "no such client or transaction"}
	}
	switch r.Op {
	case "begin":
		began, outcome, err := client.Begin(r.Scope, r.Name, time.Duration(r.KeepaliveMs)*time.Millisecond)
		if err != nil {
			return nil, err
		}
		if outcome != nil {
			return outcomeOf(*outcome, nil)
		}
		return map[string]any{"txn": c.keep(began), "token": began.Token}, nil
	case "join":
		joined, err := client.Join(r.Token)
		if err != nil {
			return nil, err
		}
		return map[string]any{"txn": c.keep(joined)}, nil
	case "write":
		return none, txn.Write(events)
	case "receipt":
		framed, err := txn.Receipt(r.Finished)
		return map[string]any{"receipt": framed}, err
	case "commit":
		var receipts [][]byte
		if r.Receipts != nil {
			receipts = append([][]byte{}, *r.Receipts...)
		}
		return outcomeOf(txn.Commit(anabranch.Ending{Receipts: receipts, Name: r.Name, Number: r.Number}))
	case "read":
		return read(c.bootstrap, r.Stream)
	case "abort":
		return none, txn.Abort()
	case "resolve":
		return outcomeOf(client.Resolve(r.Token))
	case "one_shot":
		return outcomeOf(client.OneShot(r.Scope, r.Name, events))
	case "plain":
		return none, client.WritePlain(events)
	case "load":
		return load(client, r)
	}
	return nil, &anabranch.Error{Name: "NotOffered", Message: r.Op}
}

func (c *child) connect(r request) error {
	client, err := anabranch.Connect(r.Bootstrap, r.Prefix, time.Duration(r.TimeoutMs)*time.Millisecond)
	if err != nil {
		return err
	}
	c.mu.Lock()
	former := c.client
	c.bootstrap, c.client, c.handles = r.Bootstrap, client, map[string]*anabranch.Transaction{}
	c.mu.Unlock()
	if former != nil {
		former.Close()
	}
	return nil
}

// read reads a stream as any consumer does, with read_committed, up to its end (section 13).
func read(bootstrap, stream string) (any, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	kafka, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(bootstrap, ",")...),
		kgo.ConsumeTopics(strings.Replace(stream, "/", ".", 1)),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.KeepControlRecords(), // a marker may be the last record
	)
	if err != nil {
		return nil, err
	}
	defer kafka.Close()
	ends, err := kadm.NewClient(kafka).ListCommittedOffsets(ctx, strings.Replace(stream, "/", ".", 1))
	if err != nil {
		return nil, err
	}
	left, events := map[int32]int64{}, []map[string]any{}
	ends.Each(func(end kadm.ListedOffset) {
		if end.Offset > 0 {
			left[end.Partition] = end.Offset
		}
	})
	for len(left) > 0 && ctx.Err() == nil {
		kafka.PollFetches(ctx).EachRecord(func(record *kgo.Record) {
			if record.Offset+1 >= left[record.Partition] {
				delete(left, record.Partition)
			}
			if !record.Attrs.IsControl() {
				events = append(events, eventOf(record))
			}
		})
	}
	return map[string]any{"events": events}, ctx.Err()
}

func eventOf(record *kgo.Record) map[string]any {
	headers := [][2]any{}
	for _, h := range record.Headers {
		if !strings.HasPrefix(h.Key, "ab.") {
			headers = append(headers, [2]any{h.Key, h.Value})
		}
	}
	return map[string]any{
		"key": record.Key, "value": record.Value, "headers": headers,
		"timestamp": record.Timestamp.UnixMilli(), "commit_timestamp": nil,
	}
}

// load commits one-shots, as many at the same time as asked for.
func load(client *anabranch.Client, r request) (any, error) {
	began, value := time.Now(), make([]byte, r.ValueBytes)
	until := began.Add(time.Duration(r.DurationS * float64(time.Second)))
	var committed atomic.Int64
	failed := make(chan error, r.InFlight)
	var all sync.WaitGroup
	for n := range r.InFlight {
		all.Go(func() {
			for number := 0; time.Now().Before(until); number++ {
				events := make([]anabranch.Event, r.Count)
				for i := range events {
					key := fmt.Appendf(nil, "%d-%d-%d", n, number, i)
					events[i] = anabranch.Event{Stream: r.Stream, Key: key, Value: value}
				}
				if _, err := client.OneShot(r.Scope, nil, events); err != nil {
					failed <- err
					return
				}
				committed.Add(1)
			}
		})
	}
	all.Wait()
	select {
	case err := <-failed:
		return nil, err
	default:
		return map[string]any{"committed": committed.Load(), "seconds": time.Since(began).Seconds()}, nil
	}
}

func main() {
	c := &child{handles: map[string]*anabranch.Transaction{}, out: bufio.NewWriter(os.Stdout)}
	lines := json.NewDecoder(bufio.NewReader(os.Stdin))
	for {
		var r request
		if lines.Decode(&r) != nil {
			return // the input has ended
		}
		go c.answer(r)
	}
}
