package neutron_test

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack"
	"github.com/gophercloud/gophercloud/v2/openstack/config"
	"github.com/gophercloud/gophercloud/v2/openstack/config/clouds"

	"github.com/isthmus-net/isthmus/controlplane/workloads/neutron"
	"github.com/isthmus-net/isthmus/controlplane/workloads/neutron/neutrontest"
	"github.com/isthmus-net/isthmus/controlplane/workloads/rules"
)

// network returns a client of the project's owner.
func network(t *testing.T, f *neutrontest.Fake) *gophercloud.ServiceClient {
	t.Helper()
	auth, endpoint, tls, err := clouds.Parse(clouds.WithCloudName("mine"), clouds.WithLocations(f.CloudsYAML(t)))
	if err != nil {
		t.Fatal(err)
	}
	provider, err := config.NewProviderClient(t.Context(), auth, config.WithTLSConfig(tls))
	if err != nil {
		t.Fatal(err)
	}
	c, err := openstack.NewNetworkV2(provider, endpoint)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// testbed is a fake with a client of its project.
type testbed struct {
	*neutrontest.Fake
	*neutron.Neutron

	t       *testing.T
	network *gophercloud.ServiceClient
}

func newTestbed(t *testing.T) *testbed {
	t.Helper()
	f := neutrontest.NewFake(t)
	return &testbed{f, neutron.New(neutron.Config{Cloud: "mine", File: f.CloudsYAML(t)}), t, network(t, f)}
}

// plan returns a plan with one group of n rules for the server s.
func plan(n int) rules.Plan {
	g := rules.Group{Name: "isthmus-one", Policies: []string{"shop/db"}}
	for i := range n {
		g.Rules = append(g.Rules, rules.Rule{Direction: rules.Ingress, Protocol: "tcp", First: uint16(i + 1), Last: uint16(i + 1), Remote: netip.MustParsePrefix("10.0.0.0/8")})
	}
	return rules.Plan{Groups: []rules.Group{g}, Of: map[string]string{"s": g.Name}}
}

// apply applies a plan, which may refuse something.
func (w *testbed) apply(p rules.Plan) map[string]string {
	w.t.Helper()
	refused, err := w.Apply(w.t.Context(), "c", p)
	if err != nil {
		w.t.Fatal(err)
	}
	return refused
}

// groupsOf returns the groups of a port.
func (w *testbed) groupsOf(port string) []string {
	w.t.Helper()
	for _, p := range w.Objects(neutrontest.Ports) {
		if p["id"] == port {
			return p["security_groups"].([]string)
		}
	}
	w.t.Fatalf("there is no port %s", port)
	return nil
}

func TestContract(t *testing.T) {
	w := newTestbed(t)
	neutrontest.Contract(t, neutrontest.Cloud{
		Mine: w.Neutron, Network: w.network,
		NewGroup: func(_ testing.TB, name string) string { return w.AddGroup(name) },
		NewPort: func(_ testing.TB, server string, groups ...string) string {
			return w.AddPort(server, neutrontest.Object{"security_groups": groups})
		},
	})
}

// A plan that is in effect needs no write, and neither does one for servers without ports.
func TestNoWriteAtRest(t *testing.T) {
	w := newTestbed(t)
	w.AddPort("s", neutrontest.Object{"security_groups": []string{w.AddGroup("ssh")}})
	w.apply(plan(3))
	before := w.Writes.Load()
	w.apply(plan(3))
	if n := w.Writes.Load() - before; n != 0 || before == 0 {
		t.Errorf("%d writes, then %d", before, n)
	}
}

// A group whose rules do not fit the quota does not come to a server, which keeps its groups. One that it has already loses what is
// not wanted any more.
func TestQuota(t *testing.T) {
	w := newTestbed(t)
	ssh := w.AddGroup("ssh")
	port := w.AddPort("s", neutrontest.Object{"security_groups": []string{ssh}})
	w.MaxRules.Store(5)
	if refused := w.apply(plan(10)); !strings.Contains(refused["s"], "of policies shop/db is not complete") || !slices.Equal(w.groupsOf(port), []string{ssh}) {
		t.Errorf("%v; the port has %v", refused, w.groupsOf(port))
	}
	if refused := w.apply(plan(3)); len(refused) > 0 || slices.Contains(w.groupsOf(port), ssh) {
		t.Errorf("%v; the port has %v", refused, w.groupsOf(port))
	}
	more := plan(10)
	more.Groups[0].Rules = more.Groups[0].Rules[1:]
	held := w.groupsOf(port)
	if refused := w.apply(more); refused["s"] == "" || !slices.Equal(w.groupsOf(port), held) {
		t.Errorf("%v; the port has %v, before %v", refused, w.groupsOf(port), held)
	}
	if have := w.rules("isthmus-one"); len(have) != 2 {
		t.Errorf("rules for the ports %v", have)
	}
}

// rules returns the ports of a group's rules.
func (w *testbed) rules(group string) (all []string) {
	w.t.Helper()
	for _, g := range w.Objects(neutrontest.Groups) {
		if g["name"] != group {
			continue
		}
		for _, r := range g["security_group_rules"].([]neutrontest.Object) {
			all = append(all, fmt.Sprint(r["port_range_min"]))
		}
	}
	return all
}

// A former group that is gone meanwhile does not return; without any, the port gets the default group. A port without groups has
// none afterwards.
func TestRelease(t *testing.T) {
	w := newTestbed(t)
	ssh, web := w.AddGroup("ssh"), w.AddGroup("web")
	two := w.AddPort("s", neutrontest.Object{"security_groups": []string{ssh, web}})
	one := w.AddPort("s", neutrontest.Object{"security_groups": []string{ssh}})
	bare := w.AddPort("s", nil)
	lost := w.AddPort("s", neutrontest.Object{"security_groups": []string{ssh}})
	w.apply(plan(1))
	w.Set(lost, "tags", []string{})
	w.Remove(ssh)
	if refused := w.apply(rules.Plan{}); len(refused) > 0 {
		t.Errorf("refused %v", refused)
	}
	for port, want := range map[string][]string{two: {web}, one: {"group-001"}, bare: {}, lost: {"group-001"}} {
		if have := w.groupsOf(port); !slices.Equal(have, want) {
			t.Errorf("port %s has groups %v; want %v", port, have, want)
		}
	}
}

// While the group of other policies does not fit the quota, the former group of a server loses what these do not admit.
func TestFormerGroupIsNarrowed(t *testing.T) {
	w := newTestbed(t)
	port := w.AddPort("s", nil)
	w.apply(plan(4))
	held := w.groupsOf(port)
	w.MaxRules.Store(6)
	other := plan(9)
	other.Groups[0].Name, other.Of["s"] = "isthmus-two", "isthmus-two"
	other.Groups[0].Rules = other.Groups[0].Rules[2:]
	if refused := w.apply(other); refused["s"] == "" || !slices.Equal(w.groupsOf(port), held) {
		t.Errorf("%v; the port has %v, before %v", refused, w.groupsOf(port), held)
	}
	if have := w.rules("isthmus-one"); fmt.Sprint(have) != "[3 4]" {
		t.Errorf("rules for the ports %v", have)
	}
	for _, g := range w.Objects(neutrontest.Groups) {
		if g["name"] == "isthmus-two" {
			t.Error("the group that does not fit stays, and uses up the quota")
		}
	}
	before := w.Writes.Load()
	w.apply(other)
	if n := w.Writes.Load() - before; n > 0 {
		t.Errorf("%d writes a moment later", n)
	}
	w.MaxRules.Store(100)
	other.Groups[0].Rules = other.Groups[0].Rules[1:]
	if refused := w.apply(other); len(refused) > 0 || len(w.rules("isthmus-two")) != 6 {
		t.Errorf("refused %v, rules for the ports %v", refused, w.rules("isthmus-two"))
	}
}

// A server that the cloud left out of its list keeps its group. One whose port is not listed is reported.
func TestUnknownServers(t *testing.T) {
	w := newTestbed(t)
	ssh := w.AddGroup("ssh")
	port := w.AddPort("s", neutrontest.Object{"security_groups": []string{ssh}})
	one := plan(1)
	one.Of["t"] = one.Of["s"]
	if refused := w.apply(one); !strings.Contains(refused["t"], "has no port of it") || len(refused) != 1 {
		t.Errorf("refused %v", refused)
	}
	w.apply(rules.Plan{Known: map[string]bool{"another": true}})
	if have := w.groupsOf(port); slices.Contains(have, ssh) {
		t.Errorf("the port has %v", have)
	}
	w.apply(rules.Plan{Known: map[string]bool{"s": true}})
	if have := w.groupsOf(port); !slices.Equal(have, []string{ssh}) {
		t.Errorf("the port has %v", have)
	}
}

// Groups have no effect on a port without port security; the server's owner is told.
func TestPortSecurityOff(t *testing.T) {
	w := newTestbed(t)
	w.AddPort("s", neutrontest.Object{"port_security_enabled": false})
	if refused := w.apply(plan(1)); !strings.Contains(refused["s"], "port security is off for its port") {
		t.Errorf("%v", refused)
	}
}

// Nothing is written if the cloud fails while it is read.
func TestFailingCloud(t *testing.T) {
	for _, list := range []string{neutrontest.Groups, neutrontest.Ports} {
		w := newTestbed(t)
		w.AddPort("s", nil)
		w.FailList(list, http.StatusServiceUnavailable)
		if _, err := w.Apply(t.Context(), "c", plan(1)); err == nil || w.Writes.Load() > 0 {
			t.Errorf("%s: %v, %d writes", list, err, w.Writes.Load())
		}
		w.FailList(list, 0)
		w.apply(plan(1))
	}
}
