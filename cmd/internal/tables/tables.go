// Package tables holds the tables that the commands `show` print, as text or as JSON. isthmus-agent on a node and isthmusctl
// for all nodes show the state of the dataplane in the same rows. Fields are only ever added, so that an older isthmusctl
// can read a newer agent.
package tables

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// Table is a header and rows. As JSON it is a list, never null.
type Table interface {
	Header() []string
	Rows() [][]string // each has as many cells as the header; an empty cell prints as "-"
	// Nothing returns the sentence to print instead of a table without rows.
	Nothing() string
}

// CheckFormat returns an error about the flag --output if Write does not know format.
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
