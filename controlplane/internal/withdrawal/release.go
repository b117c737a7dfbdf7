package withdrawal

import (
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// requestLife is how long the annotation keeps a request to release a hold: longer than a controller takes to see it.
const requestLife = 24 * time.Hour

// RequestRelease adds a request to release the holds of source to the annotation have, and drops old or unreadable
// requests. The result is like "east=2026-01-02T15:04:05Z,west=2026-01-02T15:10:00Z".
func RequestRelease(have string, source clusterset.ClusterID, now time.Time) string {
	kept := []string{string(source) + "=" + now.UTC().Format(time.RFC3339)}
	for entry := range strings.SplitSeq(have, ",") {
		id, text, _ := strings.Cut(entry, "=")
		at, err := time.Parse(time.RFC3339, text)
		if err == nil && id != string(source) && now.Sub(at) < requestLife {
			kept = append(kept, entry)
		}
	}
	slices.Sort(kept)
	return strings.Join(kept, ",")
}

// Releases remembers the request of each source that was handled. Create it with make or a literal.
type Releases map[clusterset.ClusterID]string

// Take returns the sources whose holds the annotation asks to release, once for each request. It skips requests older
// than the default HoldFor, which another process has handled.
func (r Releases) Take(annotation string) []clusterset.ClusterID {
	var requested []clusterset.ClusterID
	for entry := range strings.SplitSeq(annotation, ",") {
		text, at, ok := strings.Cut(strings.TrimSpace(entry), "=")
		id := clusterset.ClusterID(text)
		if !ok || r[id] == at {
			continue
		}
		r[id] = at
		if t, err := time.Parse(time.RFC3339, at); err == nil && time.Since(t) <= DefaultTimes().HoldFor {
			requested = append(requested, id)
		}
	}
	return requested
}
