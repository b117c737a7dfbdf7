package bgp_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab/announcertest"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/frr"
)

// millis is the BFD interval of tests that wait for a death, and patientMillis that of the others: three intervals exceed
// the delay of a packet on a busy machine, and the start of a successor.
const millis, patientMillis = 200, 1000

// withBFD adds BFD to a state.
func withBFD(s *desired.State, millis uint32) *desired.State {
	s.BGP.Peers[0].BFD = &desired.BFD{IntervalMillis: millis, Multiplier: 3}
	return s
}

// withHold sets the hold time that a state proposes.
func withHold(s *desired.State, hold time.Duration) *desired.State {
	s.BGP.Peers[0].HoldTime = uint16(hold.Seconds())
	return s
}

// withRestart adds graceful restart to a state.
func withRestart(s *desired.State) *desired.State {
	s.BGP.GracefulRestart = 10
	return s
}

// awaitBFD waits until a speaker has no drift.
func (l *lab) awaitBFD(t *testing.T, gateway int) {
	t.Helper()
	announcertest.Eventually(t, func() string {
		_, drift, err := l.Announcers[gateway].Status()
		if err != nil || len(drift) > 0 {
			return fmt.Sprintf("gateway %d: drift %v, %v", gateway, drift, err)
		}
		return ""
	})
}

// With BFD, a gateway that is cut off is dead to its router long before the hold time, in spite of graceful restart.
// After the cable is back, its routes return once BFD is up, in one session and without a flap.
func TestDeadGateway(t *testing.T) {
	t.Parallel()
	// The hold time is longer than any wait of this test: only BFD can tell the router in time.
	const hold = 10 * announcertest.Within
	l := newLab(t, frr.Config{}, frr.Peer{BFDMillis: millis, Hold: hold})
	for i := range l.Announcers {
		l.Start(t, i, freshStart, withHold(withRestart(withBFD(state(i, uint32(i*50)), millis)), hold))
	}
	l.awaitBFD(t, 0)
	l.awaitBFD(t, 1)
	l.awaitRoutes(t, vip, 0, 1)
	for i := range l.Announcers {
		if n := l.sessions(t, i); n != 1 {
			t.Errorf("gateway %d had %d sessions until BFD was up, want one", i, n)
		}
	}
	p := l.Probe(t, vip)
	announcertest.AwaitAnswers(t, p, 0)
	if err := l.Cut(0); err != nil {
		t.Fatal(err)
	}
	cut := time.Now()
	l.awaitRoutes(t, vip, 1)
	announcertest.AwaitAnswers(t, p, 1)
	r := p.Stop()
	t.Logf("the second gateway answered %s after the cut; %s", r.From(1, cut).Sub(cut), r)
	if err := l.Mend(0); err != nil {
		t.Fatal(err)
	}
	l.awaitRoutes(t, vip, 0, 1)
}

// Nothing is announced before BFD is up, and the drift says so.
func TestNoAnnouncementBeforeBFD(t *testing.T) {
	t.Parallel()
	l := newLab(t, frr.Config{}, frr.Peer{}) // a router without BFD
	l.Start(t, 0, freshStart, withBFD(state(0, 0), millis))
	announcertest.Eventually(t, func() string {
		announced, drift, err := l.Announcers[0].Status()
		if err != nil || len(announced) > 0 || len(drift) != 1 || !strings.Contains(drift[0].Message, "peer 10.99.0.1: BFD is down") {
			return fmt.Sprintf("announced %v, drift %v, %v", announced, drift, err)
		}
		return ""
	})
	if have := l.routes(t, vip); len(have) > 0 {
		t.Errorf("the router has %v", have)
	}
	l.Apply(t, 0, state(0, 0)) // without BFD
	l.awaitRoutes(t, vip, 0)
	if n := l.sessions(t, 0); n != 1 {
		t.Errorf("there were %d sessions, want one", n)
	}
}

// A speaker is killed and its successor starts: traffic stays and none is lost, without BFD, with it, and when the
// router's BFD detects it before the successor starts.
func TestRestartLosesNothing(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		bfd, noticed bool
		kill         bool
	}{
		"killed":              {kill: true},
		"ended":               {},
		"killed, with BFD":    {bfd: true, kill: true},
		"ended, with BFD":     {bfd: true},
		"killed, BFD notices": {bfd: true, noticed: true, kill: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			peer := frr.Peer{}
			states := [2]*desired.State{withRestart(state(0, 0)), withRestart(state(1, 50))}
			if tt.bfd {
				peer.BFDMillis = patientMillis
				states[0], states[1] = withBFD(states[0], patientMillis), withBFD(states[1], patientMillis)
			}
			l := newLab(t, frr.Config{}, peer)
			for i, s := range states {
				l.Start(t, i, freshStart, s)
			}
			l.awaitBFD(t, 0)
			l.awaitRoutes(t, vip, 0, 1)
			first := l.Probe(t, vip)
			announcertest.AwaitAnswers(t, first, 0) // before gateway 1, whose route could otherwise be the older one
			first.Stop()
			p := l.Probe(t, vip)
			announcertest.AwaitAnswers(t, p, 0)
			if tt.kill {
				l.Announcers[0].Kill()
			} else if err := l.Announcers[0].Close(false); err != nil {
				t.Fatal(err)
			}
			announcertest.Eventually(t, func() string {
				if r, ok := l.routes(t, vip)[0]; !ok || !r.Stale {
					return fmt.Sprintf("the router does not keep the route: %+v", r)
				}
				if tt.noticed && l.neighbour(t, 0).BFD.Status != "Down" {
					return "the router's BFD does not notice"
				}
				return ""
			})
			l.Start(t, 0, restarting, states[0])
			l.awaitBFD(t, 0)
			announcertest.Eventually(t, func() string {
				if r, ok := l.routes(t, vip)[0]; !ok || r.Stale {
					return fmt.Sprintf("the router has no route of the successor: %+v", r)
				}
				return ""
			})
			if r := p.Stop(); r.Lost() > 0 || r.By(1) > 0 {
				t.Errorf("%s, want all answered by gateway 0", r)
			}
		})
	}
}

// Two gateways share traffic; one is drained, and no request is lost.
func TestDrainLosesNothing(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(*testing.T, *lab, int){
		"stopped": func(t *testing.T, l *lab, owner int) {
			t.Helper()
			if err := l.Announcers[owner].Close(true); err != nil {
				t.Fatal(err)
			}
		},
		"cordoned": func(t *testing.T, l *lab, owner int) {
			t.Helper()
			s := withRestart(state(owner, 0))
			s.Cordoned = true
			l.Apply(t, owner, s)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			drainLosesNothing(t, leave)
		})
	}
}

func drainLosesNothing(t *testing.T, leave func(*testing.T, *lab, int)) {
	t.Helper()
	l := newLab(t, frr.Config{Paths: 2}, frr.Peer{})
	for i := range l.Announcers {
		l.Start(t, i, freshStart, withRestart(state(i, 0)))
	}
	announcertest.Eventually(t, func() string {
		for i := range l.Announcers {
			if r := l.routes(t, vip)[i]; !r.Multipath {
				return fmt.Sprintf("gateway %d has no share: %+v", i, r)
			}
		}
		return ""
	})
	p := l.Probe(t, vip)
	var owner int
	announcertest.Eventually(t, func() string {
		for i := range l.Announcers {
			if !p.From(i, time.Time{}).IsZero() {
				owner = i
				return ""
			}
		}
		return "no gateway answers"
	})
	leave(t, l, owner)
	if r := l.routes(t, vip)[owner]; r.Stale {
		t.Errorf("graceful restart keeps the route of a drained gateway: %+v", r)
	}
	l.awaitRoutes(t, vip, 1-owner)
	l.awaitForwarding(t, vip, 1-owner)
	if err := l.Cut(owner); err != nil {
		t.Fatal(err)
	}
	announcertest.AwaitAnswers(t, p, 1-owner)
	if r := p.Stop(); r.Lost() > 0 {
		t.Error(r)
	}
}

// A speaker comes back and announces again, whatever its router does.
func TestFlappingPeer(t *testing.T) {
	t.Parallel()
	l := newLab(t, frr.Config{}, frr.Peer{})
	l.Start(t, 0, freshStart, state(0, 0))
	for range 5 {
		l.awaitRoutes(t, vip, 0)
		l.awaitRoutes(t, vip6, 0)
		if err := l.router.RestartBGP(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	l.awaitRoutes(t, vip, 0)
	l.awaitRoutes(t, vip6, 0)
	p := l.Probe(t, vip)
	announcertest.AwaitAnswers(t, p, 0)
	p.Stop()
}

// With the router's password there is a session. With another one the drift names the peer and what to check. A router
// with another AS for this gateway reports that itself.
func TestReasonsForMissingSession(t *testing.T) {
	t.Parallel()
	l := newLab(t, frr.Config{}, frr.Peer{Password: "s3cret"})
	drifts := func(gateway int, want ...string) {
		announcertest.Eventually(t, func() string {
			_, drift, err := l.Announcers[gateway].Status()
			if err != nil || len(drift) != 1 {
				return fmt.Sprintf("drift %v, %v", drift, err)
			}
			for _, w := range want {
				if !strings.Contains(drift[0].Message, w) {
					return fmt.Sprintf("drift %v, want %q in it", drift, w)
				}
			}
			return ""
		})
	}
	wrong := state(0, 0)
	wrong.BGP.Peers[0].Password = "another"
	l.Start(t, 0, freshStart, wrong)
	unknown := state(1, 0)
	unknown.BGP.ASN, unknown.BGP.Peers[0].Password = 65099, "s3cret"
	l.Start(t, 1, freshStart, unknown)
	drifts(0, "peer 10.99.0.1", "password")
	drifts(1, "peer 10.99.0.1", "AS 65099")
	if announced, _, err := l.Announcers[0].Status(); err != nil || len(announced) > 0 {
		t.Errorf("announced %v, %v", announced, err)
	}
	right := state(0, 0)
	right.BGP.Peers[0].Password = "s3cret"
	l.Apply(t, 0, right)
	l.awaitRoutes(t, vip, 0)
	right = state(1, 0)
	right.BGP.Peers[0].Password = "s3cret"
	l.Apply(t, 1, right) // another AS
	l.awaitRoutes(t, vip, 0, 1)
}

// Inside an AS the local preference decides, and sessions over IPv6 carry both families, too.
func TestLocalPreference(t *testing.T) {
	t.Parallel()
	l := newLabOver(t, ipv6, frr.Config{}, frr.Peer{ASN: routerASN})
	for i := range l.Announcers {
		s := state(i, 0)
		s.BGP.ASN, s.BGP.LocalPreference = routerASN, new(uint32(100+i))
		s.BGP.Peers[0].Addr = edge.Router[ipv6]
		l.Start(t, i, freshStart, s)
	}
	for _, a := range []int{ipv4, ipv6} {
		announcertest.Eventually(t, func() string {
			have := l.routes(t, both[a])
			if len(have) < 2 || have[0].LocalPref != 100 || have[1].LocalPref != 101 || !have[1].Best {
				return fmt.Sprintf("routes are %+v", have)
			}
			if have[1].NextHops[0] != edge.Gateways[1][a] {
				return fmt.Sprintf("next hops to %s are %v, want %s", both[a], have[1].NextHops, edge.Gateways[1][a])
			}
			return ""
		})
	}
}
