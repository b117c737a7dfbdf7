package view

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func importYAML(name string) string {
	return fmt.Sprintf(`apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceImport
metadata: {namespace: demo, name: %s}
spec: {type: ClusterSetIP, ips: [243.0.0.5], ipFamilies: [IPv4], ports: [{name: http, protocol: TCP, port: 80}]}
`, name)
}

func sliceYAML(name, service, pod string) string {
	return fmt.Sprintf(`apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  namespace: demo
  name: %s
  labels: {multicluster.kubernetes.io/service-name: %s, multicluster.kubernetes.io/source-cluster: a}
addressType: IPv4
ports: [{name: http, protocol: TCP, port: 8080}]
endpoints: [{addresses: [%s]}]
`, name, service, pod)
}

// summary formats a Snapshot on one line: each Service with its addresses.
func summary(s *clusterset.Snapshot) string {
	if s == nil {
		return "nothing"
	}
	var words []string
	for _, svc := range s.Services {
		word := strings.TrimPrefix(svc.Service.String(), "demo/") + ":"
		for _, slice := range svc.Slices {
			for _, e := range slice.Endpoints {
				word += e.Addrs[0].String() + ","
			}
		}
		words = append(words, strings.TrimSuffix(word, ","))
	}
	return strings.Join(words, " ")
}

// TestFolder writes files, and checks the Snapshot and the faults in Status.
func TestFolder(t *testing.T) {
	type step struct {
		write    map[string]string // name -> text; "" removes it
		snapshot string
		faults   []string // parts of Status.WatchErr, nil for none at all
	}
	whole := importYAML("hello") + "---\n" + sliceYAML("hello-1", "hello", "10.1.0.1")
	tests := map[string][]step{
		"several objects in a file, files of several kinds": {
			{map[string]string{"a.yaml": whole, "b.yml": importYAML("world"), "c.txt": "hi", ".d.yaml": ":"}, "hello:10.1.0.1 world:", nil},
			{map[string]string{"c.json": `{"apiVersion":"multicluster.x-k8s.io/v1alpha1","kind":"ServiceImport","metadata":{"name":"far"},"spec":{"type":"Headless","ports":[]}}`}, "default/far: hello:10.1.0.1 world:", nil},
		},
		"a file changes and is deleted": {
			{map[string]string{"a.yaml": importYAML("hello"), "b.yaml": sliceYAML("hello-1", "hello", "10.1.0.1")}, "hello:10.1.0.1", nil},
			{map[string]string{"b.yaml": sliceYAML("hello-1", "hello", "10.1.0.22")}, "hello:10.1.0.22", nil},
			{map[string]string{"b.yaml": ""}, "hello:", nil},
			{map[string]string{"a.yaml": ""}, "", nil},
		},
		"an invalid file keeps its last objects": {
			{map[string]string{"a.yaml": whole, "b.yaml": importYAML("world")}, "hello:10.1.0.1 world:", nil},
			{map[string]string{"a.yaml": whole + "---\nkind: [", "b.yaml": ""}, "hello:10.1.0.1", []string{"a.yaml", "document 3"}},
			{map[string]string{"a.yaml": importYAML("hello")}, "hello:", nil},
		},
		"at the start no snapshot before all files are valid": {
			{map[string]string{"a.yaml": whole, "b.yaml": strings.Replace(importYAML("world"), "ports", "prots", 1)}, "nothing", []string{"b.yaml", "document 1", "prots"}},
			{map[string]string{"b.yaml": importYAML("world")}, "hello:10.1.0.1 world:", nil},
		},
		"an object twice": {
			{
				map[string]string{"a.yaml": whole, "b.yaml": importYAML("hello") + "---\n" + sliceYAML("hello-1", "hello", "10.9.9.9")},
				"hello:10.1.0.1",
				[]string{"b.yaml", "ServiceImport demo/hello is in a.yaml", "EndpointSlice demo/hello-1 is in a.yaml"},
			},
			{map[string]string{"a.yaml": ""}, "hello:10.9.9.9", nil},
		},
		"an object twice, and the second one is deleted": {
			{map[string]string{"a.yaml": importYAML("hello"), "b.yaml": importYAML("hello")}, "hello:", []string{"b.yaml"}},
			{map[string]string{"b.yaml": ""}, "hello:", nil},
		},
		"a list, comments and empty documents": {
			{map[string]string{"a.yaml": "# nothing yet\n---\n---\napiVersion: v1\nkind: List\nitems:\n- " +
				strings.ReplaceAll(strings.TrimSpace(importYAML("hello")), "\n", "\n  ") + "\n"}, "hello:", nil},
		},
		"other kinds, and no kind": {
			{map[string]string{"a.yaml": "apiVersion: v1\nkind: Service\n---\nmetadata: {}\n---\napiVersion: v1\nkind: ServiceImport\n"}, "nothing", []string{"v1 Service is neither", "kind is missing", "document 3"}},
		},
		"JSON is read as strictly as YAML": {
			{map[string]string{"a.json": `{"apiVersion":"multicluster.x-k8s.io/v1beta1","kind":"ServiceImport","metadata":{"name":"hello","name":"world"},"spec":{"type":"Headless"}}`}, "nothing", []string{"a.json", "already set"}},
			{map[string]string{"a.json": `{"apiVersion":"multicluster.x-k8s.io/v1beta1","kind":"ServiceImport","metadata":{"name":"hello"},"spec":{"type":"Headless","prots":[]}}`}, "nothing", []string{"a.json", "prots"}},
			{map[string]string{"a.json": `{"apiVersion":"multicluster.x-k8s.io/v1beta1","kind":"ServiceImport","metadata":{"name":80},"spec":{"type":"Headless"}}`}, "default/80:", nil},
		},
		"an empty folder gives an empty snapshot": {{nil, "", nil}},
	}
	for name, steps := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				sink := &recorder{}
				v, err := NewFolder(Config{Sinks: map[string]Sink{"test": sink}, Log: slog.New(slog.DiscardHandler)}, dir)
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error)
				go func() { done <- v.Run(ctx) }()
				for i, s := range steps {
					for name, text := range s.write {
						at := filepath.Join(dir, name)
						if text == "" {
							err = os.Remove(at)
						} else {
							err = os.WriteFile(at, []byte(text), 0o600)
						}
						if err != nil {
							t.Fatal(err)
						}
					}
					<-time.After(2 * time.Second)
					synctest.Wait()
					var last *clusterset.Snapshot
					if calls := sink.seen(); len(calls) > 0 {
						last = calls[len(calls)-1].snapshot
					}
					if diff := cmp.Diff(s.snapshot, summary(last)); diff != "" {
						t.Errorf("step %d (-want +got):\n%s", i, diff)
					}
					status := v.Status()
					if status.Synced == (s.snapshot == "nothing") {
						t.Errorf("step %d: synced is %v", i, status.Synced)
					}
					if (status.WatchErr == nil) != (s.faults == nil) {
						t.Errorf("step %d: status says %v, want %v", i, status.WatchErr, s.faults)
					}
					for _, f := range s.faults {
						if !strings.Contains(fmt.Sprint(status.WatchErr), f) {
							t.Errorf("step %d: status says %v, and does not name %q", i, status.WatchErr, f)
						}
					}
				}
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// A deleted folder removes no object; the content of a new folder replaces the old one.
func TestFolderIsDeleted(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "world")
	synctest.Test(t, func(t *testing.T) {
		sink := &recorder{}
		v, err := NewFolder(Config{Sinks: map[string]Sink{"test": sink}, Log: slog.New(slog.DiscardHandler)}, dir)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- v.Run(ctx) }()
		for _, s := range []struct {
			act      func() error
			snapshot string
			fault    bool
		}{
			{func() error { return nil }, "nothing", true},
			{func() error { return os.Mkdir(dir, 0o700) }, "", false},
			{func() error { return os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(importYAML("hello")), 0o600) }, "hello:", false},
			{func() error { return os.RemoveAll(dir) }, "hello:", true},
			{func() error { return os.Mkdir(dir, 0o700) }, "", false},
		} {
			if err := s.act(); err != nil {
				t.Fatal(err)
			}
			<-time.After(2 * time.Second)
			synctest.Wait()
			var last *clusterset.Snapshot
			if calls := sink.seen(); len(calls) > 0 {
				last = calls[len(calls)-1].snapshot
			}
			if got := summary(last); got != s.snapshot || (v.Status().WatchErr != nil) != s.fault {
				t.Errorf("snapshot %q, want %q; status says %v", got, s.snapshot, v.Status().WatchErr)
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A file that changes between two scans is still being written.
func TestFileMustSettle(t *testing.T) {
	at := filepath.Join(t.TempDir(), "a.yaml")
	if err := os.WriteFile(at, []byte(importYAML("hello")), 0o600); err != nil {
		t.Fatal(err)
	}
	var k file
	for i, size := range []int64{1, 2, 3, 3, 3, 4, 4} {
		fresh, err := k.look(at, stamp{size: size})
		if err != nil {
			t.Fatal(err)
		}
		if want := i == 3 || i == 6; fresh != want {
			t.Errorf("look %d: read is %v, want %v", i, fresh, want)
		}
	}
}
