package datapath

import (
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/bpf/lb/lbtest"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// otherVersion returns programs whose effect differs from ours: they refuse with EHOSTUNREACH.
func otherVersion(t *testing.T) build {
	t.Helper()
	b := currentVersion(t)
	changed := 0
	for _, spec := range b.specs {
		for _, p := range spec.Programs {
			for i := range p.Instructions {
				if p.Instructions[i].Constant == -int64(unix.ECONNREFUSED) {
					p.Instructions[i].Constant = -int64(unix.EHOSTUNREACH)
					changed++
				}
			}
		}
	}
	if changed == 0 {
		t.Fatal("no program refuses")
	}
	return b
}

func ours(cfg Config) pins { return pins{cfg.BPFFS, bpf.ABIVersion} }

// linkPrograms returns the kernel's number of the program that each pinned link runs.
func linkPrograms(t *testing.T, cfg Config) map[string]ebpf.ProgramID {
	t.Helper()
	ids := map[string]ebpf.ProgramID{}
	for _, h := range bpf.Hooks() {
		l, err := link.LoadPinnedLink(ours(cfg).linkPath(h.Name), nil)
		if err != nil {
			t.Fatal(err)
		}
		info, err := l.Info()
		if err := errors.Join(err, l.Close()); err != nil {
			t.Fatal(err)
		}
		ids[h.Name] = info.Program
	}
	return ids
}

// connect returns the result of connecting a TCP socket to 243.0.0.5:80.
func connect(t *testing.T) error {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	return unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{243, 0, 0, 5}, Port: 80})
}

// refusing is a state with one VIP, 243.0.0.5:80/TCP, that refuses.
func refusing() lb.State {
	s := lb.NewState()
	s.Frontends[lb.Address{AddrPort: netip.MustParseAddrPort("243.0.0.5:80"), Protocol: clusterset.TCP}] = lb.Frontend{ID: 1}
	return s
}

// pinned lists our pins in the BPF filesystem.
func pinned(t *testing.T, cfg Config) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir(ours(cfg).dir(), func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(cfg.BPFFS, path)
		found = append(found, rel)
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	slices.Sort(found)
	return found
}

func TestLayoutOfPins(t *testing.T) {
	cfg := testConfig(t)
	mustOpen(t, cfg)
	want := []string{"isthmus", "isthmus/links", "isthmus/maps-v4", "isthmus/progs"}
	for _, h := range bpf.Hooks() {
		want = append(want, "isthmus/links/"+h.Name, "isthmus/progs/"+h.Name)
	}
	for _, spec := range currentVersion(t).specs {
		for m := range spec.Maps {
			want = append(want, "isthmus/maps-v4/"+m)
		}
	}
	slices.Sort(want)
	want = slices.Compact(want)
	if diff := cmp.Diff(want, pinned(t, cfg)); diff != "" {
		t.Errorf("pins (-want +got):\n%s", diff)
	}
}

func TestReopenChangesNothing(t *testing.T) {
	cfg := testConfig(t)
	d := mustOpen(t, cfg)
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), stateOf(9))); err != nil {
		t.Fatal(err)
	}
	before := linkPrograms(t, cfg)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	again := mustOpen(t, cfg)
	expect(t, again, stateOf(9))
	if diff := cmp.Diff(before, linkPrograms(t, cfg)); diff != "" {
		t.Errorf("programs replaced (-before +after):\n%s", diff)
	}
	if again.Writes() != 0 {
		t.Errorf("%d writes, want 0", again.Writes())
	}
}

func TestUpgradeAndRollBackInPlace(t *testing.T) {
	cfg := testConfig(t)
	d := mustOpen(t, cfg)
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), refusing())); err != nil {
		t.Fatal(err)
	}
	// The old agent stays open, as it may during a rolling update of the DaemonSet.
	for _, step := range []struct {
		build build
		want  error
	}{
		{otherVersion(t), unix.EHOSTUNREACH},
		{currentVersion(t), unix.ECONNREFUSED},
	} {
		next, err := open(t.Context(), cfg, step.build, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = next.Close() })
		if err := connect(t); !errors.Is(err, step.want) {
			t.Errorf("connect: %v, want %v", err, step.want)
		}
		expect(t, next, refusing())
	}
}

func currentVersion(t *testing.T) build {
	t.Helper()
	b, err := currentBuild(false)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A version whose last hook cannot be installed leaves a running dataplane as it was, and a clean node clean.
func TestFailedStartLeavesTheNodeAsItWas(t *testing.T) {
	failing := func(t *testing.T) build {
		t.Helper()
		b := otherVersion(t)
		b.specs[0].Programs["connect6"].AttachType = ebpf.AttachCGroupInet4Connect // loads, but does not fit the hook
		return b
	}
	t.Run("running dataplane", func(t *testing.T) {
		cfg := testConfig(t)
		d := mustOpen(t, cfg)
		if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), refusing())); err != nil {
			t.Fatal(err)
		}
		programs, files := linkPrograms(t, cfg), pinned(t, cfg)
		if _, err := open(t.Context(), cfg, failing(t), slog.New(slog.DiscardHandler)); err == nil {
			t.Fatal("a program was attached to a hook it is not for")
		}
		if err := connect(t); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("connect: %v, want %v", err, unix.ECONNREFUSED)
		}
		if diff := cmp.Diff(programs, linkPrograms(t, cfg)); diff != "" {
			t.Errorf("programs (-before +after):\n%s", diff)
		}
		if diff := cmp.Diff(files, pinned(t, cfg)); diff != "" {
			t.Errorf("pins (-before +after):\n%s", diff)
		}
	})
	t.Run("clean node", func(t *testing.T) {
		cfg := testConfig(t)
		if _, err := open(t.Context(), cfg, failing(t), slog.New(slog.DiscardHandler)); err == nil {
			t.Fatal("a program was attached to a hook it is not for")
		}
		if files := pinned(t, cfg); len(files) > 0 {
			t.Errorf("left behind: %v", files)
		}
		if err := connect(t); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("connect: %v, want %v: a program is still attached", err, unix.ENETUNREACH)
		}
	})
}

// The next installation completes one that was killed before its commit.
func TestInstallKilledBeforeCommit(t *testing.T) {
	cfg := testConfig(t)
	mustOpen(t, cfg)
	other := otherVersion(t)
	l := loader{pins: ours(cfg)}
	if err := l.run(other); err != nil {
		t.Fatal(err)
	}
	in := installer{pins: ours(cfg), cgroup: mustCgroup(t, cfg), hooks: other.hooks, progs: l.progs}
	if err := in.attachAll(); err != nil { // and no commit
		t.Fatal(err)
	}
	if err := errors.Join(in.close(), closeLinks(in.links), l.closeHandles()); err != nil {
		t.Fatal(err)
	}

	d := mustOpen(t, cfg)
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), refusing())); err != nil {
		t.Fatal(err)
	}
	if err := connect(t); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("connect: %v, want %v", err, unix.ECONNREFUSED)
	}
	for _, f := range pinned(t, cfg) {
		if strings.HasSuffix(f, "_new") {
			t.Errorf("%s is left over", f)
		}
	}
}

func mustCgroup(t *testing.T, cfg Config) cgroup {
	t.Helper()
	root, err := findCgroup(cfg.CgroupRoot)
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// A remount may give the node another cgroup: the hooks move there.
func TestHooksFollowTheCgroup(t *testing.T) {
	cfg := testConfig(t)
	elsewhere, err := netlab.NewCgroup()
	if err != nil {
		t.Fatal(err)
	}
	first := mustOpen(t, Config{CgroupRoot: elsewhere.Path, BPFFS: cfg.BPFFS})
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(elsewhere.Path); err != nil {
		t.Fatal(err)
	}
	d := mustOpen(t, cfg)
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), refusing())); err != nil {
		t.Fatal(err)
	}
	if err := connect(t); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("connect: %v, want %v", err, unix.ECONNREFUSED)
	}
	for _, h := range d.Hooks() {
		if !h.Attached {
			t.Errorf("%s is not attached", h.Name)
		}
	}
}

// Hooks reports a program that another process has detached.
func TestHooksNoticeDetach(t *testing.T) {
	cfg := testConfig(t)
	d := mustOpen(t, cfg)
	if err := detach(ours(cfg).linkPath("connect4")); err != nil {
		t.Fatal(err)
	}
	for _, h := range d.Hooks() {
		if h.Attached == (h.Name == "connect4") {
			t.Errorf("%s: attached is %v", h.Name, h.Attached)
		}
	}
}

func TestIncompatibleMapIsRefused(t *testing.T) {
	cfg := testConfig(t)
	path := ours(cfg).mapPath(bpf.MapFrontends)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Pin(path); err != nil {
		t.Fatal(err)
	}
	before := pinned(t, cfg)
	_, err = Open(t.Context(), cfg, slog.New(slog.DiscardHandler))
	if !errors.Is(err, ErrIncompatible) {
		t.Errorf("Open: %v, want %v", err, ErrIncompatible)
	}
	if diff := cmp.Diff(before, pinned(t, cfg)); diff != "" {
		t.Errorf("pins (-before +after):\n%s", diff)
	}
}

func TestRemove(t *testing.T) {
	cfg := testConfig(t)
	d := mustOpen(t, cfg) // still holds links and maps: Remove must not depend on it
	if err := d.Apply(t.Context(), lbtest.Diff(lb.NewState(), refusing())); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is nothing to remove
		if err := Remove(cfg); err != nil {
			t.Fatal(err)
		}
		if files := pinned(t, cfg); len(files) > 0 {
			t.Errorf("left behind: %v", files)
		}
	}
	if err := connect(t); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("connect: %v, want %v: a program is still attached", err, unix.ENETUNREACH)
	}
}

func TestWrongPaths(t *testing.T) {
	netlab.Privileged(t)
	good, plain := testConfig(t), t.TempDir()
	tests := map[string]struct {
		cfg   Config
		names string // what the sentence must name
	}{
		"no cgroup v2":       {Config{CgroupRoot: plain, BPFFS: good.BPFFS}, plain + "/unified"},
		"no such cgroup":     {Config{CgroupRoot: "/does/not/exist", BPFFS: good.BPFFS}, "/does/not/exist"},
		"no BPF filesystem":  {Config{CgroupRoot: good.CgroupRoot, BPFFS: plain}, "mount -t bpf bpf " + plain},
		"no such filesystem": {Config{CgroupRoot: good.CgroupRoot, BPFFS: "/does/not/exist"}, "mount -t bpf bpf /does/not/exist"},
		"relative path":      {Config{CgroupRoot: "sys/fs/cgroup", BPFFS: good.BPFFS}, "sys/fs/cgroup"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := Open(t.Context(), test.cfg, slog.New(slog.DiscardHandler))
			if err == nil || !strings.Contains(err.Error(), test.names) {
				t.Errorf("Open: %v; it must name %q", err, test.names)
			}
		})
	}
}

func TestFindCgroup(t *testing.T) {
	cg := netlab.NewTestCgroup(t).Path
	hybrid := t.TempDir() // as on a node with both cgroup versions: the second one is in "unified"
	if err := os.Symlink(cg, filepath.Join(hybrid, "unified")); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(cg)
	if err != nil {
		t.Fatal(err)
	}
	id := st.Sys().(*syscall.Stat_t).Ino
	for root, want := range map[string]cgroup{cg: {cg, id}, hybrid: {filepath.Join(hybrid, "unified"), id}} {
		got, err := findCgroup(root)
		if err != nil || got != want {
			t.Errorf("findCgroup(%s) = %v, %v, want %v", root, got, err, want)
		}
	}
}
