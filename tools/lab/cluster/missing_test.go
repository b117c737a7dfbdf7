package cluster_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/lab/cluster"
)

// madeLab is a lab whose programs are long dead.
func madeLab(t *testing.T, dir, name, topology string) {
	t.Helper()
	home := filepath.Join(dir, "labs", name)
	if err := os.MkdirAll(home, 0o755); err != nil {
		t.Fatal(err)
	}
	settings := `{"Topology":"` + topology + `","ProxyMode":"nftables","CNI":"ptp","Programs":{"nodeinit":"/absent"}}`
	if err := os.WriteFile(filepath.Join(home, "lab.json"), []byte(settings), 0o644); err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, dir, name string) *cluster.Lab {
	t.Helper()
	l, err := cluster.Open(cluster.Config{Name: name, Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestLabThatWasNeverMade(t *testing.T) {
	dir := t.TempDir()
	for _, holds := range []string{"none", "first, second"} {
		l := open(t, dir, "nosuch")
		_, statusErr := l.Status(t.Context())
		for what, err := range map[string]error{
			"status":  statusErr,
			"load":    l.LoadImages(t.Context(), testArchive(t)),
			"cut":     l.Cut(t.Context(), "a1"),
			"start":   l.Start(t.Context(), "a1", "kubelet"),
			"node":    l.NodeCommand(t.Context(), "a1", "true").Run(),
			"kubectl": l.Kubectl(t.Context(), "a", "version").Run(),
		} {
			if !errors.Is(err, cluster.ErrNoLab) || !strings.HasSuffix(err.Error(), "which holds "+holds) {
				t.Errorf("%s: %v, want ErrNoLab and that there are %s", what, err, holds)
			}
		}
		madeLab(t, dir, "first", "a:1")
		madeLab(t, dir, "second", "a:1")
	}
	if s, err := open(t, dir, "first").Status(t.Context()); err != nil || s.Up {
		t.Errorf("a dead lab: up %v, %v", s.Up, err)
	}
}

func TestLoadImagesRefuses(t *testing.T) {
	dir := t.TempDir()
	madeLab(t, dir, "nodeless", "broker:0")
	madeLab(t, dir, "dead", "a:2")
	for _, name := range []string{"nodeless", "dead"} {
		l := open(t, dir, name)
		if err := l.LoadImages(t.Context(), "nosuch.tar"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "nosuch.tar") {
			t.Errorf("%s: %v, want that nosuch.tar does not exist", name, err)
		}
		if err := l.LoadImages(t.Context(), testArchive(t)); err == nil || !strings.Contains(err.Error(), "no running nodes") {
			t.Errorf("%s: %v, want that no node runs", name, err)
		}
	}
}
