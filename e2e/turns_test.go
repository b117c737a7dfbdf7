package e2e

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/gateways"
	testreport "github.com/isthmus-net/isthmus/tools/test/report"
)

// Go releases all tests at a time, and each waits for its turn. Tests that change what all use, such as agents, controllers, nodes
// and links between clusters, run alone; others run a few at a time.
var (
	turns sync.RWMutex
	few   = make(chan struct{}, 1+runtime.GOMAXPROCS(0))
)

// needBed waits until the test may use the testbed alone.
func needBed(t *testing.T) {
	t.Helper()
	requireBed(t)
	t.Parallel()
	began := time.Now()
	turns.Lock()
	t.Cleanup(turns.Unlock)
	t.Attr(testreport.Waited, time.Since(began).String())
}

// shareBed waits until the test may use the testbed together with others that share it.
func shareBed(t *testing.T) {
	t.Helper()
	requireBed(t)
	t.Parallel()
	began := time.Now()
	turns.RLock()
	t.Cleanup(turns.RUnlock)
	few <- struct{}{}
	t.Cleanup(func() { <-few })
	t.Attr(testreport.Waited, time.Since(began).String())
}

// TestGateways runs the tests of gateways one after the other, with one edge: a network outside of the lab with a real
// Neutron, a router and a client.
func TestGateways(t *testing.T) {
	needBed(t)
	ctx := t.Context()
	edge, err := gateways.Up(ctx, gateways.Config{Lab: bed.Lab, Dir: t.TempDir(), Progress: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := edge.Close(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
	})
	dir := t.TempDir()
	for _, balancer := range []desired.Balancer{desired.NFTables, desired.EBPF} {
		t.Run("gateway dies, "+string(balancer), func(t *testing.T) { gatewayDies(t, edge, dir, balancer) })
	}
	t.Run("master dies", func(t *testing.T) { masterDies(t, edge, dir) })
	t.Run("gateway on node", gatewayOnNode)
}
