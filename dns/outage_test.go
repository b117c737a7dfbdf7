package dns

import (
	"bytes"
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// A server that starts while the API server has been unreachable for an hour answers from the saved zone, and logs its age.
func TestRestartDuringOutage(t *testing.T) {
	var log bytes.Buffer
	cfg := Config{
		Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}, TTL: DefaultTTL,
		File: filepath.Join(t.TempDir(), "zone"), Log: slog.New(slog.NewTextHandler(&log, nil)),
	}
	snap := &clusterset.Snapshot{Services: []clusterset.Service{{Import: clusterset.Import{
		Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"}, Type: clusterset.ClusterSetIP, IPs: []netip.Addr{netip.MustParseAddr("243.0.0.1")},
	}}}}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	begin := func() *Server {
		s, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first := begin()
	if err := first.Sync(t.Context(), snap); err != nil {
		t.Fatal(err)
	}
	hourAgo := time.Now().Add(-time.Hour)
	first.syncedAt = hourAgo
	if err := first.Run(ended); err != nil { // saves the zone and ends
		t.Fatal(err)
	}
	log.Reset()
	for range 2 { // a restart does not reset the age
		s := begin()
		st := s.Status()
		if !st.Synced || !st.Stale || st.SyncedAt.Unix() != hourAgo.Unix() || len(s.Records("hello.demo.svc.clusterset.local")) != 1 {
			t.Errorf("status %+v", st)
		}
		if err := s.Run(ended); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(log.String(), "age=1h0m"); n != 2 {
		t.Errorf("the age is logged %d times, want once for each start:\n%s", n, &log)
	}
	s := begin()
	if err := s.Sync(t.Context(), snap); err != nil {
		t.Fatal(err)
	}
	if st := s.Status(); st.Stale || time.Since(st.SyncedAt) > time.Minute {
		t.Errorf("after the first snapshot: %+v", st)
	}
	if err := s.Run(ended); err != nil {
		t.Fatal(err)
	}
}
