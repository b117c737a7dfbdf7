package membership

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Registered is a member as registered on the broker.
type Registered struct {
	Spec v1alpha1.MemberSpec
	// Seen is the last renewal of the member's Lease; zero without one.
	Seen time.Time
	// Revoked means that the member may not write to the broker.
	Revoked bool
	// Extended are pod CIDRs of its nodes inside of its supernets, which count as registered. Outside are those that the other
	// members ignore. Both are as the member states them.
	Extended, Outside []netip.Prefix
	// RefusedServices is the number of its exported Services with endpoints that the other members ignore, as it states.
	RefusedServices int
}

// List returns the members of the broker in namespace, and those that left recently, sorted by id.
func List(ctx context.Context, broker client.Client, namespace string) ([]Registered, error) {
	config, err := readConfig(ctx, broker, namespace)
	if err != nil {
		return nil, err
	}
	members := &v1alpha1.MemberList{}
	if err := broker.List(ctx, members, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list members on the broker: %w", err)
	}
	leases := &coordinationv1.LeaseList{}
	if err := broker.List(ctx, leases, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list Leases on the broker: %w", err)
	}
	of := map[string]*coordinationv1.Lease{}
	for i := range leases.Items {
		of[leases.Items[i].Name] = &leases.Items[i]
	}
	var list []Registered
	for _, m := range members.Items {
		listed := slices.ContainsFunc(config.Spec.Members, func(b v1alpha1.MemberBlocks) bool { return b.ClusterID == m.Name })
		r := Registered{Spec: m.Spec, Revoked: m.Spec.LeftAt == nil && !listed}
		if lease := of[v1alpha1.MemberLease(m.Name)]; lease != nil {
			r.read(lease)
		}
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b Registered) int { return strings.Compare(a.Spec.ClusterID, b.Spec.ClusterID) })
	return list, nil
}

// read takes what the member's Lease tells. The member writes it, so that only numbers and addresses are taken.
func (r *Registered) read(lease *coordinationv1.Lease) {
	if lease.Spec.RenewTime != nil {
		r.Seen = lease.Spec.RenewTime.Time
	}
	if r.Spec.LeftAt != nil {
		return
	}
	registered := clusterset.Member{
		Routed:    slices.Concat(parsed(r.Spec.PodCIDRs), parsed(r.Spec.NodeCIDRs), parsed(r.Spec.ExtraCIDRs)),
		Supernets: parsed(r.Spec.PodSupernets),
	}
	r.Extended, r.Outside = registered.Beyond(clusterset.ParsePrefixes(lease.Annotations[v1alpha1.AnnotationPodCIDRs]))
	if n, err := strconv.Atoi(lease.Annotations[v1alpha1.AnnotationRefusedServices]); err == nil && n > 0 {
		r.RefusedServices = n
	}
}

// Set changes the registration of member id: each kind of addresses that is not nil, and the block of each family in blocks.
// It refuses addresses that overlap others (ErrOverlap), and blocks that exclude ClusterSetIPs which the member has
// allocated. It returns the new registration. An unknown id is ErrNoMember.
//
// The other members use the new addresses at once. The member itself uses new blocks after it joins again.
func Set(ctx context.Context, broker client.Client, namespace, id string, addresses Addresses, blocks []netip.Prefix) (*v1alpha1.Member, error) {
	return register(ctx, broker, namespace, id, func(all *reservations) (*v1alpha1.Member, error) {
		own := all.own(id)
		if own == nil || !own.registered {
			_, err := readMember(ctx, broker, namespace, id)
			if err == nil {
				err = fmt.Errorf("%w: %s has left", ErrNoMember, id)
			}
			return nil, err
		}
		spec := *own.Spec.DeepCopy()
		given := strings.Split(own.Given, ",")
		for _, kind := range []struct {
			flag  string
			given []netip.Prefix
			set   *[]string
		}{
			{"pod-cidr", addresses.Pods, &spec.PodCIDRs},
			{"node-cidr", addresses.Nodes, &spec.NodeCIDRs},
			{"service-cidr", addresses.Services, &spec.ServiceCIDRs},
			{"extra-cidr", addresses.Extra, &spec.ExtraCIDRs},
			{"pod-supernet", addresses.Supernets, &spec.PodSupernets},
		} {
			if kind.given != nil {
				*kind.set = texts(kind.given)
				given = append(given, kind.flag)
			}
		}
		if len(spec.PodCIDRs) == 0 {
			return nil, errors.New("a member needs a pod CIDR; give --pod-cidr")
		}
		others := all.others(id)
		if _, err := checkAddresses(spec, parsed(all.config.Spec.ClusterSetIPCIDRRange), others); err != nil {
			return nil, err
		}
		if len(blocks) > 0 {
			chosen, err := chooseBlocks(all.config.Spec, blocks, parsed(spec.ClusterSetIPCIDR), others)
			if err != nil {
				return nil, err
			}
			spec.ClusterSetIPCIDR = texts(chosen)
			held, err := allocatedOutside(ctx, broker, namespace, spec)
			if err != nil {
				return nil, err
			}
			if len(held) > 0 {
				return nil, fmt.Errorf("member %s has allocated addresses outside of %s, to %s; unexport these in every cluster first", id, strings.Join(spec.ClusterSetIPCIDR, ", "), admin.Some(held))
			}
		}
		given = slices.DeleteFunc(given, func(s string) bool { return s == "" })
		return registration(namespace, own.ClusterUID, given, spec), nil
	}, nil)
}
