package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// A block that somebody takes away is told at once, a lost packet is not, and it is told again when all is well.
func TestClusterDNSIsWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		var says error
		lost := errors.New("i/o timeout")
		c := newClusterDNS("10.96.0.10", nil, slog.New(slog.NewTextHandler(&log, nil)))
		c.ask = func(context.Context, netip.AddrPort) error { return says }
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- c.Run(ctx) }()
		for i, step := range []struct {
			says    error
			answers bool
		}{{nil, true}, {lost, true}, {nil, true}, {lost, true}, {lost, false}, {nil, true}, {errNotServed, false}, {errNotServed, false}, {nil, true}} {
			says = step.says
			if i > 0 {
				<-time.After(clusterDNSInterval)
			}
			synctest.Wait()
			is := c.Status()
			if is == nil || is.Answers != step.answers || (is.Reason == "") != step.answers || is.Server != "10.96.0.10:53" {
				t.Errorf("step %d: %+v", i, is)
			}
		}
		if n := strings.Count(log.String(), "do not find"); n != 2 {
			t.Errorf("logged %d times, want once for each time that it went:\n%s", n, &log)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// The address is that of the Service that every cluster's DNS has.
func TestClusterDNSIsFound(t *testing.T) {
	api := &apiServer{objects: map[string]string{clusterDNSPath: `{"spec":{"clusterIP":"10.96.0.10"}}`}}
	c := newClusterDNS("", newLocator(t, api, Config{}).server, slog.New(slog.DiscardHandler))
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
		"switched off": newClusterDNS(clusterDNSNone, c.server, c.log), "nobody to ask": newClusterDNS("", nil, c.log),
	} {
		if unwatched != nil || unwatched.Status() != nil {
			t.Errorf("%s: it is watched", name)
		}
	}
}

// A server that has a zone answers; one that does not know yet what is in it does not.
func TestAskVersion(t *testing.T) {
	n, at := startNameserver(t)
	server := netip.MustParseAddrPort(at)
	if err := askVersion(t.Context(), server); err == nil || refused(err) {
		t.Errorf("before the first world: %v", err)
	}
	if err := n.Sync(t.Context(), &clusterset.Snapshot{}); err != nil {
		t.Fatal(err)
	}
	if err := askVersion(t.Context(), server); err != nil {
		t.Errorf("after it: %v", err)
	}
}
