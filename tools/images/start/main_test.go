package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Programs that do not start are errors.
func TestVersionFails(t *testing.T) {
	netlab.Privileged(t) // chroot
	root := t.TempDir()
	self, err := os.ReadFile("/proc/self/exe") // a static program that does not know --version
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"text": []byte("no program\n"), "test": self} {
		if err := os.WriteFile(filepath.Join(root, name), content, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for program, want := range map[string]string{"/none": "no such file", "/text": "exec format error", "/test": "exit status 2"} {
		if said, err := new(starter).version(t.Context(), root, program); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: have %v, want %s\n%s", program, err, want, said)
		}
	}
}

func TestUnknownArchitecture(t *testing.T) {
	t.Parallel()
	s := &starter{architecture: "z80", out: t.Output()}
	if err := s.run(t.Context(), []string{"agent"}); err == nil || !strings.Contains(err.Error(), `no emulator of "z80"`) {
		t.Errorf("have %v, want that there is no emulator", err)
	}
}
