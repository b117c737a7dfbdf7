package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestCommandLine(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ args, says string }{
		"help":           {"--help", "go run ./tools/scale --members 0 --real a,b"},
		"an argument":    {"now", "unknown command"},
		"unknown flag":   {"--fast", "fast"},
		"format":         {"-o yaml", "-o yaml"},
		"rate of zero":   {"--churn 0/s", "--churn"},
		"rate in words":  {"--churn many", "such as 50/s"},
		"a third member": {"--real a,c", "--real c"},
		"no importer":    {"--real b", "--real must name a"},
		"no time":        {"--duration 0s", "--duration 0s"},
		"no rest":        {"--steady -1s", "--steady -1s"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			cmd := command()
			cmd.SetArgs(strings.Fields(tc.args))
			cmd.SetOut(&out)
			cmd.SetErr(&out)
			err := cmd.ExecuteContext(t.Context())
			said := out.String()
			if err != nil {
				said += err.Error()
			}
			if (err == nil) != (name == "help") || !strings.Contains(said, tc.says) {
				t.Errorf("it says %q (%v), want %q", said, err, tc.says)
			}
		})
	}
}

func TestRate(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{"50/s": "50/s", "0.5": "0.5/s"} {
		var r rate
		if err := r.Set(text); err != nil || r.String() != want {
			t.Errorf("%s gives %s (%v), want %s", text, r.String(), err, want)
		}
	}
}
