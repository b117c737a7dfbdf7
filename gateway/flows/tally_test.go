package flows

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// Every Service of the state has counts, others are forgotten, and active flows are listed seldom: counting them takes a
// hundredth of a CPU at most.
func TestTally(t *testing.T) {
	clock := time.Unix(1000, 0)
	tally := Tally{Now: func() time.Time { return clock }}
	web, dns, old := CountKey{"shop/web", "TCP"}, CountKey{"shop/dns", "UDP"}, CountKey{"shop/old", "TCP"}
	vips := []*desired.VIP{{Frontends: []desired.Frontend{{Service: "shop/web", Protocol: "TCP"}, {Service: "shop/dns", Protocol: "UDP"}}}}
	for _, k := range []CountKey{web, web, old} {
		tally.Open(k)
	}
	lists := 0
	counts := func(vips []*desired.VIP) map[CountKey]Counts {
		t.Helper()
		all, err := tally.Counts(vips, func(each func(CountKey)) error {
			lists++
			clock = clock.Add(time.Second) // that it takes
			each(web)
			each(old)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	want := map[CountKey]Counts{web: {Opened: 2, Active: 1}, dns: {}}
	for _, passed := range []time.Duration{0, countInterval, 80 * time.Second} {
		clock = clock.Add(passed)
		if diff := cmp.Diff(want, counts(vips)); diff != "" || lists != 1 {
			t.Errorf("listed %d times, want once; counts (-want +have):\n%s", lists, diff)
		}
	}
	clock = clock.Add(10 * time.Second)
	if counts(vips); lists != 2 {
		t.Errorf("listed %d times after a hundred times of what it takes, want twice", lists)
	}
	back := append(vips, &desired.VIP{Frontends: []desired.Frontend{{Service: "shop/old", Protocol: "TCP"}}})
	if n := counts(back)[old].Opened; n != 0 {
		t.Errorf("a Service that is gone, and comes back, has %d opened flows, want 0", n)
	}
	fails := errors.New("no such map")
	clock = clock.Add(time.Hour)
	if _, err := tally.Counts(vips, func(func(CountKey)) error { return fails }); !errors.Is(err, fails) {
		t.Errorf("list fails: %v", err)
	}
}
