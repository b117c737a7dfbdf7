package flows

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// BenchmarkExchange opens 2,000 flows a second, and reports the CPU time that both gateways take for one.
func BenchmarkExchange(b *testing.B) {
	g := newGateways(b, "gateway-1", "gateway-2")
	g[0].SetPeers([]desired.PeerGateway{g[1].self})
	g[1].SetPeers([]desired.PeerGateway{g[0].self})
	g[0].balancer.opens <- flow(1)
	await(b, func() bool { return g[1].balancer.knows(flow(1)) }, "no flows are sent")
	g[1].balancer.forget()
	var before, after unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &before); err != nil {
		b.Fatal(err)
	}
	b.ResetTimer()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for n := range b.N {
		if n%2 == 0 {
			<-tick.C
		}
		g[0].balancer.opens <- flow(uint16(n) | 1)
	}
	await(b, func() bool { return g[1].balancer.count() == b.N }, "not every flow is sent")
	b.StopTimer()
	if err := unix.Getrusage(unix.RUSAGE_SELF, &after); err != nil {
		b.Fatal(err)
	}
	spent := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
	b.ReportMetric(float64(spent)/1e3/float64(b.N), "us/flow")
}
