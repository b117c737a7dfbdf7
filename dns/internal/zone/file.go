package zone

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
	"unsafe"
)

// fileMagic identifies the format of a saved zone; its last byte is the version. These follow it, integers in network
// order:
//
//   - the serial (4 bytes), the TTL of the SOA (4), and the time of the zone in seconds since 1970 (8);
//   - the number of apexes (4), and the name of each after its length (1);
//   - the number of entries (4), and each after its length (4);
//   - the CRC32c of all bytes before (4).
const fileMagic = "isthmus-zone\x00\x02"

// ErrCorrupt is returned for bytes that are not a complete saved zone.
var ErrCorrupt = errors.New("not a saved zone, or damaged")

// Save writes z for [Load]. made is the time of the zone in seconds since 1970.
func (z *Zone) Save(w io.Writer, made int64) error {
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	buf := bufio.NewWriterSize(io.MultiWriter(w, sum), 1<<16)
	head := []byte(fileMagic)
	head = binary.BigEndian.AppendUint32(head, z.serial)
	head = binary.BigEndian.AppendUint32(head, ttlOf(z.apexes[0].soa))
	head = binary.BigEndian.AppendUint64(head, uint64(made))
	head = binary.BigEndian.AppendUint32(head, uint32(len(z.apexes)))
	for _, a := range z.apexes {
		head = append(append(head, byte(len(a.name))), a.name...)
	}
	head = binary.BigEndian.AppendUint32(head, uint32(z.names))
	if _, err := buf.Write(head); err != nil {
		return fmt.Errorf("save zone: %w", err)
	}
	var length [4]byte
	for e := range z.entries() {
		binary.BigEndian.PutUint32(length[:], uint32(len(e)))
		_, err := buf.Write(length[:])
		if err == nil {
			_, err = buf.WriteString(string(e))
		}
		if err != nil {
			return fmt.Errorf("save zone: %w", err)
		}
	}
	if err := buf.Flush(); err != nil {
		return fmt.Errorf("save zone: %w", err)
	}
	if _, err := w.Write(binary.BigEndian.AppendUint32(nil, sum.Sum32())); err != nil {
		return fmt.Errorf("save zone: %w", err)
	}
	return nil
}

// Load returns the zone that saved holds, and its time. Every error is ErrCorrupt. saved must not change during the call;
// the zone keeps no reference to it.
func Load(saved []byte) (z *Zone, made int64, err error) {
	end := len(saved) - 4
	if end < 0 || !bytes.HasPrefix(saved, []byte(fileMagic)) {
		return nil, 0, fmt.Errorf("%w: it does not begin with the magic number", ErrCorrupt)
	}
	if crc32.Checksum(saved[:end], crc32.MakeTable(crc32.Castagnoli)) != binary.BigEndian.Uint32(saved[end:]) {
		return nil, 0, fmt.Errorf("%w: its checksum is wrong", ErrCorrupt)
	}
	body := saved[len(fileMagic):end]
	r := reader{rest: unsafe.String(unsafe.SliceData(body), len(body))} // valid until all entries are copied into shards
	z = &Zone{shards: make([]shard, 1<<shardBits), serial: r.uint32()}
	c := Config{TTL: r.uint32()}
	seconds := r.uint64()
	z.apexes = c.apexes(z.serial)[:0:0]
	soa := c.apexes(z.serial)[0].soa
	for range r.count() {
		name := r.take(int(r.uint8()))
		if !isName(name) {
			return nil, 0, fmt.Errorf("%w: an apex is not a name", ErrCorrupt)
		}
		z.apexes = append(z.apexes, newApex(strings.Clone(name), soa))
	}
	byShard := make([][]entry, 1<<shardBits)
	for range r.count() {
		text := r.take(int(r.uint32()))
		if !isWellFormed(text) {
			return nil, 0, fmt.Errorf("%w: an entry is malformed", ErrCorrupt)
		}
		e := entry(text)
		at := shardOf(e.key())
		byShard[at] = append(byShard[at], e)
		z.count(e, 1)
	}
	if r.short || len(r.rest) > 0 || len(z.apexes) == 0 {
		return nil, 0, fmt.Errorf("%w: its lengths do not add up", ErrCorrupt)
	}
	for at, entries := range byShard {
		z.shards[at] = makeShard(entries)
	}
	return z, int64(seconds), nil
}

// reader reads from the front of rest. Once rest is too short, it returns zeros and sets short.
type reader struct {
	rest  string
	short bool
}

func (r *reader) take(n int) string {
	if n > len(r.rest) {
		r.rest, r.short = "", true
		return "\x00\x00\x00\x00\x00\x00\x00\x00"[:min(n, 8)]
	}
	taken := r.rest[:n]
	r.rest = r.rest[n:]
	return taken
}

func (r *reader) uint8() uint8   { return r.take(1)[0] }
func (r *reader) uint32() uint32 { return binary.BigEndian.Uint32([]byte(r.take(4))) }
func (r *reader) uint64() uint64 { return binary.BigEndian.Uint64([]byte(r.take(8))) }

// count reads the number of elements that follow, each at least one byte long.
func (r *reader) count() uint32 {
	n := r.uint32()
	if uint64(n) > uint64(len(r.rest)) {
		r.rest, r.short = "", true
		return 0
	}
	return n
}
