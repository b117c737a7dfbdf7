package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/agent"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// opening is a fake balancer. Export sends the flows that a test puts into opens, until the balancer is closed.
type opening struct {
	agent.Component
	opens, imported chan flows.Flow
	closed          chan struct{}
}

func (opening) Name() string { return desired.ComponentBalancer }

func (o opening) Close(context.Context, bool) error {
	close(o.closed)
	return nil
}

func (o opening) Export(ctx context.Context, tell func(flows.Flow) error) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-o.closed:
			return os.ErrClosed
		case f := <-o.opens:
			if err := tell(f); err != nil {
				return err
			}
		}
	}
}

// leaving is a fake announcer, whose Close calls close.
type leaving struct {
	agent.Announcer
	close func()
}

func (leaving) Name() string { return desired.ComponentVRRP }

func (leaving) Announced() []netip.Addr { return nil }

func (l leaving) Close(context.Context, bool) error {
	l.close()
	return nil
}

func (opening) Counts() (map[flows.CountKey]flows.Counts, error) { return nil, nil }

func (opening) Refusals() (map[flows.Refusal]uint64, error) { return nil, nil }

func (opening) HandedOver() uint64 { return 0 }

func (opening) All(func(flows.Flow) error) error { return nil }

func (o opening) Import(all []flows.Flow) ([]flows.Flow, error) {
	for _, f := range all {
		o.imported <- f
	}
	return nil, nil
}

// A draining gateway sends and receives connections until its traffic has moved.
func TestFlowsWhileDraining(t *testing.T) {
	cfg, client := config(t)
	own, err := certs.Open(cfg.Files, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	pushed := make(chan flows.Flow, 1)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	// Both gateways use the same certificate here.
	peer := &http.Server{TLSConfig: own.Server(), ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var some []flows.Flow
		if err := json.NewDecoder(r.Body).Decode(&some); err == nil {
			for _, f := range some {
				pushed <- f
			}
		}
		w.WriteHeader(http.StatusNoContent)
	})}
	go func() { _ = peer.ServeTLS(l, "", "") }()
	t.Cleanup(func() { _ = peer.Close() })

	at := netip.MustParseAddrPort("198.51.100.7:80")
	flow := flows.Flow{Protocol: "TCP", Client: at, VIP: at, Backend: at, Source: at}
	balancer := opening{opens: make(chan flows.Flow), imported: make(chan flows.Flow, 1), closed: make(chan struct{})}
	opens := func(when string) {
		within(t, "a connection opens "+when, func(late <-chan time.Time) bool {
			select {
			case balancer.opens <- flow:
				return true
			case <-late:
				return false
			}
		})
		within(t, "the peer receives the flow that opened "+when, func(late <-chan time.Time) bool {
			select {
			case <-pushed:
				return true
			case <-late:
				return false
			}
		})
	}
	left := make(chan struct{})
	announcer := leaving{close: func() {
		defer close(left)
		opens("while neighbours move their traffic")
		// The controller is not a peer, and gets that answer. Its own requests get none.
		for path, want := range map[string]int{flows.Path: http.StatusForbidden, "/v1/state": 0} {
			code := 0
			if resp, err := client.Get("https://" + cfg.Listen + path); err == nil {
				code = resp.StatusCode
				_ = resp.Body.Close()
			}
			if code != want {
				t.Errorf("%s: %d, want %d", path, code, want)
			}
		}
	}}
	exchange := flows.New(balancer, own, slog.New(slog.DiscardHandler))
	exchange.SetPeers([]desired.PeerGateway{{URL: "https://" + l.Addr().String(), Name: "gw-1"}})
	shared := &sharing{balancer: balancer, exchange: exchange}
	a, err := agent.New(agent.Config{Cluster: "a", Balancer: shared, Announcers: []agent.Announcer{announcer}, Flows: exchange, StatePath: cfg.statePath(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		g := gateway{
			cfg: cfg, log: slog.New(slog.DiscardHandler), certs: own, balancer: balancer, exchange: exchange, agent: a,
			mark: mark(t.TempDir() + "/serving"), lastHandshakes: 3 * time.Second,
		}
		done <- g.serve(ctx, func() error { return g.close(t.Context(), true) })
	}()
	await(t, "https://"+cfg.HTTPListen+"/healthz", 200)
	stop()
	<-left
	opens("after they have")
	if err := <-done; err != nil {
		t.Error(err)
	}
	select {
	case <-balancer.closed:
	default:
		t.Error("the balancer is open at the end")
	}
}

// within fails a test unless something happens in time.
func within(t *testing.T, what string, happens func(late <-chan time.Time) bool) {
	t.Helper()
	if !happens(time.After(20 * time.Second)) {
		t.Errorf("it did not happen in time: %s", what)
	}
}

// Every announcer that a pool may name runs on the gateways.
func TestAnnouncersAreWired(t *testing.T) {
	announcers, err := newAnnouncers(Config{RunDir: t.TempDir()}, mark(filepath.Join(t.TempDir(), "serving")), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	have := []desired.Announce{desired.ByNone}
	for _, a := range announcers {
		have = append(have, desired.Announce(a.Name()))
	}
	slices.Sort(have)
	if want := slices.Sorted(slices.Values(desired.Announces)); !slices.Equal(have, want) {
		t.Errorf("the gateways announce by %q, and pools may name %q", have, want)
	}
}
