package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/bench/result"
)

func TestRun(t *testing.T) {
	t.Parallel()
	benches := map[string]bench{
		"good": func(_ context.Context, rounds int, progress io.Writer) ([]metric.Metric, error) {
			fmt.Fprintln(progress, "working")
			return []metric.Metric{{Name: "rounds", Value: float64(rounds), Bar: new(100.0), Better: metric.Lower}}, nil
		},
		"slow": func(context.Context, int, io.Writer) ([]metric.Metric, error) {
			return []metric.Metric{{Name: "latency", Value: 2, Bar: new(1.0), Better: metric.Lower}}, nil
		},
		"broken": func(context.Context, int, io.Writer) ([]metric.Metric, error) {
			return nil, errors.New("no such device")
		},
	}
	tests := map[string]struct {
		args   string
		fails  string // part of the error; empty: none
		stdout string // part of it
	}{
		"table":                   {"good", "", "rounds  6"},
		"json":                    {"good -o json -rounds 9", "", `"value": 9`},
		"flags before the name":   {"-o json good", "", `"bench": "good"`},
		"a bar missed":            {"slow", "", "MISSED"},
		"a bar missed, enforced":  {"slow -enforce", "latency", "MISSED"},
		"a bar met, enforced":     {"good -enforce", "", "met"},
		"cannot be measured":      {"broken", "broken: no such device", ""},
		"unknown name":            {"better", "broken, good, slow", ""},
		"no name":                 {"", "name is missing", ""},
		"unknown format":          {"good -o yaml", "-o yaml", ""},
		"unknown flag":            {"good -fast", "fast", ""},
		"no rounds":               {"good -rounds 0", "-rounds 0", ""},
		"something after the end": {"good -enforce yes", `"yes"`, ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var stdout, stderr bytes.Buffer
			err := run(t.Context(), benches, strings.Fields(tc.args), &stdout, &stderr)
			switch {
			case tc.fails == "" && err != nil:
				t.Errorf("have error %v", err)
			case tc.fails != "" && (err == nil || !strings.Contains(err.Error(), tc.fails)):
				t.Errorf("have error %v, want one that names %s", err, tc.fails)
			}
			if !strings.Contains(stdout.String(), tc.stdout) || tc.stdout == "" && stdout.Len() > 0 {
				t.Errorf("have on standard output:\n%s\nwant %q", &stdout, tc.stdout)
			}
			if strings.Contains(tc.args, "json") && err == nil {
				if err := json.Unmarshal(stdout.Bytes(), new(result.Result)); err != nil {
					t.Errorf("standard output is not JSON alone: %v\n%s", err, &stdout)
				}
			}
		})
	}
}
