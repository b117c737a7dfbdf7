package conformance

import (
	"slices"
	"testing"
)

// recorder is a test that keeps its attributes.
type recorder struct {
	testing.TB
	attributes []string
}

func (r *recorder) Helper() {}

func (r *recorder) Attr(key, value string) { r.attributes = append(r.attributes, key+"="+value) }

func TestEachLineIsReported(t *testing.T) {
	t.Parallel()
	var r recorder
	Holds(&r, "N26", "N27")
	LeaveOut(&r, "N28")
	if want := []string{"conformance=N26", "conformance=N27", "conformance-left-out=N28"}; !slices.Equal(r.attributes, want) {
		t.Errorf("attributes: %v, want %v", r.attributes, want)
	}
}
