// Package neutron gives the ports of an OpenStack project's servers the security groups that package rules plans.
//
// A group of Neutron only admits, and what a port may do is the sum of its groups. So a port whose server is in the plan has no
// group but ours, and those of other clusters. Its former groups are noted in tags of the port, isthmus:was=ID, and return when
// no policy selects the server any more, also by another process. Groups that somebody adds meanwhile are noted and removed, too.
//
// Our groups are known by the beginning of their description, which names the cluster.
package neutron

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gophercloud/gophercloud/v2"
	gopher "github.com/gophercloud/gophercloud/v2/openstack"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/attributestags"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/portsecurity"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/security/groups"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"

	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/controlplane/workloads/internal/openstack"
	"github.com/isthmus-net/isthmus/controlplane/workloads/rules"
)

// defaultTimeout limits the time of one Apply. The next one continues.
const defaultTimeout = 2 * time.Minute

const (
	// made begins the descriptions of groups that Isthmus made, of any cluster. The ID of the cluster and a semicolon follow.
	made = "Made by Isthmus from NetworkPolicies of cluster "
	// was begins the tag of a port that notes the ID of a group that the port had before.
	was = "isthmus:was="
	// maxDescription is the limit of Neutron.
	maxDescription = 255
)

// Config describes the project.
type Config struct {
	// Cloud is the name of an entry of clouds.yaml, whose credentials are for one project.
	Cloud string
	// File is a clouds.yaml; "" means the file that the environment names, or the usual places. It is read for each new
	// session, so that new credentials take effect.
	File string
	// Timeout limits the time of Apply; 0 means two minutes.
	Timeout time.Duration
}

// Neutron is a workloads.Enforcer. Make it with New.
type Neutron struct{ project openstack.Project[session] }

var _ workloads.Enforcer = (*Neutron)(nil)

// New returns a Neutron. It sends nothing.
func New(cfg Config) *Neutron {
	return &Neutron{openstack.Project[session]{Cloud: cfg.Cloud, File: cfg.File, Timeout: cmp.Or(cfg.Timeout, defaultTimeout), Clients: newSession}}
}

// session is the client of one session.
type session struct {
	*gophercloud.ServiceClient

	project string // its ID
}

func newSession(provider *gophercloud.ProviderClient, endpoint gophercloud.EndpointOpts) (s session, err error) {
	if s.project, err = openstack.ProjectOf(provider); err != nil {
		return s, err
	}
	if s.ServiceClient, err = gopher.NewNetworkV2(provider, endpoint); err != nil {
		return s, fmt.Errorf("find the network service in the catalog: %w", err)
	}
	return s, nil
}

// Apply is part of workloads.Enforcer. A group whose rules cannot all be written does not come to servers that lack it; servers
// that have it keep it. The first call opens a session, as does a call after an error.
func (n *Neutron) Apply(ctx context.Context, cluster string, plan rules.Plan) (refused map[string]string, err error) {
	a := application{mark: made + cluster + ";", plan: plan, refused: map[string]string{}}
	err = n.project.Do(ctx, func(ctx context.Context, s session) error {
		a.session = s
		return a.run(ctx)
	})
	return a.refused, err
}

// port is a port with the extension that says whether groups have an effect.
type port struct {
	ports.Port
	portsecurity.PortSecurityExt
}

// application is one call of Apply.
type application struct {
	session

	mark    string // beginning of the descriptions of this cluster's groups
	plan    rules.Plan
	refused map[string]string

	groups map[string]groups.SecGroup // all visible groups, by ID
	wanted map[string]bool            // IDs of the groups in the plan
	usable map[string]string          // IDs of those that are complete, by name
}

func (a *application) run(ctx context.Context) error {
	have, err := a.read(ctx)
	if err != nil {
		return err
	}
	if err := a.applyGroups(ctx); err != nil {
		return err
	}
	inUse := map[string]bool{}
	for _, p := range have {
		has, err := a.applyPort(ctx, p)
		if err != nil && !isRefusal(err) {
			return fmt.Errorf("change port %s: %w", p.ID, err)
		}
		if err != nil {
			a.refused[p.DeviceID] = fmt.Sprintf("the security groups of its port %s stay as they are: %v", p.ID, err)
		}
		for _, id := range has {
			inUse[id] = true
		}
	}
	return a.removeGroups(ctx, inUse)
}

// read reads the groups and returns the ports of the project. An administrator would see those of other projects, too.
func (a *application) read(ctx context.Context) ([]port, error) {
	pages, err := groups.List(a.ServiceClient, groups.ListOpts{}).AllPages(ctx)
	if err != nil {
		return nil, fmt.Errorf("list security groups: %w", err)
	}
	all, err := groups.ExtractGroups(pages)
	if err != nil {
		return nil, fmt.Errorf("list security groups: %w", err)
	}
	a.groups = map[string]groups.SecGroup{}
	for _, g := range all {
		a.groups[g.ID] = g
	}
	if pages, err = ports.List(a.ServiceClient, ports.ListOpts{ProjectID: a.project}).AllPages(ctx); err != nil {
		return nil, fmt.Errorf("list ports: %w", err)
	}
	var have []port
	if err := ports.ExtractPortsInto(pages, &have); err != nil {
		return nil, fmt.Errorf("list ports: %w", err)
	}
	return have, nil
}

// isOurs reports whether this cluster made a group, whose ID is id.
func (a *application) isOurs(id string) bool {
	g := a.groups[id]
	return g.ProjectID == a.project && strings.HasPrefix(g.Description, a.mark)
}

// isMade reports whether the Isthmus of any cluster made a group.
func (a *application) isMade(id string) bool {
	g := a.groups[id]
	return g.ProjectID == a.project && strings.HasPrefix(g.Description, made)
}

// applyPort brings the groups of a port in line, and returns those that it has afterwards.
func (a *application) applyPort(ctx context.Context, p port) (has []string, err error) {
	group, planned := a.plan.Of[p.DeviceID]
	id, complete := a.usable[group]
	switch {
	case planned && !p.PortSecurityEnabled:
		a.refused[p.DeviceID] = fmt.Sprintf("port security is off for its port %s, so policies have no effect there; enable it", p.ID)
		return p.SecurityGroups, nil
	case planned && !complete:
		return p.SecurityGroups, nil
	case planned:
		return a.restrict(ctx, p, id)
	default:
		return a.release(ctx, p)
	}
}

// restrict gives a port the group with the ID id. The notes go first, so that they are there after an interruption.
func (a *application) restrict(ctx context.Context, p port, id string) (has []string, err error) {
	notes, foreign := split(p.Tags), slices.DeleteFunc(slices.Clone(p.SecurityGroups), a.isMade)
	notes.was = union(notes.was, foreign)
	if len(p.SecurityGroups) == 0 && len(notes.was) == 0 {
		notes.was = []string{none}
	}
	if err := a.note(ctx, p, notes); err != nil {
		return p.SecurityGroups, err
	}
	return a.setGroups(ctx, p, append(a.ofOthers(p), id))
}

// release gives a port its former groups, unless it has no group of this cluster. While another cluster restricts the port, that
// cluster needs the notes.
func (a *application) release(ctx context.Context, p port) (has []string, err error) {
	notes := split(p.Tags)
	if len(notes.was) == 0 && !slices.ContainsFunc(p.SecurityGroups, a.isOurs) {
		return p.SecurityGroups, nil
	}
	if others := a.ofOthers(p); len(others) > 0 {
		return a.setGroups(ctx, p, slices.DeleteFunc(slices.Clone(p.SecurityGroups), a.isOurs))
	}
	foreign := slices.DeleteFunc(slices.Clone(p.SecurityGroups), a.isMade)
	if has, err = a.setGroups(ctx, p, union(a.existing(notes.was), foreign)); err != nil {
		return has, err
	}
	notes.was = nil
	return has, a.note(ctx, p, notes)
}

// ofOthers returns the groups of a port that other clusters made.
func (a *application) ofOthers(p port) []string {
	return slices.DeleteFunc(slices.Clone(p.SecurityGroups), func(id string) bool { return !a.isMade(id) || a.isOurs(id) })
}

// setGroups sets the groups of a port, and returns those that it has afterwards.
func (a *application) setGroups(ctx context.Context, p port, want []string) (has []string, err error) {
	if same(want, p.SecurityGroups) {
		return want, nil
	}
	want = append([]string{}, want...) // nil is no empty list
	if err := ports.Update(ctx, a.ServiceClient, p.ID, ports.UpdateOpts{SecurityGroups: &want}).Err; err != nil {
		return p.SecurityGroups, err
	}
	return want, nil
}

// existing returns those of the noted groups that exist. Without any it is the default group of the project, as for a new port.
func (a *application) existing(noted []string) (all []string) {
	for _, id := range noted {
		if _, ok := a.groups[id]; ok {
			all = append(all, id)
		}
	}
	if len(all) > 0 || slices.Contains(noted, none) {
		return all
	}
	for id, g := range a.groups {
		if g.Name == "default" && g.ProjectID == a.project {
			return []string{id}
		}
	}
	return nil
}

// none is noted of a port that had no group.
const none = "none"

// notes are the tags of a port.
type notes struct {
	was    []string // IDs of its former groups, or none
	others []string // tags that are not ours
}

// split returns the notes in tags.
func split(tags []string) (n notes) {
	for _, tag := range tags {
		if id, ok := strings.CutPrefix(tag, was); ok {
			n.was = append(n.was, id)
		} else {
			n.others = append(n.others, tag)
		}
	}
	return n
}

// note writes the tags of a port, unless it has them.
func (a *application) note(ctx context.Context, p port, n notes) error {
	tags := slices.Clone(n.others)
	for _, id := range n.was {
		tags = append(tags, was+id)
	}
	if same(tags, p.Tags) {
		return nil
	}
	if len(tags) == 0 {
		return attributestags.DeleteAll(ctx, a.ServiceClient, "ports", p.ID).ExtractErr()
	}
	_, err := attributestags.ReplaceAll(ctx, a.ServiceClient, "ports", p.ID, attributestags.ReplaceAllOpts{Tags: tags}).Extract()
	return err
}

// isRefusal reports whether the cloud refused a request for a reason that concerns its object: another request may succeed.
func isRefusal(err error) bool {
	for _, status := range []int{400, 403, 404, 409, 412, 413} {
		if gophercloud.ResponseCodeIs(err, status) {
			return true
		}
	}
	return false
}

// union returns the strings in a or b, once each, in their order.
func union(a, b []string) (all []string) {
	for _, s := range slices.Concat(a, b) {
		if !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	return all
}

// same reports whether a and b have the same strings, in any order.
func same(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}
