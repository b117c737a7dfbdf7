package server

import (
	"hash/maphash"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Limits bounds the resources that clients may use. Zero means no limit.
//
// Strangers are clients that the address they ask does not serve; see [Config].
type Limits struct {
	// Rate is the number of answers per second that a client gets over UDP from one socket; an address has one socket for
	// each CPU. Above the rate, every second answer is truncated, so that the client retries over TCP, and the others are
	// dropped.
	Rate int
	// Amplified is the number of answers per second, of those longer than three times their question (as in RFC 9000 section
	// 8.1), that a client of another machine gets over UDP from one socket. Its further ones are truncated: whoever forges its
	// address cannot use the server to flood it. Zero means no limit.
	Amplified int
	// Refusals is the number of REFUSED answers per second to strangers over UDP: to all of them, and to a /24 or /48 from one
	// socket. Their other questions are dropped.
	Refusals Budget
	// Pods, Neighbours and Strangers are numbers of open TCP connections. Strangers have few, and neighbours cannot take those
	// of pods. Each counts one address for pods, which share the /64 of their node, and an IPv4 address or a /64 for others.
	Pods, Neighbours, Strangers Budget
	// Unread is the number of answers over TCP above 4 KiB that clients have not yet read: one limit for pods and one for
	// neighbours. The connection of a further one is closed.
	Unread Budget
}

// Budget is a limit for all clients together and one for each of them. Zero means no limit.
type Budget struct{ All, Each int }

// The leading bytes of a 16-byte address that tell clients or blocks of clients apart, in IPv4 (which is mapped) and IPv6.
type granularity struct{ ipv4, ipv6 int }

var (
	perClient = granularity{16, 8} // an IPv4 address, an IPv6 /64
	perBlock  = granularity{15, 6} // an IPv4 /24, an IPv6 /48
)

// buckets is the number of clients that one socket can tell apart. Clients whose hashes collide share one limit.
const buckets = 4096

// rateLimit limits the answers per second of each client: a budget that is refilled every second. Only one goroutine may use
// it.
type rateLimit struct {
	per  granularity
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
	i := l.bucketOf(client)
	if l.last[i] != second {
		l.last[i], l.left[i] = second, l.rate
	}
	l.left[i]--
	return l.left[i] >= 0
}

// every reports true for every n-th answer of a client above the limit.
func (l *rateLimit) every(client netip.Addr, n int32) bool { return l.left[l.bucketOf(client)]%n == 0 }

func (l *rateLimit) bucketOf(client netip.Addr) uint64 {
	b := client.As16()
	if client.Is4() || client.Is4In6() {
		return maphash.Bytes(clientSeed, b[:l.per.ipv4]) % buckets
	}
	return maphash.Bytes(clientSeed, b[:l.per.ipv6]) % buckets
}

// sharedLimit limits answers per second of all clients of all sockets. Above the limit it writes no memory, so that a flood
// on all CPUs does not slow it down.
type sharedLimit struct {
	rate   int32 // 0 means no limit
	second atomic.Uint32
	left   atomic.Int32 // in that second
}

// allows reports whether there may be another answer in the given second.
func (l *sharedLimit) allows(second uint32) bool {
	if l.rate == 0 {
		return true
	}
	if last := l.second.Load(); last < second && l.second.CompareAndSwap(last, second) {
		l.left.Store(l.rate)
	}
	return l.left.Load() > 0 && l.left.Add(-1) >= 0
}

// slotLimit limits slots, such as open connections, of all clients and of each.
type slotLimit struct {
	Budget

	// whole counts each IPv6 address by itself, not by its /64.
	whole bool

	mu    sync.Mutex // guards the fields below
	taken int
	by    map[netip.Addr]int
}

// enter takes a slot for a client. It returns false if that would exceed a limit: the client's own one if each is true.
func (l *slotLimit) enter(client netip.Addr) (ok, each bool) {
	client = l.key(client)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.Each > 0 && l.by[client] >= l.Each:
		return false, true
	case l.All > 0 && l.taken >= l.All:
		return false, false
	}
	if l.by == nil {
		l.by = map[netip.Addr]int{}
	}
	l.taken++
	l.by[client]++
	return true, false
}

// leave frees a slot that enter has taken.
func (l *slotLimit) leave(client netip.Addr) {
	client = l.key(client)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.taken--
	if l.by[client]--; l.by[client] == 0 {
		delete(l.by, client)
	}
}

// key returns the address by which a client is counted.
func (l *slotLimit) key(client netip.Addr) netip.Addr {
	const network = 64
	if l.whole || client.Is4() {
		return client
	}
	p, _ := client.Prefix(network) // fails for no IPv6 address
	return p.Addr()
}

// count returns the number of taken slots.
func (l *slotLimit) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.taken
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
