package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/zoneask"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// A missing stub block is reported at once, a lost packet is not, and recovery is reported.
func TestClusterDNSWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		var answer error
		lost := errors.New("i/o timeout")
		c := newClusterDNS("10.96.0.10", nil, slog.New(slog.NewTextHandler(&log, nil)))
		c.ask = func(context.Context, netip.AddrPort) error { return answer }
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- c.Run(ctx) }()
		for i, step := range []struct {
			answer  error
			answers bool
		}{{nil, true}, {lost, true}, {nil, true}, {lost, true}, {lost, false}, {nil, true}, {zoneask.ErrNotServed, false}, {zoneask.ErrNotServed, false}, {nil, true}} {
			answer = step.answer
			if i > 0 {
				<-time.After(clusterDNSInterval)
			}
			synctest.Wait()
			s := c.Status()
			if s == nil || s.Answers != step.answers || (s.Reason == "") != step.answers || s.Server != "10.96.0.10:53" {
				t.Errorf("step %d: %+v", i, s)
			}
		}
		if n := strings.Count(log.String(), "cannot resolve"); n != 2 {
			t.Errorf("logged %d times, want once for each failure:\n%s", n, &log)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// The address is the ClusterIP of Service kube-dns.
func TestClusterDNSAddress(t *testing.T) {
	api := &apiServer{objects: map[string]string{clusterDNSPath: `{"spec":{"clusterIP":"10.96.0.10"}}`}}
	c := newClusterDNS("", newTopologyWatcher(t, api, Config{}).server, slog.New(slog.DiscardHandler))
	if at, err := c.find(t.Context()); err != nil || at.String() != "10.96.0.10:53" {
		t.Errorf("at %s, %v", at, err)
	}
	for name, object := range map[string]string{"none": "404", "headless": `{"spec":{"clusterIP":"None"}}`} {
		api.mu.Lock()
		api.objects[clusterDNSPath] = object
		api.mu.Unlock()
		if at, err := c.find(t.Context()); err == nil {
			t.Errorf("%s: found %s", name, at)
		}
	}
	for name, unwatched := range map[string]*clusterDNS{
		"turned off": newClusterDNS(clusterDNSNone, c.server, c.log), "no API server": newClusterDNS("", nil, c.log),
	} {
		if unwatched != nil || unwatched.Status() != nil {
			t.Errorf("%s: it is watched", name)
		}
	}
}

// A server answers once it has a snapshot.
func TestAskVersion(t *testing.T) {
	n, at := startNameserver(t)
	server := netip.MustParseAddrPort(at)
	if err := askVersion(t.Context(), server); err == nil || refused(err) {
		t.Errorf("before the first snapshot: %v", err)
	}
	if err := n.Sync(t.Context(), &clusterset.Snapshot{}); err != nil {
		t.Fatal(err)
	}
	if err := askVersion(t.Context(), server); err != nil {
		t.Errorf("after the first snapshot: %v", err)
	}
}

// Each server has a result of its own, and an error names an invalid server.
func TestAskServers(t *testing.T) {
	n, at := startNameserver(t)
	if err := n.Sync(t.Context(), &clusterset.Snapshot{}); err != nil {
		t.Fatal(err)
	}
	closed, err := new(net.ListenConfig).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refuses := closed.LocalAddr().String()
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	many := strings.Repeat("&server=192.0.2.1:53", status.MaxAsked+1)
	for query, want := range map[string]string{
		"server=" + at + "&server=" + refuses: at + " true, " + refuses + " false",
		"server=kube-dns":                     "server=kube-dns is not an address with a port",
		"":                                    "give 1 to 32 servers",
		many[1:]:                              "give 1 to 32 servers",
	} {
		w := httptest.NewRecorder()
		askServers(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, status.AskPath+"?"+query, nil))
		have := w.Body.String()
		if w.Code == http.StatusOK {
			var results []status.ClusterDNS
			if err := json.Unmarshal(w.Body.Bytes(), &results); err != nil {
				t.Fatal(err)
			}
			var parts []string
			for _, s := range results {
				parts = append(parts, fmt.Sprintf("%s %t", s.Server, s.Answers && s.Reason == ""))
			}
			have = strings.Join(parts, ", ")
		}
		if !strings.Contains(have, want) {
			t.Errorf("%s: %s, want %s", query, have, want)
		}
	}
}
