package main

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Every check is a subtest, so that it counts in a run of all tests.
func TestKernels(t *testing.T) {
	netlab.Privileged(t)
	r, err := newRig(t.Output())
	if err != nil {
		t.Fatal(err)
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
