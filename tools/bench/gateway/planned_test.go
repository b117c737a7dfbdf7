package gateway

import (
	"testing"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// The bars match the promise: no request is lost, and no connection breaks.
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
