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
	"errors"
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
type Neutron struct {
	project openstack.Project[session]
	refused map[string]refusal // of groups, by name
}

// refusal is the reason why a group with these rules is not complete, and when they are tried again.
type refusal struct {
	reason error
	rules  []rules.Rule
	until  time.Time
}

// refusedFor is how long a refused group is not tried again: without a pause, groups that exceed a quota would be made and deleted at
// every look.
const refusedFor = time.Minute

var _ workloads.Enforcer = (*Neutron)(nil)

// New returns a Neutron. It sends nothing.
func New(cfg Config) *Neutron {
	return &Neutron{
		project: openstack.Project[session]{Cloud: cfg.Cloud, File: cfg.File, Timeout: cmp.Or(cfg.Timeout, defaultTimeout), Clients: newSession},
		refused: map[string]refusal{},
	}
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
	a := application{mark: made + cluster + ";", plan: plan, refused: map[string]string{}, pauses: n.refused}
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
	pauses  map[string]refusal

	groups map[string]groups.SecGroup // all visible groups, by ID
	wanted map[string]bool            // IDs of the groups in the plan
	usable map[string]string          // IDs of those that are complete, by name
}

func (a *application) run(ctx context.Context) error {
	have, err := a.read(ctx)
	if err != nil {
		return err
	}
	inUse := map[string]bool{}
	for _, p := range have {
		for _, id := range p.SecurityGroups {
			inUse[id] = true
		}
	}
	errs := []error{a.applyGroups(ctx, inUse)}
	clear(inUse)
	found := map[string]bool{}
	for _, p := range have {
		has, err := a.applyPort(ctx, p)
		if err != nil {
			a.refused[p.DeviceID] = fmt.Sprintf("the security groups of its port %s stay as they are: %v", p.ID, err)
		}
		if err != nil && !isRefusal(err) {
			errs = append(errs, fmt.Errorf("change port %s: %w", p.ID, err))
		}
		if ctx.Err() != nil {
			return errors.Join(errs...)
		}
		found[p.DeviceID] = true
		for _, id := range has {
			inUse[id] = true
		}
	}
	for server := range a.plan.Of {
		if !found[server] {
			a.refused[server] = "the project has no port of it, so policies have no effect on it"
		}
	}
	return errors.Join(append(errs, a.removeGroups(ctx, inUse))...)
}

// read reads the groups and returns the ports of the project. An administrator would see those of other projects, too. The ports come first:
// a group that another cluster gives to one meanwhile must not look like a user's.
func (a *application) read(ctx context.Context) ([]port, error) {
	pages, err := ports.List(a.ServiceClient, ports.ListOpts{ProjectID: a.project}).AllPages(ctx)
	if err != nil {
		return nil, fmt.Errorf("list ports: %w", err)
	}
	var have []port
	if err := ports.ExtractPortsInto(pages, &have); err != nil {
		return nil, fmt.Errorf("list ports: %w", err)
	}
	if pages, err = groups.List(a.ServiceClient, groups.ListOpts{}).AllPages(ctx); err != nil {
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
		return p.SecurityGroups, a.narrow(ctx, p, group)
	case planned:
		return a.restrict(ctx, p, id)
	case p.DeviceID != "" && a.plan.Known != nil && !a.plan.Known[p.DeviceID]:
		return p.SecurityGroups, nil
	default:
		return a.release(ctx, p)
	}
}

// narrow removes the rules that a server's group does not have from the group of ours that its port has instead, because that group is not
// complete. The port's group is a former one, which no plan changes any more, so it would admit what policies no longer do.
func (a *application) narrow(ctx context.Context, p port, group string) error {
	i := slices.IndexFunc(a.plan.Groups, func(g rules.Group) bool { return g.Name == group })
	for _, id := range p.SecurityGroups {
		if !a.isOurs(id) || a.wanted[id] || i < 0 {
			continue
		}
		_, surplus := diff(a.plan.Groups[i].Rules, a.groups[id].Rules)
		if err := a.deleteRules(ctx, surplus); err != nil {
			return err
		}
	}
	return nil
}

// restrict gives a port the group with the ID id. The notes go first, so that they are there after an interruption.
func (a *application) restrict(ctx context.Context, p port, id string) (has []string, err error) {
	notes := union(noted(p), slices.DeleteFunc(slices.Clone(p.SecurityGroups), a.isMade))
	if len(p.SecurityGroups) == 0 && len(notes) == 0 {
		notes = []string{none}
	}
	if err := a.note(ctx, p, notes); err != nil {
		return p.SecurityGroups, err
	}
	return a.setGroups(ctx, p, append(a.ofOthers(p), id))
}

// release gives a port its former groups, unless it has no group of this cluster. While another cluster restricts the port, that
// cluster needs the notes.
func (a *application) release(ctx context.Context, p port) (has []string, err error) {
	notes := noted(p)
	if len(notes) == 0 && !slices.ContainsFunc(p.SecurityGroups, a.isOurs) {
		return p.SecurityGroups, nil
	}
	if others := a.ofOthers(p); len(others) > 0 {
		return a.setGroups(ctx, p, slices.DeleteFunc(slices.Clone(p.SecurityGroups), a.isOurs))
	}
	foreign := slices.DeleteFunc(slices.Clone(p.SecurityGroups), a.isMade)
	if has, err = a.setGroups(ctx, p, a.former(notes, foreign)); err != nil {
		return has, err
	}
	if slices.ContainsFunc(has, a.isOurs) { // it was changed meanwhile, and stays
		return has, nil
	}
	return has, a.note(ctx, p, nil)
}

// ofOthers returns the groups of a port that other clusters made.
func (a *application) ofOthers(p port) []string {
	return slices.DeleteFunc(slices.Clone(p.SecurityGroups), func(id string) bool { return !a.isMade(id) || a.isOurs(id) })
}

// setGroups sets the groups of a port, and returns those that it has afterwards. If somebody has changed them since they were read, they
// stay: the next call sees the change.
func (a *application) setGroups(ctx context.Context, p port, want []string) (has []string, err error) {
	if same(want, p.SecurityGroups) {
		return want, nil
	}
	now, err := ports.Get(ctx, a.ServiceClient, p.ID).Extract()
	if err != nil || !same(now.SecurityGroups, p.SecurityGroups) {
		return p.SecurityGroups, err
	}
	want = append([]string{}, want...) // nil is no empty list
	err = ports.Update(ctx, a.ServiceClient, p.ID, ports.UpdateOpts{SecurityGroups: &want, RevisionNumber: &now.RevisionNumber}).Err
	if err != nil {
		return p.SecurityGroups, err
	}
	return want, nil
}

// former returns the groups that a port gets back: those of the noted ones that exist, and the foreign ones that it has. Without any it
// gets the default group of the project, as a new port does.
func (a *application) former(noted, foreign []string) (all []string) {
	for _, id := range noted {
		if _, ok := a.groups[id]; ok && !a.isMade(id) {
			all = append(all, id)
		}
	}
	if all = union(all, foreign); len(all) > 0 || slices.Contains(noted, none) {
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

// noted returns the IDs in the notes of a port.
func noted(p port) (ids []string) {
	for _, tag := range p.Tags {
		if id, ok := strings.CutPrefix(tag, was); ok {
			ids = append(ids, id)
		}
	}
	return ids
}

// note makes the notes of a port name ids. Other tags stay as they are.
func (a *application) note(ctx context.Context, p port, ids []string) error {
	have := noted(p)
	for _, id := range ids {
		if !slices.Contains(have, id) {
			if err := attributestags.Add(ctx, a.ServiceClient, "ports", p.ID, was+id).ExtractErr(); err != nil {
				return err
			}
		}
	}
	for _, id := range have {
		if !slices.Contains(ids, id) {
			if err := attributestags.Delete(ctx, a.ServiceClient, "ports", p.ID, was+id).ExtractErr(); err != nil {
				return err
			}
		}
	}
	return nil
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
