package dns

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Both resolvers answer correctly, and the kernel answers sooner.
func TestKernel(t *testing.T) {
	netlab.Privileged(t)
	b := &bench{sizes: sizes{phase: 20 * time.Millisecond}, rounds: 3, progress: t.Output(), dir: t.TempDir()}
	var err error
	if b.cpus.server, b.cpus.client, err = outerCPUs(); err != nil {
		t.Fatal(err)
	}
	b.program = filepath.Join(b.dir, "nameserver")
	if err := build(t.Context(), ".", "github.com/isthmus-net/isthmus/tools/bench/dns/nameserver", b.program); err != nil {
		t.Fatal(err)
	}
	rows, err := b.measureKernel(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 3 || rows[0].Value <= 0 || rows[0].Value >= 1 {
		t.Errorf("rows %v", rows)
	}
}
