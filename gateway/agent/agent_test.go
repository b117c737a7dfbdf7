package agent

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

var (
	one = netip.MustParseAddr("198.51.100.1")
	two = netip.MustParseAddr("198.51.100.2")
)

// request is a request of cluster a with VIPs.
func request(generation uint64, vips ...netip.Addr) desired.Request {
	s := desired.State{Cluster: "a", Group: "edge", Balancer: desired.NFTables}
	for _, v := range vips {
		s.VIPs = append(s.VIPs, desired.VIP{Addr: v, Announce: desired.ByNone, Return: desired.Routed})
	}
	return desired.NewRequest(generation, s)
}

func newAgent(t *testing.T, m *machine, path string) *Agent {
	t.Helper()
	cfg := m.config()
	cfg.Cluster, cfg.StatePath, cfg.Version, cfg.Log = "a", path, "test", slog.New(slog.DiscardHandler)
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func statePath(t *testing.T) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "state.json")
}

// must applies a request that must succeed.
func must(t *testing.T, a *Agent, r desired.Request) {
	t.Helper()
	if err := a.Reconfigure(t.Context(), r); err != nil {
		t.Fatal(err)
	}
}

func wantCalls(t *testing.T, m *machine, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, m.calls, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("calls (-want +have):\n%s", diff)
	}
	m.calls = nil
}

// A VIP is balanced before it is announced, and until it is withdrawn.
func TestBalancerBeforeAnnouncers(t *testing.T) {
	m := newMachine()
	a := newAgent(t, m, statePath(t))
	must(t, a, request(1, one))
	wantCalls(t, m, "balancer 198.51.100.1", "bgp 198.51.100.1", "vrrp 198.51.100.1")
	must(t, a, request(2, two))
	wantCalls(t, m, "balancer 198.51.100.1 198.51.100.2", "bgp 198.51.100.2", "vrrp 198.51.100.2", "balancer 198.51.100.2")
}

// After any failure, machine and disk are unchanged, and the error names the component and the field.
func TestAllOrNothing(t *testing.T) {
	for _, part := range []string{desired.ComponentBalancer, desired.ComponentBGP, desired.ComponentVRRP} {
		m := newMachine()
		path := statePath(t)
		a := newAgent(t, m, path)
		must(t, a, request(1, one))
		before, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		m.refuse[part] = two
		var refused *Refused
		if err := a.Reconfigure(t.Context(), request(2, two)); !errors.As(err, &refused) || refused.Code != internalError {
			t.Fatalf("%s: %v", part, err)
		}
		want := desired.Faults{{Component: part, Field: "vips", Services: []string{"shop/web"}, Message: "cannot have 198.51.100.2"}}
		if diff := cmp.Diff([]desired.Fault(want), refused.Faults); diff != "" {
			t.Errorf("%s: faults (-want +have):\n%s", part, diff)
		}
		for name, vips := range m.is {
			if !cmp.Equal(vips, []netip.Addr{one}, cmpopts.EquateComparable(netip.Addr{})) {
				t.Errorf("%s fails: %s has %v", part, name, vips)
			}
		}
		after, err := os.ReadFile(path)
		if err != nil || string(after) != string(before) {
			t.Errorf("%s: the file changed to %s, %v", part, after, err)
		}
		if all, err := filepath.Glob(path + "*"); err != nil || len(all) != 1 {
			t.Errorf("%s: files %v, %v", part, all, err)
		}
		if s := a.Stats(); s.Status.Generation != 1 || !s.Ready || len(s.Status.Drift) != 0 {
			t.Errorf("%s: %+v", part, s)
		}
		must(t, a, request(2, one)) // a refused generation can be used again
	}
}

// A rollback ends with the balancer, because neighbours may still send packets.
func TestRollbackOrder(t *testing.T) {
	m := newMachine()
	a := newAgent(t, m, statePath(t))
	must(t, a, request(1, one))
	m.calls = nil
	m.refuse[desired.ComponentVRRP] = two
	if err := a.Reconfigure(t.Context(), request(2, two)); err == nil {
		t.Error("no error")
	}
	wantCalls(t, m, "balancer 198.51.100.1 198.51.100.2", "bgp 198.51.100.2", "bgp 198.51.100.1", "balancer 198.51.100.1")
}

// A disk that is full changes nothing on the machine.
func TestDiskFails(t *testing.T) {
	m := newMachine()
	path := statePath(t)
	a := newAgent(t, m, path)
	must(t, a, request(1, one))
	m.calls = nil
	a.store.path = filepath.Join(path, "no folder")
	if err := a.Reconfigure(t.Context(), request(2, two)); err == nil {
		t.Error("no error")
	}
	wantCalls(t, m)

	// The file can be written but not moved into place: all components roll back.
	a.store.path = t.TempDir()
	if err := os.WriteFile(filepath.Join(a.store.path, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := a.Reconfigure(t.Context(), request(2, two)); err == nil {
		t.Error("no error")
	}
	if diff := cmp.Diff([]netip.Addr{one}, m.is[desired.ComponentBGP], cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Error(diff)
	}
}

// A request that was refused because its file could not be synced is not applied after a restart.
func TestDiskSyncFails(t *testing.T) {
	for _, before := range [][]netip.Addr{nil, {one}} {
		m := newMachine()
		path := statePath(t)
		a := newAgent(t, m, path)
		for _, v := range before {
			must(t, a, request(1, v))
		}
		forgets := errors.New("input/output error")
		a.store.syncNames = func(string) error { return forgets }
		if err := a.Reconfigure(t.Context(), request(2, two)); err == nil || !strings.Contains(err.Error(), forgets.Error()) {
			t.Errorf("error %v", err)
		}
		next := newMachine()
		newAgent(t, next, path).check(t.Context())
		for _, m := range []*machine{m, next} {
			if diff := cmp.Diff(before, m.is[desired.ComponentBGP], cmpopts.EquateComparable(netip.Addr{}), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("before %v: %s", before, diff)
			}
		}
		if left, err := filepath.Glob(path + ".*"); err != nil || len(left) > 0 {
			t.Errorf("%v is left, %v", left, err)
		}
	}
}

// A disk that takes no file changes nothing. Components go to the new state and back once, and not again with each attempt of the
// controller.
func TestDiskKeepsFailing(t *testing.T) {
	m := newMachine()
	path := statePath(t)
	a := newAgent(t, m, path)
	must(t, a, request(1, one))
	fails := errors.New("input/output error")
	works := a.store.syncFile
	a.store.syncFile = func(f *os.File) error { return fails }
	calls := 0
	for attempt := range 3 {
		if err := a.Reconfigure(t.Context(), request(2, two)); err == nil || !strings.Contains(err.Error(), fails.Error()) {
			t.Errorf("error %v", err)
		}
		if diff := cmp.Diff([]netip.Addr{one}, m.is[desired.ComponentBGP], cmpopts.EquateComparable(netip.Addr{})); diff != "" {
			t.Error(diff)
		}
		if attempt > 0 && len(m.calls) > calls {
			t.Errorf("attempt %d changes components: %v", attempt, m.calls[calls:])
		}
		calls = len(m.calls)
	}
	if left, err := filepath.Glob(path + ".*"); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
	a.store.syncFile = works
	must(t, a, request(2, two))
	if a.diskFails {
		t.Error("the disk works again")
	}
}

// A component that cannot roll back is retried until it can, and reported meanwhile.
func TestStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		a := newAgent(t, m, statePath(t))
		must(t, a, request(1, one))
		m.refuse[desired.ComponentVRRP], m.refuse[desired.ComponentBGP] = two, one // bgp applies two, and then refuses to go back to one
		err := a.Reconfigure(t.Context(), request(2, two))
		if err == nil || !strings.Contains(err.Error(), errStuck.Error()) {
			t.Fatalf("error %v", err)
		}
		if s := a.Stats(); s.Ready || len(s.Status.Drift) != 2 || s.Status.Generation != 1 {
			t.Errorf("%+v", s)
		}
		stop := run(t, a)
		<-time.After(DefaultCheckEvery)
		if a.Stats().Ready {
			t.Error("ready, and one part is not")
		}
		m.change(func() { delete(m.refuse, desired.ComponentBGP) })
		<-time.After(2 * DefaultCheckEvery)
		if s := a.Stats(); !s.Ready || len(s.Status.Drift) != 0 {
			t.Errorf("%+v", s)
		}
		stop()
		for name, vips := range m.is {
			if len(vips) != 1 || vips[0] != one {
				t.Errorf("%s has %v", name, vips)
			}
		}
	})
}

// run runs a. The returned function stops it.
func run(t *testing.T, a *Agent) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.Run(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// Drift is repaired and counted. Components without drift are left alone.
func TestDrift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		a := newAgent(t, m, statePath(t))
		must(t, a, request(1, one))
		m.change(func() { m.calls = nil })
		stop := run(t, a)
		synctest.Wait()
		wantCalls(t, m)
		a.mu.Lock()
		m.change(func() { m.is[desired.ComponentBalancer] = nil })
		a.mu.Unlock()
		<-time.After(2 * DefaultCheckEvery)
		stop()
		wantCalls(t, m, "balancer 198.51.100.1")
		if s := a.Stats(); s.Drifts[desired.ComponentBalancer] != 1 || s.Mended[desired.ComponentBalancer] != 1 || !s.Ready {
			t.Errorf("%+v", s)
		}
	})
}

// Drift that Apply cannot repair is reported while it lasts, and counted once.
func TestDriftThatStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		a := newAgent(t, m, statePath(t))
		must(t, a, request(1, one))
		m.change(func() { m.away[desired.ComponentBGP] = true })
		stop := run(t, a)
		<-time.After(5 * DefaultCheckEvery)
		if s := a.Stats(); len(s.Status.Drift) != 1 || s.Drifts[desired.ComponentBGP] != 1 || s.Mended[desired.ComponentBGP] != 0 || s.Ready {
			t.Errorf("%+v", s)
		}
		a.mu.Lock()
		m.change(func() { delete(m.away, desired.ComponentBGP) })
		a.mu.Unlock()
		<-time.After(2 * DefaultCheckEvery)
		if s := a.Stats(); len(s.Status.Drift) != 0 || !s.Ready {
			t.Errorf("%+v", s)
		}
		stop()
	})
}

// A gateway applies its saved state without a controller, and then refuses older generations.
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := statePath(t)
		must(t, newAgent(t, newMachine(), path), request(7, one, two))
		m := newMachine()
		m.change(func() { m.stuck[desired.ComponentBGP] = true })
		a := newAgent(t, m, path)
		stop := run(t, a)
		synctest.Wait()
		wantCalls(t, m, "balancer 198.51.100.1 198.51.100.2", "vrrp 198.51.100.1 198.51.100.2")
		if s := a.Stats(); s.Ready || s.Status.Generation != 7 || len(s.Status.Drift) != 1 {
			t.Errorf("%+v", s)
		}
		a.mu.Lock()
		m.change(func() { delete(m.stuck, desired.ComponentBGP) })
		a.mu.Unlock()
		<-time.After(2 * DefaultCheckEvery)
		if s := a.Stats(); !s.Ready || len(s.Status.Drift) != 0 || len(s.Status.Announced) != 2 {
			t.Errorf("%+v", s)
		}
		stop()
		if err := a.Reconfigure(t.Context(), request(6, one)); err == nil {
			t.Error("an older generation was applied")
		}
	})
}

// A truncated or modified file is renamed. Nothing is applied or removed, and the next request is accepted with any
// generation.
func TestBrokenFile(t *testing.T) {
	good, err := json.Marshal(request(7, one))
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"half": string(good[:len(good)/2]), "changed": strings.Replace(string(good), one.String(), two.String(), 1), "empty": "",
	} {
		path := statePath(t)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		m := newMachine()
		a := newAgent(t, m, path)
		a.check(t.Context())
		wantCalls(t, m)
		if aside, err := os.ReadFile(path + asideSuffix); err != nil || string(aside) != content {
			t.Errorf("%s: aside is %q, %v", name, aside, err)
		}
		must(t, a, request(1, one))
	}
}

// Only root can read the file: it contains BGP passwords.
func TestFileMode(t *testing.T) {
	path := statePath(t)
	must(t, newAgent(t, newMachine(), path), request(1, one))
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

// The saved state of another cluster's gateway is refused.
func TestStateOfAnotherCluster(t *testing.T) {
	path := statePath(t)
	must(t, newAgent(t, newMachine(), path), request(1, one))
	cfg := newMachine().config()
	cfg.Cluster, cfg.StatePath, cfg.Log = "b", path, slog.New(slog.DiscardHandler)
	_, err := New(cfg)
	if err == nil || !strings.Contains(err.Error(), `cluster "a"`) {
		t.Errorf("error %v", err)
	}
}

// Announcers close first, so that the balancer handles what still arrives.
func TestClose(t *testing.T) {
	m := newMachine()
	a := newAgent(t, m, statePath(t))
	if err := errors.Join(a.Close(t.Context(), true), a.Close(t.Context(), false)); err != nil {
		t.Fatal(err)
	}
	wantCalls(t, m, "bgp drains", "vrrp drains", "balancer drains", "bgp stays", "vrrp stays", "balancer stays")
}

// After Close, neither a controller nor the agent's own check applies anything: that would bring traffic back.
func TestNothingAppliesAfterClose(t *testing.T) {
	m := newMachine()
	a := newAgent(t, m, statePath(t))
	must(t, a, request(1, one))
	if err := a.Close(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	m.calls, m.is[desired.ComponentBGP] = nil, nil // the routes are withdrawn
	if err := a.Reconfigure(t.Context(), request(2, two)); !errors.Is(err, errClosed) {
		t.Errorf("error %v", err)
	}
	a.check(t.Context())
	wantCalls(t, m)
}
