package cluster_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/images/oci"
)

// footprint lists what a lab called labtest could leave on the machine, and the places
// where Kubernetes would put its files if it ran on the host itself.
func footprint(t *testing.T) map[string][]string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	found := map[string][]string{"processes": labProcesses(t)}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, "labtest") {
			found["mounts"] = append(found["mounts"], strings.Fields(line)[1])
		}
	}
	for kind, pattern := range map[string]string{
		"network namespaces": "/run/netns/*labtest*",
		"cgroups":            "/sys/fs/cgroup/*labtest*",
		"v1 cgroups":         "/sys/fs/cgroup/*/*labtest*",
		"nested cgroups":     "/sys/fs/cgroup/*/*/*/*labtest*",
		"state":              "/var/tmp/isthmus/labs/labtest",
		"kubelet":            "/var/lib/kubelet",
		"kubernetes":         "/etc/kubernetes",
		"cni":                "/etc/cni/net.d",
		"pods":               "/var/log/pods",
		"pins":               "/sys/fs/bpf/*",
	} {
		if found[kind], err = filepath.Glob(pattern); err != nil {
			t.Fatal(err)
		}
	}
	return found
}

// labProcesses are the command lines that name the lab's directory.
func labProcesses(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !strings.Contains(err.Error(), "no such process") {
			t.Fatal(err)
		}
		if strings.Contains(string(raw), "/labs/labtest/") {
			found = append(found, strings.ReplaceAll(string(raw), "\x00", " "))
		}
	}
	return found
}

// inotifyInstances counts what the processes of each machine of labtest hold.
func inotifyInstances(t *testing.T) map[string]int {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]int{}
	for _, link := range links {
		if target, err := os.Readlink(link); err != nil || target != "anon_inode:inotify" {
			continue // most are something else, some are gone already
		}
		cgroups, err := os.ReadFile(filepath.Join(filepath.Dir(link), "../cgroup"))
		if err != nil {
			continue
		}
		if _, name, ok := strings.Cut(string(cgroups), "isthmus.labtest."); ok {
			found[name[:strings.IndexAny(name, "/\n")]]++
		}
	}
	return found
}

// testArchive makes the smallest image there is.
func testArchive(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "empty.tar")
	err := oci.Write(file, oci.Spec{Names: []string{"isthmus/empty:dev"}, Entrypoint: []string{"/nothing"}}, func(l *oci.Layer) error {
		return l.Text("/nothing", "")
	})
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// showLogs prints the end of every component's log; the files go with the lab.
func showLogs(t *testing.T, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "machines/*/log/*.log"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			t.Error(err)
		}
		lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
		t.Logf("%s:\n%s", f, strings.Join(lines[max(0, len(lines)-15):], "\n"))
	}
}
