package withdrawal

import (
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// releaseLife is how long an asking to release a hold is kept: longer than any controller needs to see it.
const releaseLife = 24 * time.Hour

// AskRelease returns the annotation have, by which people ask to release holds, with source asked for at now. What is
// old or unreadable goes.
func AskRelease(have string, source clusterset.ClusterID, now time.Time) string {
	kept := []string{string(source) + "=" + now.UTC().Format(time.RFC3339)}
	for entry := range strings.SplitSeq(have, ",") {
		id, text, _ := strings.Cut(entry, "=")
		at, err := time.Parse(time.RFC3339, text)
		if err == nil && id != string(source) && now.Sub(at) < releaseLife {
			kept = append(kept, entry)
		}
	}
	slices.Sort(kept)
	return strings.Join(kept, ",")
}

// Releases remembers what has been done of such an annotation, by source. It is made as a map is.
type Releases map[clusterset.ClusterID]string

// Take returns the sources whose holds the annotation asks to release, each once for each time that it is asked. What
// was asked longer ago than HoldFor was done by another process.
func (r Releases) Take(annotation string) []clusterset.ClusterID {
	var asked []clusterset.ClusterID
	for entry := range strings.SplitSeq(annotation, ",") {
		text, at, ok := strings.Cut(strings.TrimSpace(entry), "=")
		id := clusterset.ClusterID(text)
		if !ok || r[id] == at {
			continue
		}
		r[id] = at
		if t, err := time.Parse(time.RFC3339, at); err == nil && time.Since(t) <= HoldFor {
			asked = append(asked, id)
		}
	}
	return asked
}
