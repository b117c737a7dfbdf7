package hosts_test

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/hosts"
)

var shop = clusterset.ServiceName{Namespace: "demo", Name: "shop"}

// answers is a resolver with one response, which the test changes. It counts the notified Services.
type answers struct {
	mu          sync.Mutex
	addrs       []netip.Addr
	ttl         time.Duration
	err         error
	asked, told int
}

func (a *answers) query(context.Context, string) ([]netip.Addr, time.Duration, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked++
	return a.addrs, a.ttl, a.err
}

func (a *answers) tell(clusterset.ServiceName) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.told++
}

func (a *answers) are(addrs []netip.Addr, ttl time.Duration, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.addrs, a.ttl, a.err = addrs, ttl, err
}

func TestAddressesFollowTheirTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one, two := []netip.Addr{netip.MustParseAddr("203.0.113.1")}, []netip.Addr{netip.MustParseAddr("203.0.113.2")}
		a := new(answers)
		a.are(one, time.Minute, nil)
		h := hosts.New(a.query, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- h.Run(ctx, a.tell) }()
		check := func(when string, want []netip.Addr, wantTold, wantAsked int) {
			t.Helper()
			synctest.Wait()
			a.mu.Lock()
			defer a.mu.Unlock()
			if got, _ := h.Lookup("lb.example.org"); !slices.Equal(got, want) || a.told != wantTold || a.asked != wantAsked {
				t.Errorf("%s: %v, told %d times, asked %d times; want %v, %d, %d", when, got, a.told, a.asked, want, wantTold, wantAsked)
			}
		}
		pass := func(d time.Duration) { <-time.After(d) }

		h.Use(shop, []string{"lb.example.org"})
		check("at first", one, 1, 1)
		pass(59 * time.Second)
		check("within a minute", one, 1, 1)
		a.are(two, 0, nil)
		pass(time.Second)
		check("after a minute", two, 2, 2)
		a.are(two, 0, errors.New("no answer"))
		pass(5 * time.Second)
		check("a time to live of 0 is 5 s, and silence changes nothing", two, 2, 3)
		pass(20 * time.Second)
		check("it is asked again", two, 2, 5)
		a.are(nil, 0, nil)
		pass(10 * time.Second)
		check("a name without addresses has none", nil, 3, 6)
		h.Use(shop, nil)
		pass(time.Hour)
		check("a name without users is not resolved", nil, 3, 6)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// The users of a name are notified when the first response has no addresses, and again when a response has some.
func TestNameWithoutAddressesIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := new(answers)
		a.are(nil, 0, errors.New("no answer"))
		h := hosts.New(a.query, slog.New(slog.DiscardHandler))
		done := make(chan error)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { done <- h.Run(ctx, a.tell) }()
		check := func(when string, wantKnown bool, wantTold int) {
			t.Helper()
			synctest.Wait()
			a.mu.Lock()
			defer a.mu.Unlock()
			if addrs, known := h.Lookup("lb.example.org"); len(addrs) > 0 || known != wantKnown || a.told != wantTold {
				t.Errorf("%s: %v, known %v, told %d times; want nothing, %v, %d", when, addrs, known, a.told, wantKnown, wantTold)
			}
		}
		check("before it is used", false, 0)
		h.Use(shop, []string{"lb.example.org"})
		check("while no name server responds", false, 0)
		a.are(nil, time.Minute, nil)
		<-time.After(10 * time.Second)
		check("with an answer", true, 1)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
