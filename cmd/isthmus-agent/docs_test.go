package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/bpf"
)

// docs/dataplane.md lists every metric and every drop reason with the text in the program.
func TestDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/dataplane.md")
	if err != nil {
		t.Fatal(err)
	}
	var metrics, reasons []string
	for _, m := range slices.Concat(allMetrics, allDNSMetrics) {
		labels := "-"
		if len(m.labels) > 0 {
			labels = "`" + strings.Join(m.labels, "`, `") + "`"
		}
		metrics = append(metrics, fmt.Sprintf("| `%s` | %s | %s |", m.name, labels, m.help))
	}
	for r := bpf.DropNone + 1; r < bpf.DropMax; r++ {
		reasons = append(reasons, fmt.Sprintf("| `%s` | %s |", r, meanings[r]))
	}
	for heading, want := range map[string][]string{"### Metrics\n": metrics, "### Reasons\n": reasons} {
		_, section, ok := strings.Cut(string(text), heading)
		if !ok {
			t.Errorf("docs/dataplane.md has no heading %q", heading)
			continue
		}
		section, _, _ = strings.Cut(section, "\n#")
		var have []string
		for line := range strings.Lines(section) {
			if line = strings.TrimSpace(line); strings.HasPrefix(line, "| `") {
				have = append(have, line)
			}
		}
		if diff := cmp.Diff(want, have); diff != "" {
			t.Errorf("rows under %q (-want +docs):\n%s\nput these there:\n%s", heading, diff, strings.Join(want, "\n"))
		}
	}
}
