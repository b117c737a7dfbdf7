package status

import (
	"fmt"
	"io"
)

// RecordsPath takes name=, at and below which records are asked for, or nothing. It answers with Records, and also
// processes of the node itself.
const RecordsPath = "/records"

// Record is one record that a node's name server answers with.
type Record struct {
	Name string `json:"name"` // fully qualified
	Type string `json:"type"`
	TTL  uint32 `json:"ttl"` // seconds
	Data string `json:"data"`
}

// Records are sorted by name, from the right.
type Records []Record

// WriteZone writes them to w as lines of a zone file.
func (r Records) WriteZone(w io.Writer) error {
	for _, record := range r {
		if _, err := fmt.Fprintf(w, "%s %d IN %s %s\n", record.Name, record.TTL, record.Type, record.Data); err != nil {
			return err
		}
	}
	return nil
}
