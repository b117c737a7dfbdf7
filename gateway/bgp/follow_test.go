package bgp

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/osrg/gobgp/v4/api"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// A peer whose session cannot be restarted is reported, and the next Apply adds it again.
func TestRefusedPeer(t *testing.T) {
	t.Parallel()
	s := New(Config{Log: slog.New(slog.DiscardHandler)})
	peer := netip.MustParseAddr("127.0.0.1")
	state := &desired.State{BGP: &desired.BGP{ASN: 65010, RouterID: netip.MustParseAddr("10.99.0.11"), Peers: []desired.Peer{{Addr: peer, ASN: 65000, Port: 1}}}}
	if err := s.Apply(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.WithoutCancel(t.Context()), false); err != nil {
			t.Error(err)
		}
	})
	const absent = "could not be started again"
	missed := func() bool {
		t.Helper()
		drift, err := s.Drift(t.Context())
		if err != nil || len(drift) != 1 {
			t.Fatalf("drift %v, %v: a missing peer is drift in any case", drift, err)
		}
		return strings.Contains(drift[0].Message, absent)
	}
	if missed() {
		t.Error("a peer is missed that is only silent")
	}
	s.mu.Lock()
	refuses := errors.New("no")
	add := s.server.add
	s.server.add = func(context.Context, *api.AddPeerRequest) error { return refuses }
	err := s.redial(t.Context(), peer, s.sessions[peer])
	s.server.add = add
	s.mu.Unlock()
	if !errors.Is(err, refuses) {
		t.Fatalf("error %v", err)
	}
	if !missed() {
		t.Error("a missing peer is not reported")
	}
	if err := s.Apply(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	if missed() {
		t.Error("the peer is still reported after another Apply")
	}
}
