package timescale_test

import (
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
)

func TestFactor(t *testing.T) {
	for f, want := range map[timescale.Factor]time.Duration{0: time.Minute, 1: time.Minute, 0.1: 6 * time.Second, 2: 2 * time.Minute} {
		if have := f.Scale(time.Minute); have != want {
			t.Errorf("a minute times %v is %v, want %v", f, have, want)
		}
	}
}
