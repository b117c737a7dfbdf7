package simulation

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

func valid() Config {
	return Config{Assets: "x", Controller: "x", Storage: "x", Members: 2, Exports: 3, Endpoints: 2, Progress: &bytes.Buffer{}}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		edit func(*Config)
		says string // part of the error; empty: none
	}{
		"plain":            {func(*Config) {}, ""},
		"largest members":  {func(c *Config) { c.Members = 100; c.Exports, c.Endpoints = 1000, 10 }, ""},
		"b alone":          {func(c *Config) { c.Members, c.Exporter = 0, true }, ""},
		"no exporter":      {func(c *Config) { c.Members = 0 }, "no member exports"},
		"too many members": {func(c *Config) { c.Members = 1001 }, "1001 members"},
		"too many exports": {func(c *Config) { c.Exports = 10_001 }, "10001 exports"},
		"no exports":       {func(c *Config) { c.Exports = 0 }, "0 exports"},
		"no endpoints":     {func(c *Config) { c.Endpoints = 0 }, "0 endpoints"},
		"no room":          {func(c *Config) { c.Members, c.Exports, c.Endpoints = 500, 10_000, 10 }, "do not fit into 10.0.0.0/8"},
		"no programs":      {func(c *Config) { c.Assets, c.Controller = "", "" }, "Controller is missing"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := valid()
			tc.edit(&c)
			err := c.Validate()
			if (err == nil) != (tc.says == "") || err != nil && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("have %v, want %q", err, tc.says)
			}
		})
	}
}

func TestCounts(t *testing.T) {
	t.Parallel()
	c := valid()
	c.Exporter = true
	if s, e := c.Services(), c.RemoteEndpoints(); s != 3 || e != 18 {
		t.Errorf("shared: %d services and %d endpoints, want 3 and 18", s, e)
	}
	c.Distinct = true
	if s, e := c.Services(), c.RemoteEndpoints(); s != 9 || e != 18 {
		t.Errorf("distinct: %d services and %d endpoints, want 9 and 18", s, e)
	}
}

// Blocks of members contain all their endpoints and do not overlap, nor do blocks of ClusterSetIPs.
func TestBlocks(t *testing.T) {
	t.Parallel()
	w := &ClusterSet{cfg: valid()}
	w.cfg.Members, w.cfg.Exports, w.cfg.Endpoints = 20, 1000, 100
	for n := range w.ids() {
		mine := w.podBlock(n)
		if !pods.Contains(mine.Addr()) || 1<<(32-mine.Bits()) < w.cfg.Exports*w.cfg.Endpoints+spare {
			t.Errorf("member %d has block %s", n, mine)
		}
		for o := range n {
			if mine.Overlaps(w.podBlock(o)) {
				t.Errorf("members %d and %d share %s and %s", n, o, mine, w.podBlock(o))
			}
			if w.registration(n).Spec.ClusterSetIPCIDR[0] == w.registration(o).Spec.ClusterSetIPCIDR[0] {
				t.Errorf("members %d and %d share a block of ClusterSetIPs", n, o)
			}
		}
	}
}

// A member with more endpoints than fit in a slice has several slices. Its addresses can be exhausted.
func TestExporter(t *testing.T) {
	t.Parallel()
	w := &ClusterSet{cfg: valid()}
	x := newExporter("s1", w.podBlock(2))
	if err := x.add(clusterset.ServiceName{Namespace: "n", Name: "s"}, 2*perSlice+1); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for i, n := range []int{perSlice, perSlice, 1} {
		es := x.slices[i].object()
		if len(es.Endpoints) != n {
			t.Errorf("slice %d has %d endpoints, want %d", i, len(es.Endpoints), n)
		}
		for _, e := range es.Endpoints {
			if seen[e.Addresses[0]] || !w.podBlock(2).Contains(addr(e.Addresses[0])) {
				t.Errorf("address %s is not fresh or not the member's", e.Addresses[0])
			}
			seen[e.Addresses[0]] = true
		}
	}
	var err error
	for n := 0; err == nil; n++ {
		if n > 1<<w.cfg.blockBits() {
			t.Fatal("there are more addresses than in the block")
		}
		_, err = x.address()
	}
}

// TestClusterSet runs a small ClusterSet: two simulated members, the real a and b, and three Services. The test of
// tools/bench/controlplane covers restarts.
func TestClusterSet(t *testing.T) {
	apitest.Require(t)
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	ctx := t.Context()
	assets, err := Assets(ctx, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	controller, err := BuildController(ctx, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	storage, err := os.MkdirTemp(DefaultStorage(), "simulation-test-") //nolint:usetesting // a filesystem in memory, where fsync costs nothing
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(storage)
	w, err := NewClusterSet(ctx, Config{
		Assets: assets, Controller: controller, Storage: storage,
		Members: 2, Exports: 3, Endpoints: 2, Exporter: true, Progress: t.Output(),
	})
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	defer func() {
		if !closed {
			_ = w.Close()
		}
	}()

	first, err := w.FirstImport(ctx)
	if err != nil {
		t.Fatal(err)
	}
	load := first.Load
	// Three imports with a status each, and a slice from each of three exporters.
	if n := Writes(load.Importer.Requests); first.Usable <= 0 || first.Reported < first.Usable || n < 9 || n > 40 {
		t.Errorf("the first import took %s, with statuses %s, and %.0f writes: %v", first.Usable, first.Reported, n, load.Importer.Requests)
	}
	if load.Received == 0 || load.Sent == 0 || load.RSS == 0 || load.Peak < load.RSS/2 {
		t.Errorf("the first import seems to have cost %+v", load)
	}
	if load, err = w.Rest(ctx, time.Second); err != nil {
		t.Fatal(err)
	} else if n := Writes(load.Importer.Requests) + Writes(load.Broker.Requests); n != 0 {
		t.Errorf("%.0f writes at rest: %v and %v", n, load.Importer.Requests, load.Broker.Requests)
	}
	for name, churn := range map[string]func(context.Context, float64, time.Duration) (Propagation, error){
		"isthmus": w.Churn, "bare relay": w.ChurnRelay,
	} {
		p, err := churn(ctx, 20, time.Second)
		if err != nil || p.Changes != 20 || p.Missing != 0 || p.P50 <= 0 || p.P50 > p.P99 || p.P99 > p.Max {
			t.Errorf("%s: %v (%v)", name, p, err)
		}
	}
	if err := w.ReplaceImporter(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := w.FirstImport(ctx); err != nil {
		t.Error(err)
	}
	closed = true
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if left, err := filepath.Glob(filepath.Join(storage, "*")); err != nil || len(left) > 0 {
		t.Errorf("Close leaves %v (%v)", left, err)
	}
}
