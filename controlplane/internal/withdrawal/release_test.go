package withdrawal_test

import (
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

func TestReleasesTakesEachRequestOnce(t *testing.T) {
	now := time.Now()
	text := withdrawal.RequestRelease("b=2026-01-01T00:00:00Z,c=nonsense,", "d", now)
	if want := "d=" + now.UTC().Format(time.RFC3339); text != want {
		t.Errorf("the annotation is %s, want %s without old or unreadable requests", text, want)
	}
	text = withdrawal.RequestRelease(text, "e", now.Add(-2*withdrawal.DefaultTimes().HoldFor))
	done := withdrawal.Releases{}
	if got := done.Take(text); !slices.Equal(got, []clusterset.ClusterID{"d"}) {
		t.Errorf("the requests are %v, want d alone: that of e is old", got)
	}
	if got := done.Take(text); len(got) > 0 {
		t.Errorf("a second look finds %v, want nothing", got)
	}
	if got := done.Take(withdrawal.RequestRelease(text, "d", now.Add(time.Second))); !slices.Equal(got, []clusterset.ClusterID{"d"}) {
		t.Errorf("a repeated request finds %v, want d", got)
	}
}
