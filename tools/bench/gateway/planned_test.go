package gateway

import (
	"os"
	"testing"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

func TestMain(m *testing.M) { os.Exit(netlab.Main(m)) }

// Nothing that is planned, and no agent that crashes, loses a request or breaks a connection of the whole program, whatever
// balances: once, and shorter than the benchmark does it.
func TestNobodyNotices(t *testing.T) {
	netlab.Privileged(t)
	p, err := newPrograms(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range balancers {
		t.Run(string(b.kind), func(t *testing.T) {
			t.Parallel()
			seen := newDisturbed()
			// Nobody dies, and on a busy machine 3x100 ms may pass before a living gateway's BFD has a CPU.
			if err := disturb(t.Context(), p, b.kind, 6*millis, resting/5, seen, t.Logf); err != nil {
				t.Fatal(err)
			}
			for i, w := range works {
				if all := seen.lost[i]; all.lost > 0 || all.asked == 0 {
					t.Errorf("%s: %d requests are lost of %d", w.name, all.lost, all.asked)
				}
			}
			if seen.broken > 0 || seen.opened == 0 {
				t.Errorf("%d connections are broken of %d", seen.broken, seen.opened)
			}
		})
	}
}

// The bars are those that are promised: nothing is lost, and nothing breaks.
func TestPlannedRows(t *testing.T) {
	t.Parallel()
	seen := func(lost, broken int) map[desired.Balancer]*disturbed {
		all := map[desired.Balancer]*disturbed{}
		for _, b := range balancers {
			d := newDisturbed()
			d.opened, d.broken = 10, broken
			for i := range d.lost {
				d.lost[i] = requests{asked: 10, lost: lost}
			}
			all[b.kind] = d
		}
		return all
	}
	good, bad := plannedRows(seen(0, 0)), plannedRows(seen(1, 1))
	if want := len(balancers) * (len(works) + 1); len(good) != want {
		t.Errorf("%d rows, want %d", len(good), want)
	}
	for i := range good {
		if good[i].Bar == nil || !good[i].Met() || bad[i].Met() {
			t.Errorf("%s: bar %v, met when nothing is lost: %v, when one is: %v", good[i].Name, good[i].Bar, good[i].Met(), bad[i].Met())
		}
	}
}
