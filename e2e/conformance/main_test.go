package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

func TestCheckSuite(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		gomod string // "" for none
		want  string // a part of the error; "" for none
	}{
		"a clone":            {"module sigs.k8s.io/mcs-api/conformance\n\ngo 1.23.0\n", ""},
		"nothing":            {"", "clone github.com/kubernetes-sigs/mcs-api"},
		"another repository": {"module example.org/conformance\n", `is of module "example.org/conformance"`},
		"no module":          {"{}", `is of module "{}"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if tc.gomod != "" {
				if err := os.Mkdir(filepath.Join(dir, "conformance"), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, "conformance", "go.mod"), []byte(tc.gomod), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			err := checkSuite(dir)
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("the error is %v, want %q", err, tc.want)
			}
		})
	}
}

func TestFamiliesOf(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][2]topology.Families{
		"":                     {topology.IPv4First, topology.IPv4First},
		"ipv6-first":           {topology.IPv6First, topology.IPv6First},
		"ipv6-first,ipv4-only": {topology.IPv6First, topology.IPv4Only},
		",ipv4-only":           {topology.IPv4First, topology.IPv4Only},
	} {
		if have := familiesOf(text); have["a"] != want[0] || have["b"] != want[1] {
			t.Errorf("%q: %v, want %q", text, have, want)
		}
	}
}

func TestCount(t *testing.T) {
	t.Parallel()
	// The head of a report, as the suite writes it.
	const report = "groups:\n    - name: Required\n      tests: []\nsuitefailure: \"\"\ndnsdomain: clusterset.local\npassed: 26\ntotal: 27\nimplementation:\n    organization: isthmus-net\n"
	passed, all, err := count([]byte(report))
	if passed != 26 || all != 27 || err != nil {
		t.Errorf("%d of %d, %v; want 26 of 27", passed, all, err)
	}
	if _, _, err := count([]byte("passed: [")); err == nil {
		t.Error("a broken report is read")
	}
}
