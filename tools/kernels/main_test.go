package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/kernels/internal/kernel"
	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Every check is a subtest, so that it counts in a run of all tests. As with other tests that depend on nothing but their source,
// the results of an unchanged program on an emulated kernel are remembered, except in a soak.
func TestKernels(t *testing.T) {
	netlab.Privileged(t)
	r, err := newRig(t.Output())
	if err != nil {
		t.Fatal(err)
	}
	if os.Getenv("ISTHMUS_FULL_LENGTH") == "" {
		r.results = filepath.Join(cluster.CacheDir(), "kernels", "passed")
	}
	t.Cleanup(func() {
		if err := r.close(); err != nil {
			t.Error(err)
		}
	})
	for _, name := range names(false) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := r.test(t.Context(), name)
			if err := o.fault(); err != nil {
				t.Error(err)
			}
			conformance.Holds(t, "L69")
			for _, check := range o.passed {
				t.Run(check, func(*testing.T) {})
			}
		})
	}
}

func TestFault(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		said string
		err  error
		want string // part of the fault; empty: none
	}{
		"all passed":                {"noise\nPASS a (3ms)\nPASS b (1.2s)\nEND 2 passed, 0 failed\n", nil, ""},
		"one failed":                {"PASS a (3ms)\nFAIL b: no route\nEND 1 passed, 1 failed\n", nil, "b: no route"},
		"cut short":                 {"PASS a (3ms)\n", nil, "cut short"},
		"a line lost":               {"PASS a (3ms)\nEND 2 passed, 0 failed\n", nil, "cut short"},
		"nothing ran":               {"END 0 passed, 0 failed\n", nil, "nothing was checked"},
		"did not start":             {"", errors.New("no emulator"), "no emulator"},
		"lines of a serial console": {"PASS a (3ms)\r\nEND 1 passed, 0 failed\r\n", nil, ""},
		"an unfinished line":        {"PASS a (3ms)\nEND 1 passed, 0 fai", nil, "cut short"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, o := &rig{out: t.Output()}, outcome{kernel: "k", err: tc.err}
			l := &lines{take: func(line string) { r.take(&o, line) }}
			for part := range slices.Chunk([]byte(tc.said), 7) {
				if _, err := l.Write(part); err != nil {
					t.Fatal(err)
				}
			}
			switch err := o.fault(); {
			case tc.want == "" && err != nil:
				t.Error(err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("have fault %v, want one that names %q", err, tc.want)
			}
		})
	}
}

// A kernel that ends before the first check is booted once more, any other is not.
func TestBootAgain(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		said  []string // by each boot
		err   error
		boots int
		fault string
	}{
		"a good one":             {[]string{"PASS a (3ms)\nEND 1 passed, 0 failed\n"}, nil, 1, ""},
		"a panic at first":       {[]string{"Kernel panic\n", "PASS a (3ms)\nEND 1 passed, 0 failed\n"}, nil, 2, ""},
		"a panic each time":      {[]string{"Kernel panic\n", "Kernel panic\n", ""}, nil, 2, "cut short"},
		"a panic during a check": {[]string{"PASS a (3ms)\nKernel panic\n", ""}, nil, 1, "cut short"},
		"no emulator":            {[]string{"", ""}, errors.New("no emulator"), 1, "no emulator"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, o, boots := &rig{out: t.Output()}, outcome{kernel: "k"}, 0
			l := &lines{take: func(line string) { r.take(&o, line) }}
			o.err = r.bootAgain(&o, func() error {
				boots++
				_, err := l.Write([]byte(tc.said[boots-1]))
				return errors.Join(tc.err, err)
			})
			if err := o.fault(); boots != tc.boots || (err == nil) != (tc.fault == "") || err != nil && !strings.Contains(err.Error(), tc.fault) {
				t.Errorf("booted %d times, want %d; fault %v, want %q", boots, tc.boots, err, tc.fault)
			}
		})
	}
}

func TestUnknownKernel(t *testing.T) {
	t.Parallel()
	r := &rig{out: t.Output()}
	if err := r.test(t.Context(), "2.4").fault(); err == nil || !strings.Contains(err.Error(), "not one of 6.1, 6.12, native, 6.1-arm64, 6.12-arm64") {
		t.Errorf("have fault %v, want the kernels there are", err)
	}
}

// A kernel that passed is not run again with the same bytes. After a failure, or with other bytes, it is.
func TestPassedIsRemembered(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	r := &rig{out: t.Output(), results: filepath.Join(dir, "passed")}
	k := kernel.Kernel{Image: file("image", "k")}
	const passes, fails = "PASS a (3ms)\nEND 1 passed, 0 failed\n", "FAIL a: no route\nEND 0 passed, 1 failed\n"
	for _, step := range []struct {
		initrd, says string // says is what the kernel would say; empty: it must not run
		want         string
	}{
		{"one", fails, "a: no route"},
		{"one", passes, ""},
		{"one", "", ""},
		{"two", fails, "a: no route"},
	} {
		var o outcome
		err := r.unlessPassed(file("initrd", step.initrd), k, &lines{take: func(line string) { r.take(&o, line) }}, func(console io.Writer) error {
			if step.says == "" {
				t.Errorf("%s ran again", step.initrd)
			}
			_, err := io.WriteString(console, step.says)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := o.fault(); (step.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), step.want) {
			t.Errorf("%s: fault %v, want %q", step.initrd, err, step.want)
		}
	}
}
