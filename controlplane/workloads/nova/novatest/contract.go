// Package novatest holds the contract that every Nova has to satisfy, and an in-memory fake of Nova.
package novatest

import (
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/workloads"
)

// Cloud is a cloud with two projects that have no servers.
type Cloud struct {
	Mine, Strange workloads.Lister
	// Boot creates a server with an address of each family in the project of Mine, and returns its id.
	Boot func(t testing.TB, name string, metadata map[string]string, tags ...string) (id string)
	// Stop and Delete stop and delete a server. They need not wait for it.
	Stop, Delete func(t testing.TB, id string)
}

// Contract tests the behaviour of a cloud and its client that Services of servers rely on. It leaves no servers behind.
func Contract(t *testing.T, c Cloud) {
	t.Helper()
	id := c.Boot(t, "web-1", map[string]string{"svc.antreaplus.vmware.com": "", "svc.antreaplus.vmware.com:ports": "http:80/TCP=8080"}, "role", "colour=blue")
	var s workloads.Resource
	await(t, c.Mine, "a server that runs and has addresses", func(all []workloads.Resource) bool {
		if len(all) == 1 {
			s = all[0]
		}
		return s.Running && len(s.Addrs) == 2
	})
	if s.ID != id || s.Name != "web-1" || s.Created.IsZero() || s.Addrs[0].Is4() == s.Addrs[1].Is4() {
		t.Errorf("%+v; want %s", s, id)
	}
	for key, want := range map[string]string{"svc.antreaplus.vmware.com": "", "svc.antreaplus.vmware.com/ports": "http:80/TCP=8080", "role": "", "colour": "blue"} {
		if got, ok := s.Labels[key]; !ok || got != want {
			t.Errorf("label %s is %q, %t; want %q", key, got, ok, want)
		}
	}
	c.Stop(t, id)
	await(t, c.Mine, "a server that does not run", func(all []workloads.Resource) bool { return len(all) == 1 && !all[0].Running && len(all[0].Addrs) == 2 })
	if all, err := c.Strange.List(t.Context()); err != nil || len(all) > 0 {
		t.Errorf("another project has servers %v, %v", all, err)
	}
	c.Delete(t, id)
	await(t, c.Mine, "no server", func(all []workloads.Resource) bool { return len(all) == 0 })
}

// await lists servers until done accepts them.
func await(t *testing.T, c workloads.Lister, what string, done func([]workloads.Resource) bool) {
	t.Helper()
	again := time.NewTicker(time.Second) // a list is expensive for a real cloud
	defer again.Stop()
	for deadline := time.Now().Add(5 * time.Minute); ; <-again.C {
		all, err := c.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if done(all) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited five minutes for %s; there are %+v", what, all)
		}
	}
}
