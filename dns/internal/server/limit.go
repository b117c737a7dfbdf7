package server

import (
	"hash/maphash"
	"net/netip"
	"sync"
	"time"
)

// buckets is the number of clients that one socket can tell apart. Clients whose hashes collide share one limit.
const buckets = 4096

// rateLimit limits the answers per second of each client: a budget that is refilled every second. A client is an IPv4
// address or an IPv6 /64. Only one goroutine may use it.
type rateLimit struct {
	rate int32           // answers per second; 0 means no limit
	last [buckets]uint32 // second of the last refill
	left [buckets]int32  // answers left in that second; negative above the limit
}

var clientSeed = maphash.MakeSeed()

// allows reports whether a client may get an answer in the current second, which may be of any clock.
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

// every reports true for every n-th answer of a client above the limit.
func (l *rateLimit) every(client netip.Addr, n int32) bool { return l.left[bucketOf(client)]%n == 0 }

func bucketOf(client netip.Addr) uint64 {
	b := client.As16()
	if client.Is4() || client.Is4In6() {
		return maphash.Bytes(clientSeed, b[:]) % buckets
	}
	return maphash.Bytes(clientSeed, b[:8]) % buckets
}

// connLimit limits open connections, in total and for each client. A limit of 0 means none.
type connLimit struct {
	all, each int

	mu   sync.Mutex // guards the fields below
	open int
	by   map[netip.Addr]int
}

// enter counts a connection of client, or returns false if that would exceed a limit.
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

// leave uncounts a connection that enter has counted.
func (l *connLimit) leave(client netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if l.by[client]--; l.by[client] == 0 {
		delete(l.by, client)
	}
}

// clock returns the time in seconds. It reads the system clock only once in asksPerLook calls, as doing so for each
// question would cost too much.
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

// count returns the number of open connections.
func (l *connLimit) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open
}
