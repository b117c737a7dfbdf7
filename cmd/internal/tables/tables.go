// Package tables is what the commands `show` print: rows of text for people, and the same rows as JSON for programs.
// What stands in a node's kernel is shown by isthmus-agent on that node and by isthmusctl for all of them, in the same
// rows. Fields are only ever added, so an older isthmusctl reads a newer agent.
package tables

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// Table is rows under a header. As JSON it is a list, never null.
type Table interface {
	Header() []string
	Rows() [][]string // as many cells each as the header has; "" is shown as "-"
	// Nothing is what to say instead of a table without rows.
	Nothing() string
}

// CheckFormat reports a format that Write does not know, as the fault of the flag --output.
func CheckFormat(format string) error {
	if format != "text" && format != "json" {
		return fmt.Errorf("--output=%s is unknown; use text or json", format)
	}
	return nil
}

// Write writes t as "text" or as "json".
func Write(out io.Writer, t Table, format string) error {
	if format == "json" {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(t)
	}
	rows := t.Rows()
	if len(rows) == 0 {
		_, err := fmt.Fprintln(out, t.Nothing())
		return err
	}
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	for _, row := range append([][]string{t.Header()}, rows...) {
		for i, cell := range row {
			if cell == "" {
				cell = "-"
			}
			if i > 0 {
				fmt.Fprint(w, "\t")
			}
			fmt.Fprint(w, cell)
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}
