package server

import (
	"hash/maphash"
	"net/netip"
	"sync"
	"time"
)

// buckets is how many clients one socket tells apart by their use of it. Those that meet in one are limited together.
const buckets = 4096

// rateLimit holds clients that ask too often to a rate, by a token bucket each that fills in a second. It is for one
// goroutine. A client is an IPv4 address or an IPv6 /64.
type rateLimit struct {
	rate int32 // answers a second; 0: no limit
	last [buckets]uint32
	left [buckets]int32
}

var clientSeed = maphash.MakeSeed()

// allows reports whether a client may have an answer at a time, in seconds of any clock.
func (l *rateLimit) allows(client netip.Addr, second uint32) bool {
	if l.rate == 0 {
		return true
	}
	i := bucketOf(client)
	if l.last[i] != second {
		l.last[i], l.left[i] = second, l.rate
	}
	l.left[i]--
	return l.left[i] >= 0
}

// every reports whether this one of the answers that a client must not have is one in n.
func (l *rateLimit) every(client netip.Addr, n int32) bool { return l.left[bucketOf(client)]%n == 0 }

func bucketOf(client netip.Addr) uint64 {
	b := client.As16()
	if client.Is4() || client.Is4In6() {
		return maphash.Bytes(clientSeed, b[:]) % buckets
	}
	return maphash.Bytes(clientSeed, b[:8]) % buckets
}

// connLimit counts open connections, in all and by client.
type connLimit struct {
	all, each int

	mu   sync.Mutex // guards what follows
	open int
	by   map[netip.Addr]int
}

// enter counts a connection in, or reports that it is one too many.
func (l *connLimit) enter(client netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all > 0 && l.open >= l.all || l.each > 0 && l.by[client] >= l.each {
		return false
	}
	if l.by == nil {
		l.by = map[netip.Addr]int{}
	}
	l.open++
	l.by[client]++
	return true
}

func (l *connLimit) leave(client netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if l.by[client]--; l.by[client] == 0 {
		delete(l.by, client)
	}
}

// clock tells seconds for less than what the system's clock costs at each question: it looks at it every so many.
type clock struct {
	second uint32
	asked  int
}

const asksPerLook = 64

func (c *clock) now() uint32 {
	if c.asked%asksPerLook == 0 {
		c.second = uint32(time.Now().Unix())
	}
	c.asked++
	return c.second
}

// count returns how many connections are open.
func (l *connLimit) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open
}
