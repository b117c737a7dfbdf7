package cluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOpenRefuses(t *testing.T) {
	base := t.TempDir()
	made := filepath.Join(base, "labs", "made")
	if err := os.MkdirAll(made, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(made, settingsFile), []byte(`{"Topology":"a:1","ProxyMode":"nftables","CNI":"ptp"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		cfg    Config
		faults []string
	}{
		"good":            {Config{}, nil},
		"same topology":   {Config{Name: "made", Topology: " a:1 "}, nil},
		"other topology":  {Config{Name: "made", Topology: "a:2"}, []string{`exists with topology "a:1", not "a:2"`}},
		"all at once":     {Config{Name: "Bad", Topology: "a", ProxyMode: "ipvs", CNI: "x"}, []string{"the name", "topology", `"ipvs"`, `"x"`}},
		"hidden dir":      {Config{Dir: "/var/lib/labs"}, []string{"would not see it"}},
		"relative dir":    {Config{Dir: "labs"}, []string{"not absolute"}},
		"dir is too long": {Config{Dir: "/var/tmp/" + strings.Repeat("x", 90)}, []string{"unix socket"}},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.cfg.Dir == "" {
				tc.cfg.Dir = base
			}
			_, err := Open(tc.cfg)
			if err == nil && tc.faults != nil || err != nil && tc.faults == nil {
				t.Fatalf("have %v, want %q", err, tc.faults)
			}
			for _, f := range tc.faults {
				if !strings.Contains(err.Error(), f) {
					t.Errorf("have %v, want %q", err, f)
				}
			}
		})
	}
}

func TestParseImages(t *testing.T) {
	have := parseImages("REF TYPE DIGEST SIZE PLATFORMS LABELS\n" +
		"x/isthmus/agent:dev application/vnd.oci.image.manifest.v1+json sha256:aa 1.3 MiB linux/amd64 -\n\n")
	if diff := cmp.Diff(map[string]string{"x/isthmus/agent:dev": "sha256:aa"}, have); diff != "" {
		t.Errorf("images (-want +have):\n%s", diff)
	}
}
