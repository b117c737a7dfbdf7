package server

import (
	"net/netip"
	"sync"
	"time"
)

const (
	// outsideTime is how long the answer of Config.Outside is believed.
	outsideTime = 10 * time.Second
	// outsideRate bounds the calls in a second: each takes some 10 us, and a stranger may forge any number of addresses.
	outsideRate = 1000
	// outsideMax bounds the remembered addresses.
	outsideMax = 4096
)

// outsideCache remembers which clients are outside of this machine.
type outsideCache struct {
	mu    sync.Mutex
	known map[netip.Addr]outsideAnswer
	since time.Time // the beginning of the second in which calls are counted
	calls int
}

type outsideAnswer struct {
	outside bool
	until   time.Time
}

// has reports whether a client is outside, by is. Beyond outsideRate calls in a second every unknown client is.
func (c *outsideCache) has(client netip.Addr, is func(netip.Addr) bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if a, ok := c.known[client]; ok && now.Before(a.until) {
		return a.outside
	}
	if now.Sub(c.since) >= time.Second {
		c.since, c.calls = now, 0
	}
	if c.calls++; c.calls > outsideRate {
		return true
	}
	if c.known == nil || len(c.known) >= outsideMax {
		c.known = map[netip.Addr]outsideAnswer{}
	}
	a := outsideAnswer{is(client), now.Add(outsideTime)}
	c.known[client] = a
	return a.outside
}
