package controller

import (
	"testing"

	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
)

func TestSweep(t *testing.T) {
	w := newTestbed(t)
	w.noError(w.Sync(t.Context()))
	s := w.newService("a", nil, 80)
	waiting := w.newService("waiting", nil, 80)
	w.create(s)
	w.noError(w.converge())
	w.create(waiting)
	port := func(c *openstack.Client, purpose string) openstack.Port {
		t.Helper()
		p, err := c.CreatePort(t.Context(), openstack.PortRequest{Network: openstacktest.Network, Subnets: []string{openstacktest.Subnet4}, Purpose: purpose})
		w.noError(err)
		_, err = c.CreateFloatingIP(t.Context(), openstacktest.External, p.ID, p.Addrs[0])
		w.noError(err)
		return p
	}
	orphan := port(w.cloud, "public.gone.2")
	port(w.cloud, "public."+string(waiting.UID)) // the controller is about to assign it
	port(w.connect("cluster-b"), "public.gone")  // another cluster's
	ports, fips := w.fake.Objects()

	found, err := Sweep(t.Context(), w.api, w.cloud, true)
	if err != nil || len(found) != 2 || found[0].ID != orphan.ID || found[0].Deleted || found[1].Kind != "floating IP" {
		t.Errorf("a look finds %+v, %v", found, err)
	}
	if p, f := w.fake.Objects(); len(p) != len(ports) || len(f) != len(fips) {
		t.Error("a look deleted something")
	}
	found, err = Sweep(t.Context(), w.api, w.cloud, false)
	if err != nil || len(found) != 2 || !found[0].Deleted || !found[1].Deleted {
		t.Errorf("it sweeps %+v, %v", found, err)
	}
	if p, f := w.fake.Objects(); len(p) != len(ports)-1 || len(f) != len(fips)-1 {
		t.Errorf("left are %v and %v of %v and %v", p, f, ports, fips)
	}
	if found, err := Sweep(t.Context(), w.api, w.cloud, false); err != nil || len(found) != 0 {
		t.Errorf("again it finds %+v, %v", found, err)
	}
}
