package withdrawal_test

import (
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

func TestAReleaseIsTakenOnceForEachTimeThatItIsAsked(t *testing.T) {
	now := time.Now()
	text := withdrawal.AskRelease("b=2026-01-01T00:00:00Z,c=nonsense,", "d", now)
	if want := "d=" + now.UTC().Format(time.RFC3339); text != want {
		t.Errorf("what is old or unreadable stays: %s, want %s", text, want)
	}
	text = withdrawal.AskRelease(text, "e", now.Add(-2*withdrawal.HoldFor))
	done := withdrawal.Releases{}
	if got := done.Take(text); !slices.Equal(got, []clusterset.ClusterID{"d"}) {
		t.Errorf("asked are %v, want d alone: e was long ago", got)
	}
	if got := done.Take(text); len(got) > 0 {
		t.Errorf("asked again are %v", got)
	}
	if got := done.Take(withdrawal.AskRelease(text, "d", now.Add(time.Second))); !slices.Equal(got, []clusterset.ClusterID{"d"}) {
		t.Errorf("asked a second time are %v, want d", got)
	}
}
