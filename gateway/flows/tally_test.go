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
	one, two := Traffic{Sum{1, 100}, Sum{2, 300}}, Traffic{Sum{2, 200}, Sum{4, 600}}
	for _, k := range []CountKey{web, web, old} {
		tally.Forward(k, one)
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
	want := map[CountKey]Counts{web: {Opened: 2, Active: 1, Traffic: two}, dns: {}}
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
	if n := counts(back)[old]; n.Opened != 0 || n.Traffic != (Traffic{}) {
		t.Errorf("a Service that is gone, and comes back, has %v, want nothing opened or forwarded", n)
	}
	if since := two.Since(one); since != one {
		t.Errorf("%v since %v is %v", two, one, since)
	}
	if since := one.Since(two); since != one {
		t.Errorf("%v, less than before, is %v, want all of it", one, since)
	}
	fails := errors.New("no such map")
	clock = clock.Add(time.Hour)
	if _, err := tally.Counts(vips, func(func(CountKey)) error { return fails }); !errors.Is(err, fails) {
		t.Errorf("list fails: %v", err)
	}
}
