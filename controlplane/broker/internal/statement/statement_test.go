package statement

import (
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func service(name string) clusterset.ServiceName {
	return clusterset.ServiceName{Namespace: "demo", Name: name}
}

// stating returns the statement of a member that exports these Services, with one slice each.
func stating(names ...string) string {
	var all Statement
	for _, name := range names {
		var of Statement
		of.AddExport(service(name))
		of.AddSlice(service(name), "slice-"+name)
		all.Merge(of)
	}
	return all.String()
}

func TestConfirms(t *testing.T) {
	epoch := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	var tracker Tracker
	has := func(name string, there bool) {
		tracker.Change("a", func(s *Statement) {
			if there {
				s.AddExport(service(name))
				s.AddSlice(service(name), "slice-"+name)
				return
			}
			s.RemoveExport(service(name))
			s.RemoveSlice(service(name), "slice-"+name)
		})
	}
	at := epoch
	confirms := func(what string, want bool, after time.Duration, statement string) {
		t.Helper()
		at = at.Add(after)
		if have := tracker.Confirms("a", statement, at); have != want {
			t.Errorf("%s: confirmed %t, want %t", what, have, want)
		}
	}
	has("x", true)
	has("y", true)
	confirms("the first renewal, which may be old", false, 0, stating("x", "y"))
	confirms("the next renewal", true, time.Second, stating("y", "x"))
	has("y", false)
	confirms("y vanished by an accident", false, time.Second, stating("x", "y"))
	confirms("the member withdrew y", true, time.Second, stating("x"))
	confirms("the Lease of a backup", false, -time.Minute, stating("x"))
	confirms("the same renewal again", false, 0, stating("x"))
	at = epoch
	confirms("a renewal after the backup's", true, time.Hour, stating("x"))
	confirms("no statement", false, time.Second, "")
	tracker.Change("a", func(s *Statement) { s.RemoveSlice(service("x"), "slice-x") })
	confirms("a slice is missing", false, time.Second, stating("x"))
	if tracker.Confirms("b", Statement{}.String(), epoch) || !tracker.Confirms("b", Statement{}.String(), epoch.Add(1)) {
		t.Error("a member without exports is not confirmed by its second renewal")
	}
}
