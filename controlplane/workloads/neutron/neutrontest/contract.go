// Package neutrontest holds the contract that every Neutron has to satisfy for security groups, and an in-memory fake of Neutron.
package neutrontest

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/attributestags"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/security/groups"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"

	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/controlplane/workloads/rules"
)

// Cloud is a cloud with a project.
type Cloud struct {
	Mine workloads.Enforcer
	// Network is a client of the project's owner.
	Network *gophercloud.ServiceClient
	// NewPort creates a port of a server with groups, given by their IDs, and returns its ID.
	NewPort func(t testing.TB, server string, groups ...string) (id string)
	// NewGroup creates a group, and returns its ID.
	NewGroup func(t testing.TB, name string) (id string)
}

// prefix parses a prefix.
func prefix(text string) netip.Prefix { return netip.MustParsePrefix(text) }

// Contract tests the behaviour of a cloud and its client that policies of servers rely on. It leaves no groups of ours behind.
func Contract(t *testing.T, c Cloud) {
	t.Helper()
	ssh, web := c.NewGroup(t, "ssh"), c.NewGroup(t, "web")
	first, other := c.NewPort(t, "server-1", ssh), c.NewPort(t, "server-2", ssh)
	c.tag(t, first, "role")
	plan := rules.Plan{
		Of: map[string]string{"server-1": "isthmus-one"},
		Groups: []rules.Group{{Name: "isthmus-one", Policies: []string{"shop/db"}, Rules: []rules.Rule{
			{Direction: rules.Egress, Remote: prefix("0.0.0.0/0")},
			{Direction: rules.Ingress, Protocol: "tcp", First: 5432, Last: 5432, Remote: prefix("10.0.0.0/8")},
			{Direction: rules.Ingress, Protocol: "udp", First: 100, Last: 200, Remote: prefix("2001:db8::/32")},
			{Direction: rules.Ingress, Protocol: "sctp", Remote: prefix("::/0")},
			{Direction: rules.Ingress, Remote: prefix("192.0.2.7/32")},
		}}},
	}
	c.apply(t, "c", plan)
	c.expect(t, first, []string{"isthmus-one"}, []string{"isthmus:was=" + ssh, "role"})
	c.expect(t, other, []string{"ssh"}, nil)
	before := c.made(t)
	if len(before) != 1 || len(before[0].Rules) != 5 {
		t.Fatalf("groups %+v", before)
	}
	c.apply(t, "c", plan)
	if again := c.made(t); len(again) != 1 || again[0].RevisionNumber != before[0].RevisionNumber || rulesOf(again[0]) != rulesOf(before[0]) {
		t.Errorf("at rest, groups %+v became %+v", before, again)
	}
	plan.Groups[0].Rules = append(plan.Groups[0].Rules[1:4:4], rules.Rule{Direction: rules.Ingress, Protocol: "tcp", First: 22, Last: 22, Remote: prefix("192.0.2.7/32")})
	c.set(t, first, before[0].ID, web)
	c.apply(t, "c", plan)
	c.expect(t, first, []string{"isthmus-one"}, []string{"isthmus:was=" + ssh, "isthmus:was=" + web, "role"})
	after := c.made(t)
	if len(after) != 1 || after[0].ID != before[0].ID || len(after[0].Rules) != 4 {
		t.Errorf("groups %+v", after)
	}
	second := rules.Plan{Of: map[string]string{"server-1": "isthmus-two"}, Groups: []rules.Group{{Name: "isthmus-two", Policies: []string{"shop/db"}}}}
	c.apply(t, "d", second)
	c.expect(t, first, []string{"isthmus-one", "isthmus-two"}, []string{"isthmus:was=" + ssh, "isthmus:was=" + web, "role"})
	c.apply(t, "c", rules.Plan{})
	c.expect(t, first, []string{"isthmus-two"}, []string{"isthmus:was=" + ssh, "isthmus:was=" + web, "role"})
	c.apply(t, "d", rules.Plan{})
	c.expect(t, first, []string{"ssh", "web"}, []string{"role"})
	c.expect(t, other, []string{"ssh"}, nil)
	if left := c.made(t); len(left) > 0 {
		t.Errorf("groups %+v are left", left)
	}
}

// apply applies a plan of a cluster. Nothing may be refused.
func (c Cloud) apply(t *testing.T, cluster string, plan rules.Plan) {
	t.Helper()
	refused, err := c.Mine.Apply(t.Context(), cluster, plan)
	if err != nil || len(refused) > 0 {
		t.Fatalf("refused %v, %v", refused, err)
	}
}

// made returns the groups that Isthmus made.
func (c Cloud) made(t *testing.T) []groups.SecGroup {
	t.Helper()
	return slices.DeleteFunc(c.groups(t), func(g groups.SecGroup) bool { return !strings.HasPrefix(g.Description, "Made by Isthmus") })
}

func (c Cloud) groups(t *testing.T) []groups.SecGroup {
	t.Helper()
	pages, err := groups.List(c.Network, groups.ListOpts{}).AllPages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	all, err := groups.ExtractGroups(pages)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// rulesOf returns the IDs of a group's rules.
func rulesOf(g groups.SecGroup) string {
	var ids []string
	for _, r := range g.Rules {
		ids = append(ids, r.ID)
	}
	slices.Sort(ids)
	return strings.Join(ids, " ")
}

// expect checks the names of a port's groups, and its tags, both sorted.
func (c Cloud) expect(t *testing.T, port string, names, tags []string) {
	t.Helper()
	pages, err := ports.List(c.Network, ports.ListOpts{}).AllPages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	all, err := ports.ExtractPorts(pages)
	if err != nil {
		t.Fatal(err)
	}
	byID := map[string]string{}
	for _, g := range c.groups(t) {
		byID[g.ID] = g.Name
	}
	for _, p := range all {
		if p.ID != port {
			continue
		}
		var have []string
		for _, id := range p.SecurityGroups {
			have = append(have, byID[id])
		}
		slices.Sort(have)
		slices.Sort(p.Tags)
		slices.Sort(tags)
		if !slices.Equal(have, names) || !slices.Equal(p.Tags, tags) {
			t.Errorf("port %s has groups %q and tags %q; want %q and %q", port, have, p.Tags, names, tags)
		}
		return
	}
	t.Errorf("there is no port %s", port)
}

// set sets the groups of a port.
func (c Cloud) set(t *testing.T, port string, groups ...string) {
	t.Helper()
	if err := ports.Update(t.Context(), c.Network, port, ports.UpdateOpts{SecurityGroups: &groups}).Err; err != nil {
		t.Fatal(err)
	}
}

// tag sets the tags of a port.
func (c Cloud) tag(t *testing.T, port string, tags ...string) {
	t.Helper()
	if err := attributestags.ReplaceAll(t.Context(), c.Network, "ports", port, attributestags.ReplaceAllOpts{Tags: tags}).Err; err != nil {
		t.Fatal(err)
	}
}
