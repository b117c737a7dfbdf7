package datapath

import (
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// The error about a missing feature is one sentence with the feature, the kernel and the fix. Open checks before it
// changes anything, so a running dataplane stays as it is.
func TestRequireKernel(t *testing.T) {
	broken := errors.New("broken")
	for name, c := range map[string]struct {
		probe error
		is    error
		says  []string
	}{
		"complete":      {nil, nil, nil},
		"not supported": {ebpf.ErrNotSupported, ErrUnsupported, []string{"BPF helper set_retval", kernelRelease(), "Linux 6.1 or newer"}},
		"not permitted": {unix.EPERM, unix.EPERM, []string{"run as root or with the capabilities BPF, NET_ADMIN and PERFMON"}},
		"probe fails":   {broken, broken, []string{"BPF helper set_retval", kernelRelease()}},
	} {
		t.Run(name, func(t *testing.T) {
			err := requireKernel([]need{
				{"something else", func() error { return nil }},
				{"BPF helper set_retval", func() error { return c.probe }},
			})
			if !errors.Is(err, c.is) {
				t.Fatalf("error %v, want %v", err, c.is)
			}
			for _, part := range c.says {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("more than one sentence: %q", err)
			}
		})
	}
}
