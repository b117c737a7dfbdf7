package neutron_test

import (
	"testing"
	"time"

	novaservers "github.com/gophercloud/gophercloud/v2/openstack/compute/v2/servers"

	"github.com/isthmus-net/isthmus/controlplane/workloads/nova"
	"github.com/isthmus-net/isthmus/controlplane/workloads/nova/novatest"
	"github.com/isthmus-net/isthmus/tools/neutron"
)

// listTimeout is the timeout of a list on a busy machine, where Nova, Neutron and Keystone share the CPUs.
const listTimeout = 3 * time.Minute

// serversOf checks that the real Nova fulfils the contract that the fake fulfils in its own tests. Nova's start has the three
// minutes of Cloud.Start.
func serversOf(t *testing.T, cloud *neutron.Cloud, ids neutron.IDs) {
	t.Helper()
	if err := cloud.Stop(t.Context(), neutron.Nova); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	if err := cloud.Start(t.Context(), neutron.Nova); err != nil {
		t.Fatal(err)
	}
	t.Logf("Nova answers %s after its start", time.Since(begun).Round(time.Second/10))
	compute, err := cloud.Computing(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	check := func(t testing.TB, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	novatest.Contract(t, novatest.Cloud{
		Mine:    nova.New(nova.Config{Cloud: neutron.MachinesCredential, File: cloud.CloudsYAML(), Timeout: listTimeout}),
		Strange: nova.New(nova.Config{Cloud: neutron.Stranger, File: cloud.CloudsYAML(), Timeout: listTimeout}),
		Boot: func(t testing.TB, name string, metadata map[string]string, tags ...string) string {
			t.Helper()
			s, err := novaservers.Create(t.Context(), compute, novaservers.CreateOpts{
				Name: name, ImageRef: neutron.Image, FlavorRef: neutron.Flavor, Networks: []novaservers.Network{{UUID: ids.Network}}, Metadata: metadata, Tags: tags,
			}, nil).Extract()
			check(t, err)
			return s.ID
		},
		Stop: func(t testing.TB, id string) {
			t.Helper()
			check(t, novaservers.Stop(t.Context(), compute, id).ExtractErr())
		},
		Delete: func(t testing.TB, id string) {
			t.Helper()
			check(t, novaservers.Delete(t.Context(), compute, id).ExtractErr())
		},
	})
}
