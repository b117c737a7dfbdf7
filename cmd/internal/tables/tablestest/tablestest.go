// Package tablestest formats tables for tests.
package tablestest

import (
	"bytes"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
)

// Text returns a table as text, with runs of spaces collapsed.
func Text(t testing.TB, tab tables.Table) string {
	t.Helper()
	var out bytes.Buffer
	if err := tables.Write(&out, tab, "text"); err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(out.String()) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	return strings.Join(lines, "\n")
}
