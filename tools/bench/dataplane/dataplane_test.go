package dataplane

import (
	"io"
	"os"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

// One round, to see that every row comes out; what the rows say is for a quiet machine.
func TestRun(t *testing.T) {
	netlab.Privileged(t)
	rows, err := Run(t.Context(), 1, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 7 {
		t.Errorf("%d rows, want 7", len(rows))
	}
	for _, r := range rows {
		if r.Value <= 0 || r.Unit == "ratio" && r.Value > 10 {
			t.Errorf("%s: %v %s makes no sense", r.Name, r.Value, r.Unit)
		}
	}
}

func TestMedian(t *testing.T) {
	for want, values := range map[float64][]float64{1: {1}, 2: {3, 1, 2}, 2.5: {4, 1, 3, 2}} {
		if got := median(values); got != want {
			t.Errorf("median(%v) = %v, want %v", values, got, want)
		}
	}
}

// The ratio is taken round by round: a round that is slow on both roads does not count twice.
func TestMedianRatio(t *testing.T) {
	at := func(us ...int) []sample {
		s := make([]sample, len(us))
		for i := range us {
			s[i].cpu = time.Duration(us[i])
		}
		return s
	}
	cpu := func(s sample) float64 { return float64(s.cpu) }
	if got := medianRatio(at(110, 1100, 330), at(100, 1000, 100), cpu); got != 1.1 {
		t.Errorf("median ratio %v, want 1.1", got)
	}
}
