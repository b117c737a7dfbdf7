// Package announcertest runs announcers on the two gateways of an edge, as an agent does, and tests what agents rely on.
package announcertest

import (
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/subprocess"
)

// Lab is an edge whose gateways answer at VIPs, with the process of an announcer on each gateway that has one.
type Lab struct {
	*edge.Lab
	Announcers [2]*subprocess.Process // by gateway
}

// NewLab returns a lab without announcers, which ends with the test.
func NewLab(t *testing.T, vips ...netip.Addr) *Lab {
	t.Helper()
	netlab.Privileged(t)
	e, err := edge.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	for i := range e.Gateways {
		for _, a := range vips {
			stop, err := e.Echo(i, a)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = stop() })
		}
	}
	return &Lab{Lab: e}
}

// Start starts the announcer of a gateway and applies a state. The test's program must call subprocess.Main, which
// receives the argument.
func (l *Lab) Start(t *testing.T, gateway int, argument string, s *desired.State) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p, err := subprocess.Start(t.Context(), l.Gateways[gateway], self, argument, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	l.Announcers[gateway] = p
	l.Apply(t, gateway, s)
}

// Apply applies a state on a gateway.
func (l *Lab) Apply(t *testing.T, gateway int, s *desired.State) {
	t.Helper()
	if err := l.Announcers[gateway].Apply(s); err != nil {
		t.Fatal(err)
	}
}

// Probe starts a client's requests to a VIP. The caller stops it.
func (l *Lab) Probe(t *testing.T, vip netip.Addr) *edge.Probe {
	t.Helper()
	p, err := l.Lab.Probe(vip)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// AwaitAnswers waits until a gateway answers a request that is sent from now on.
func AwaitAnswers(t *testing.T, p *edge.Probe, gateway int) {
	t.Helper()
	AwaitAnswersAfter(t, p, gateway, time.Now())
}

// AwaitAnswersAfter waits until a gateway answers a request that is sent after a time.
func AwaitAnswersAfter(t *testing.T, p *edge.Probe, gateway int, after time.Time) {
	t.Helper()
	Eventually(t, func() string {
		if p.From(gateway, after).IsZero() {
			return fmt.Sprintf("gateway %d does not answer", gateway)
		}
		return ""
	})
}

// Within bounds every wait.
const Within = 30 * time.Second

// Eventually fails the test unless condition soon returns "" instead of what is missing.
func Eventually(t *testing.T, condition func() (missing string)) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for begin := time.Now(); ; <-tick.C {
		missing := condition()
		if missing == "" {
			return
		}
		if time.Since(begin) > Within {
			t.Fatal(missing)
		}
	}
}

// VIPs returns VIPs that a state announces, with a backend each.
func VIPs(by desired.Announce, addrs ...netip.Addr) []desired.VIP {
	var all []desired.VIP
	for _, a := range addrs {
		all = append(all, desired.VIP{Addr: a, Announce: by, Return: desired.Routed, Frontends: []desired.Frontend{{
			Service: "shop/web", Protocol: "UDP", Port: 9000, Backends: []desired.Backend{{Addr: a, Port: 9000, Weight: 1}},
		}}})
	}
	return all
}
