package main

import (
	"encoding/binary"
	"io"
	"net"
	"sync"

	"github.com/twmb/franz-go/pkg/kbin"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const apiVersions = 18

// listener gives connections whose requests and answers go through the rules.
type listener struct {
	net.Listener
	rules *rules
}

func (l listener) Accept() (net.Conn, error) {
	inner, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	made := &conn{Conn: inner, rules: l.rules, asked: make(map[int32]asked)}
	made.free = sync.NewCond(&made.lock)
	return made, nil
}

// asked is a request that the cluster has not answered yet.
type asked struct {
	key, version int16
	patch        func(kmsg.Response)
}

type conn struct {
	net.Conn
	rules *rules
	rest  []byte // of the request that the cluster reads
	lock  sync.Mutex
	free  *sync.Cond
	asked map[int32]asked
	ended bool
}

// Read gives the cluster the requests that reach it, as the rules leave them.
func (c *conn) Read(into []byte) (int, error) {
	for len(c.rest) == 0 {
		frame, err := c.next()
		if err != nil {
			return 0, err
		}
		c.rest = frame
	}
	count := copy(into, c.rest)
	c.rest = c.rest[count:]
	return count, nil
}

// next is the next request's frame; nothing if it was answered here.
func (c *conn) next() ([]byte, error) {
	size := make([]byte, 4)
	if _, err := io.ReadFull(c.Conn, size); err != nil {
		return nil, err
	}
	body := make([]byte, binary.BigEndian.Uint32(size))
	if _, err := io.ReadFull(c.Conn, body); err != nil {
		return nil, err
	}
	reader := kbin.Reader{Src: body}
	key, version, number := reader.Int16(), reader.Int16(), reader.Int32()
	reader.NullableString()
	request := kmsg.RequestForKey(key)
	if request == nil || !c.rules.offers(key, version) {
		return nil, io.EOF // as brokers do with a call that they do not offer
	}
	request.SetVersion(version)
	if request.IsFlexible() {
		kmsg.SkipTags(&reader)
	}
	header := body[:len(body)-len(reader.Src)]
	var patch func(kmsg.Response)
	if c.rules.judges(key) {
		if err := request.ReadFrom(reader.Src); err != nil {
			return nil, err
		}
		answer, after := c.rules.request(request)
		if answer != nil {
			answer.SetVersion(version)
			return nil, c.answer(number, answer)
		}
		patch = after
		body = request.AppendTo(append([]byte(nil), header...))
	}
	if produce, is := request.(*kmsg.ProduceRequest); !is || !c.rules.judges(key) || produce.Acks != 0 {
		c.lock.Lock()
		c.asked[number] = asked{key, version, patch}
		c.lock.Unlock()
	}
	frame := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	return append(frame, body...), nil
}

// answer answers a request here, after those before it.
func (c *conn) answer(number int32, answer kmsg.Response) error {
	c.lock.Lock()
	for len(c.asked) > 0 && !c.ended {
		c.free.Wait()
	}
	c.lock.Unlock()
	_, err := c.Conn.Write(framed(number, answer))
	return err
}

// Write gets one whole answer of the cluster.
func (c *conn) Write(frame []byte) (int, error) {
	number := int32(binary.BigEndian.Uint32(frame[4:8]))
	c.lock.Lock()
	of := c.asked[number]
	c.lock.Unlock()
	out := frame
	if of.patch != nil {
		answer := kmsg.ResponseForKey(of.key)
		answer.SetVersion(of.version)
		body := frame[8:]
		if answer.IsFlexible() && of.key != apiVersions {
			body = body[1:]
		}
		// An answer to too high a version of ApiVersions is of version 0, and stays as it is.
		if answer.ReadFrom(body) == nil {
			of.patch(answer)
			out = framed(number, answer)
		}
	}
	_, err := c.Conn.Write(out)
	c.lock.Lock()
	delete(c.asked, number)
	c.free.Broadcast()
	c.lock.Unlock()
	return len(frame), err
}

func (c *conn) Close() error {
	c.lock.Lock()
	c.ended = true
	c.free.Broadcast()
	c.lock.Unlock()
	return c.Conn.Close()
}

func framed(number int32, answer kmsg.Response) []byte {
	out := make([]byte, 8)
	binary.BigEndian.PutUint32(out[4:], uint32(number))
	if answer.IsFlexible() && answer.Key() != apiVersions {
		out = append(out, 0)
	}
	out = answer.AppendTo(out)
	binary.BigEndian.PutUint32(out, uint32(len(out)-4))
	return out
}
