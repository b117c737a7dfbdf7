package server

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

// The answer about a client is remembered for a while. Calls and memory are bounded, whatever addresses a stranger forges.
func TestOutsideCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c outsideCache
		calls := 0
		is := func(a netip.Addr) bool { calls++; return a.As4()[0] == 10 }
		address := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)}) }
		want := func(step string, a netip.Addr, outside bool, called int) {
			t.Helper()
			calls = 0
			if have := c.has(a, is); have != outside || calls != called {
				t.Errorf("%s: %s is outside: %t, want %t; %d calls, want %d", step, a, have, outside, calls, called)
			}
		}
		stranger, pod := netip.MustParseAddr("10.0.0.1"), address(0)
		want("first", stranger, true, 1)
		want("again", stranger, true, 0)
		want("first", pod, false, 1)
		<-time.After(outsideTime - 1)
		want("nearly forgotten", pod, false, 0)
		<-time.After(1)
		want("forgotten", pod, false, 1)
		for i := 1; i < outsideRate; i++ {
			want("a flood", address(i), false, 1)
		}
		want("beyond the rate", address(outsideRate), true, 0)
		want("a known one meanwhile", pod, false, 0)
		<-time.After(time.Second)
		want("a second later", address(outsideRate), false, 1)
		for i := range 3 * outsideMax {
			<-time.After(time.Millisecond)
			if c.has(address(i), is) || len(c.known) > outsideMax {
				t.Fatalf("address %d: %d addresses are remembered", i, len(c.known))
			}
		}
	})
}
