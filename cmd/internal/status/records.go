package status

import (
	"fmt"
	"io"
)

// RecordsPath returns the Records at name= and below, or all without name=. Processes of the node need no token for it.
const RecordsPath = "/records"

// Record is one record of a node's name server.
type Record struct {
	Name string `json:"name"` // fully qualified
	Type string `json:"type"`
	TTL  uint32 `json:"ttl"` // seconds
	Data string `json:"data"`
}

// Records are sorted by name, from the rightmost label.
type Records []Record

// WriteZone writes the records to w as lines of a zone file.
func (r Records) WriteZone(w io.Writer) error {
	for _, record := range r {
		if _, err := fmt.Fprintf(w, "%s %d IN %s %s\n", record.Name, record.TTL, record.Type, record.Data); err != nil {
			return err
		}
	}
	return nil
}
