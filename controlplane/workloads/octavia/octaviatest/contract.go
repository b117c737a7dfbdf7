// Package octaviatest holds the contract that every Octavia has to satisfy, and an in-memory fake of Octavia.
package octaviatest

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/isthmus-net/isthmus/controlplane/workloads"
)

// Cloud is a cloud with two projects that have no load balancers.
type Cloud struct {
	Mine, Strange workloads.Lister
	// Make creates a load balancer in the project of Mine, and returns its id and its VIP.
	Make func(t testing.TB, name string, tags ...string) (id string, vip netip.Addr)
	// Listen adds a listener.
	Listen func(t testing.TB, balancer, name, protocol string, port int)
	// Float adds a floating IP to the VIP port, and returns the floating address.
	Float func(t testing.TB, balancer string) netip.Addr
	// Disable and Delete disable and delete a load balancer. They need not wait for it.
	Disable, Delete func(t testing.TB, id string)
}

// Contract tests the behaviour of a cloud and its client that Services of load balancers rely on. It leaves no load balancers
// behind.
func Contract(t *testing.T, c Cloud) {
	t.Helper()
	silent, _ := c.Make(t, "asks for nothing")
	id, vip := c.Make(t, "web-1", "svc.antreaplus.vmware.com=", "svc.antreaplus.vmware.com:namespace=shop", "federation.isthmus.dev/hostname=true", "role")
	want := workloads.Resource{
		ID: id, Name: "web-1", Running: true, Addrs: []netip.Addr{vip}, Labels: map[string]string{
			"svc.antreaplus.vmware.com": "", "svc.antreaplus.vmware.com/namespace": "shop", "federation.isthmus.dev/hostname": "true", "role": "",
		},
	}
	await(t, c.Mine, want)
	c.Listen(t, id, "http", "HTTP", 80)
	c.Listen(t, id, "", "UDP", 53)
	c.Listen(t, id, "calls", "SCTP", 5060)
	want.Listeners = []workloads.Listener{{Port: 53, Protocol: "UDP"}, {Name: "http", Port: 80, Protocol: "TCP"}, {Name: "calls", Port: 5060, Protocol: "SCTP"}}
	await(t, c.Mine, want)
	want.Addrs = []netip.Addr{c.Float(t, id)}
	await(t, c.Mine, want)
	c.Disable(t, id)
	want.Running = false
	await(t, c.Mine, want)
	if all, err := c.Strange.List(t.Context()); err != nil || len(all) > 0 {
		t.Errorf("another project has load balancers %v, %v", all, err)
	}
	c.Delete(t, silent)
	c.Delete(t, id)
	await(t, c.Mine)
}

// await lists load balancers until the list is want.
func await(t *testing.T, c workloads.Lister, want ...workloads.Resource) {
	t.Helper()
	again := time.NewTicker(time.Second / 4)
	defer again.Stop()
	for deadline := time.Now().Add(5 * time.Minute); ; <-again.C {
		all, err := c.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range all {
			if r.Created.IsZero() {
				t.Errorf("%s has no time of creation", r.Name)
			}
			slices.SortFunc(r.Listeners, func(a, b workloads.Listener) int { return a.Port - b.Port })
		}
		diff := cmp.Diff(want, all, cmpopts.IgnoreFields(workloads.Resource{}, "Created"), cmpopts.EquateComparable(netip.Addr{}))
		if diff == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited five minutes: %s", diff)
		}
	}
}
