package datapath

import (
	"bytes"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Open logs each missing feature once, and Missing returns the same. Here a capability is missing.
func TestMissingIsLoggedOnce(t *testing.T) {
	cfg := testConfig(t)
	var log bytes.Buffer
	var d *Datapath
	var err error
	var opened sync.WaitGroup
	opened.Go(func() {
		runtime.LockOSThread() // never unlocked: the thread ends without the capability
		d, err = openWithout(t, cfg, unix.CAP_SYS_ADMIN, slog.New(slog.NewTextHandler(&log, nil)))
	})
	opened.Wait()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	missing := d.Missing()
	if len(missing) != 1 || !strings.HasPrefix(missing[0], "capability SYS_ADMIN: ") {
		t.Errorf("missing %q, want the capability", missing)
	}
	if n := strings.Count(log.String(), "capability SYS_ADMIN"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, log.String())
	}
}

// openWithout opens a datapath on a thread that drops a capability first.
func openWithout(t *testing.T, cfg Config, capability uint, log *slog.Logger) (*Datapath, error) {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return nil, err
	}
	sets[0].Effective &^= 1 << capability
	if err := unix.Capset(&header, &sets[0]); err != nil {
		return nil, err
	}
	return Open(t.Context(), cfg, log)
}

// Missing names the consequence of each feature that a kernel may lack.
func TestMissingFeatures(t *testing.T) {
	refused := errors.New("refused by the verifier")
	for name, c := range map[string]struct {
		noClose, noFind error
		want            string
	}{
		"nothing":         {nil, nil, ""},
		"no sock_destroy": {refused, nil, "bpf_sock_destroy (Linux 6.5 or newer): sockets of removed UDP backends are closed over netlink"},
		"no iterators":    {refused, refused, "BPF iterators over sockets: sockets of removed UDP backends stay open until their programs close them"},
	} {
		t.Run(name, func(t *testing.T) {
			found := missingFeatures(false, c.noClose, c.noFind)
			before := missingFeatures(false, nil, nil) // of this machine
			if want := strings.TrimSpace(c.want + "\n" + strings.Join(before, "\n")); strings.Join(found, "\n") != want {
				t.Errorf("lacks %q, want %q", found, want)
			}
		})
	}
}
