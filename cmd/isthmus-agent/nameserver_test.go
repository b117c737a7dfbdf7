package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/agent/evidence"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns"
)

// startNameserver runs a name server on a free port of the loopback address and returns it with its address.
func startNameserver(t *testing.T) (*nameserver, string) {
	t.Helper()
	n := newNameserver(dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}}, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	var at string
	await(t, func() error {
		is, _ := n.Status()
		if len(is.Listening) != 1 {
			return fmt.Errorf("it listens on %v: %s", is.Listening, is.Error)
		}
		at = is.Listening[0]
		return nil
	})
	return n, at
}

// await calls check until it returns nil, for 10 seconds at most.
func await(t *testing.T, check func() error) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	giveUp := time.After(10 * time.Second)
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-giveUp:
			t.Fatal(err)
		case <-tick.C:
		}
	}
}

// pods is the headless Service pods.demo with one endpoint in each of some clusters.
func pods(clusters map[clusterset.ClusterID]string) *clusterset.Snapshot {
	s := clusterset.Service{Import: clusterset.Import{
		Service: clusterset.ServiceName{Namespace: "demo", Name: "pods"}, Type: clusterset.Headless,
	}}
	for id, addr := range clusters {
		s.Slices = append(s.Slices, clusterset.Slice{
			Cluster:   id,
			Endpoints: []clusterset.Endpoint{{Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Ready: true}},
		})
	}
	return &clusterset.Snapshot{Services: []clusterset.Service{s}}
}

// The name of a headless Service leads to clusters whose packets live, and to one that is silent again when it answers.
func TestSilentMemberIsNotAnswered_L61(t *testing.T) {
	n, at := startNameserver(t)
	if err := n.Sync(t.Context(), pods(map[clusterset.ClusterID]string{"a": "10.0.0.1", "b": "10.0.0.2"})); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		known map[clusterset.ClusterID]evidence.State
		want  []string
	}{
		{nil, []string{"10.0.0.1", "10.0.0.2"}}, // no source of health: everybody is connected
		{map[clusterset.ClusterID]evidence.State{"a": evidence.Answering, "b": evidence.Silent}, []string{"10.0.0.1"}},
		{map[clusterset.ClusterID]evidence.State{"a": evidence.Answering, "b": evidence.Answering}, []string{"10.0.0.1", "10.0.0.2"}},
		{map[clusterset.ClusterID]evidence.State{"b": evidence.Silent}, []string{"10.0.0.1"}},
		{map[clusterset.ClusterID]evidence.State{}, []string{"10.0.0.1", "10.0.0.2"}},
	} {
		if step.known != nil {
			n.Drain(step.known)
		}
		await(t, func() error {
			have := resolve(t.Context(), at, "pods.demo.svc.clusterset.local")
			texts := make([]string, len(have.addrs))
			for i, a := range have.addrs {
				texts[i] = a.String()
			}
			if have.err != nil || !slices.Equal(texts, step.want) {
				return fmt.Errorf("knowing %v: answer %v, %w, want %v", step.known, texts, have.err, step.want)
			}
			return nil
		})
	}
}

// Who is drained is known to a server that begins to listen later, too.
func TestSilentMemberBeforeTheServerListens(t *testing.T) {
	blocker, err := new(net.ListenConfig).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(blocker.LocalAddr().String())
	n := newNameserver(dns.Config{Listen: []netip.AddrPort{at}}, slog.New(slog.DiscardHandler))
	n.retry = time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- n.Run(ctx) }()
	n.Drain(map[clusterset.ClusterID]evidence.State{"b": evidence.Silent})
	_ = n.Sync(ctx, pods(map[clusterset.ClusterID]string{"a": "10.0.0.1", "b": "10.0.0.2"})) // it says that nobody listens
	await(t, func() error {
		if is, _ := n.Status(); is.Error == "" {
			return fmt.Errorf("no error yet")
		}
		return nil
	})
	if err := blocker.Close(); err != nil {
		t.Fatal(err)
	}
	await(t, func() error {
		have := resolve(t.Context(), at.String(), "pods.demo.svc.clusterset.local")
		if have.err != nil || len(have.addrs) != 1 || have.addrs[0].String() != "10.0.0.1" {
			return fmt.Errorf("answer %v, %w", have.addrs, have.err)
		}
		return nil
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
