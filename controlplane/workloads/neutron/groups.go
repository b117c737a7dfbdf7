package neutron

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/security/groups"
	neutronrules "github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/security/rules"

	"github.com/isthmus-net/isthmus/controlplane/workloads/rules"
)

// perRequest limits the rules of one request.
const perRequest = 100

// applyGroups creates and changes the groups of the plan. It refuses the servers of those that are not complete. One that no port has is
// deleted then, so that its rules do not use up the quota of others, and is tried again after a pause. A group never stops the others.
func (a *application) applyGroups(ctx context.Context, inUse map[string]bool) error {
	a.wanted, a.usable = map[string]bool{}, map[string]string{}
	var errs []error
	for _, g := range a.plan.Groups {
		id, err := a.applyOrPause(ctx, g)
		if err == nil {
			a.wanted[id], a.usable[g.Name] = true, id
			continue
		}
		a.wanted[id] = inUse[id]
		if !isRefusal(err) {
			errs = append(errs, fmt.Errorf("write security group %s: %w", g.Name, err))
		}
		for server, group := range a.plan.Of {
			if group == g.Name {
				a.refused[server] = fmt.Sprintf("the security group of policies %s is not complete: %v", strings.Join(g.Policies, ", "), err)
			}
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// applyOrPause is applyGroup for a group that was not refused with the same rules a moment ago. One that exists is always applied.
func (a *application) applyOrPause(ctx context.Context, g rules.Group) (id string, err error) {
	pause := a.pauses[g.Name]
	if _, exists := a.find(g.Name); !exists && time.Now().Before(pause.until) && slices.Equal(pause.rules, g.Rules) {
		return "", pause.reason
	}
	id, err = a.applyGroup(ctx, g)
	if delete(a.pauses, g.Name); isRefusal(err) {
		a.pauses[g.Name] = refusal{err, g.Rules, time.Now().Add(refusedFor)}
	}
	return id, err
}

// applyGroup brings a group in line, and returns its ID, which is empty if it does not exist. Missing rules come before surplus
// ones go, so that what is admitted before and after is admitted throughout. Surplus ones go even if others cannot come.
func (a *application) applyGroup(ctx context.Context, g rules.Group) (id string, err error) {
	have, ok := a.find(g.Name)
	if !ok {
		description := fmt.Sprintf("%s %s", a.mark, strings.Join(g.Policies, ", "))
		created, err := groups.Create(ctx, a.ServiceClient, groups.CreateOpts{
			Name: g.Name, ProjectID: a.project, Description: description[:min(len(description), maxDescription)],
		}).Extract()
		if err != nil {
			return "", err
		}
		have = *created
		a.groups[have.ID] = have
	}
	missing, surplus := diff(g.Rules, have.Rules)
	for part := range slices.Chunk(missing, perRequest) {
		var wanted []neutronrules.CreateOpts
		for _, r := range part {
			wanted = append(wanted, encode(r, have.ID))
		}
		if err = neutronrules.CreateBulk(ctx, a.ServiceClient, wanted).Err; err != nil {
			break
		}
	}
	return have.ID, errors.Join(err, a.deleteRules(ctx, surplus))
}

// deleteRules deletes the rules with these IDs.
func (a *application) deleteRules(ctx context.Context, ids []string) error {
	for _, id := range ids {
		if err := neutronrules.Delete(ctx, a.ServiceClient, id).ExtractErr(); err != nil && !gophercloud.ResponseCodeIs(err, http.StatusNotFound) {
			return err
		}
	}
	return nil
}

// find returns this cluster's group of a name, the one with the first ID if there are several.
func (a *application) find(name string) (found groups.SecGroup, ok bool) {
	for id, g := range a.groups {
		if g.Name == name && a.isOurs(id) && (!ok || id < found.ID) {
			found, ok = g, true
		}
	}
	return found, ok
}

// removeGroups deletes this cluster's groups that are neither wanted nor in use.
func (a *application) removeGroups(ctx context.Context, inUse map[string]bool) error {
	for id, g := range a.groups {
		if !a.isOurs(id) || a.wanted[id] || inUse[id] {
			continue
		}
		if err := groups.Delete(ctx, a.ServiceClient, id).ExtractErr(); err != nil && !isRefusal(err) {
			return fmt.Errorf("delete security group %s: %w", g.Name, err)
		}
	}
	return nil
}

// diff returns the rules that a group lacks, and the IDs of those that it has in excess.
func diff(want []rules.Rule, have []neutronrules.SecGroupRule) (missing []rules.Rule, surplus []string) {
	open := map[rules.Rule]bool{}
	for _, r := range want {
		open[r] = true
	}
	for _, r := range have {
		if of, ok := decode(r); ok && open[of] {
			delete(open, of)
		} else {
			surplus = append(surplus, r.ID)
		}
	}
	for _, r := range want {
		if open[r] {
			missing = append(missing, r)
		}
	}
	return missing, surplus
}

// encode returns a rule as Neutron takes it, for the group with an ID.
func encode(r rules.Rule, group string) neutronrules.CreateOpts {
	o := neutronrules.CreateOpts{
		SecGroupID: group, Direction: neutronrules.RuleDirection(r.Direction), EtherType: neutronrules.EtherType4, Protocol: neutronrules.RuleProtocol(r.Protocol),
		PortRangeMin: int(r.First), PortRangeMax: int(r.Last),
	}
	if r.Remote.Addr().Is6() {
		o.EtherType = neutronrules.EtherType6
	}
	if r.Remote.Bits() > 0 {
		o.RemoteIPPrefix = r.Remote.String()
	}
	return o
}

// decode returns a rule of Neutron; ok is false for one that encode does not write.
func decode(r neutronrules.SecGroupRule) (of rules.Rule, ok bool) {
	of = rules.Rule{Direction: rules.Direction(r.Direction), Protocol: r.Protocol, First: uint16(r.PortRangeMin), Last: uint16(r.PortRangeMax)}
	switch {
	case r.RemoteGroupID != "" || r.RemoteAddressGroupID != "":
		return of, false
	case r.RemoteIPPrefix != "":
		remote, err := netip.ParsePrefix(r.RemoteIPPrefix)
		of.Remote = remote.Masked()
		return of, err == nil
	case r.EtherType == string(neutronrules.EtherType6):
		of.Remote = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	default:
		of.Remote = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return of, true
}
