package client

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// Aggregate returns the aggregate of a Service from the cache, and whether it exists.
func (b *Broker) Aggregate(name clusterset.ServiceName) (clusterset.Aggregate, bool, error) {
	a := b.aggregates.Get(b.cfg.Namespace, mcs.AggregateName(name))
	switch {
	case a == nil:
		return clusterset.Aggregate{}, false, nil
	case a.err != nil: // its name is taken, and its content says nothing: exporters find it when they claim it
		b.registry.warnOnce("", a.err.Error(), a.err)
		return clusterset.Aggregate{}, false, nil //nolint:nilerr // logged: one bad aggregate costs nothing but itself
	}
	for _, o := range a.omitted {
		b.registry.warnOnce("", fmt.Sprint(name, o), fmt.Errorf("aggregate of %s: %w", name, o))
	}
	return b.vetAggregate(a.Aggregate), true, nil
}

// LiveAggregate is Aggregate by a request to the broker.
func (b *Broker) LiveAggregate(ctx context.Context, name clusterset.ServiceName) (clusterset.Aggregate, bool, error) {
	a, _, err := b.read(ctx, name)
	if apierrors.IsNotFound(err) {
		return clusterset.Aggregate{}, false, nil
	}
	return a, err == nil, err
}

// read requests an aggregate from the broker.
func (b *Broker) read(ctx context.Context, name clusterset.ServiceName) (clusterset.Aggregate, *v1beta1.ServiceImport, error) {
	si := &v1beta1.ServiceImport{}
	key := types.NamespacedName{Namespace: b.cfg.Namespace, Name: mcs.AggregateName(name)}
	if err := b.client.Get(ctx, key, si); err != nil {
		return clusterset.Aggregate{}, nil, wrap("read aggregate", key.Name, err)
	}
	a, _, err := mcs.ParseAggregate(si)
	if err != nil {
		return a, si, err
	}
	return b.vetAggregate(a), si, nil
}

// vetAggregate returns a without addresses that their owners may not allocate. An invalid second address costs only itself;
// without a valid first one, the addresses are those that the exporters remember.
func (b *Broker) vetAggregate(a clusterset.Aggregate) clusterset.Aggregate {
	registry := b.Registry()
	for i, ip := range a.IPs {
		if err := registry.CheckIP(a.OwnerOf(i), ip); err != nil {
			b.registry.warnOnce("", fmt.Sprint(a.Service, a.IPs), fmt.Errorf("the ClusterSetIPs %v of aggregate %s are ignored: %w", a.IPs[i:], a.Service, err))
			a.IPs = a.IPs[:i:i]
			break
		}
	}
	return a
}

// Claim creates the aggregate of want.Service if it is missing, lists this member in it, and sets want.IPs and want.UseIP
// where it has none. It adds an address of want.IPs if this member may extend the others. It returns the resulting aggregate.
// Its IPs are another member's if that one was faster: only one member can create the object, or add addresses to one without.
// After an error some of this may be done.
func (b *Broker) Claim(ctx context.Context, want clusterset.Aggregate) (clusterset.Aggregate, error) {
	have, ok, err := b.Aggregate(want.Service)
	if err != nil {
		return clusterset.Aggregate{}, err
	}
	if ok && !lacksAddresses(have, want) && !b.extends(have, want) && !lacksChoice(have, want) && slices.Contains(have.Clusters, b.cfg.Self) {
		return have, nil
	}
	have, si, err := b.read(ctx, want.Service)
	if apierrors.IsNotFound(err) {
		have, si, err = b.create(ctx, want)
	}
	if err != nil {
		return clusterset.Aggregate{}, err
	}
	if have, err = b.complete(ctx, have, si, want); err != nil {
		return clusterset.Aggregate{}, err
	}
	if have, err = b.join(ctx, have, si); err != nil {
		return clusterset.Aggregate{}, err
	}
	return b.extendOther(ctx, have, si, want)
}

// join lists this member in the aggregate.
func (b *Broker) join(ctx context.Context, have clusterset.Aggregate, si *v1beta1.ServiceImport) (clusterset.Aggregate, error) {
	if slices.Contains(have.Clusters, b.cfg.Self) {
		return have, nil
	}
	si.Status.Clusters = append(si.Status.Clusters, v1beta1.ClusterStatus{Cluster: string(b.cfg.Self)})
	slices.SortFunc(si.Status.Clusters, func(x, y v1beta1.ClusterStatus) int { return strings.Compare(x.Cluster, y.Cluster) })
	if err := b.client.Status().Update(ctx, si); err != nil {
		return clusterset.Aggregate{}, wrap("join aggregate", si.Name, err)
	}
	have.Clusters = append(slices.Clone(have.Clusters), b.cfg.Self)
	slices.Sort(have.Clusters)
	return have, nil
}

func lacksAddresses(have, want clusterset.Aggregate) bool {
	return len(have.IPs) == 0 && len(want.IPs) > 0
}

// extends reports whether want has the addresses of have and another one, which this member may add: as the allocator of the
// others, or because the allocator cannot (see [clusterset.Aggregate.Extender]).
func (b *Broker) extends(have, want clusterset.Aggregate) bool {
	n := len(have.IPs)
	if n == 0 || n >= len(want.IPs) || !slices.Equal(have.IPs, want.IPs[:n]) || have.AllocatedBy != want.AllocatedBy || have.ExtendedBy != "" {
		return false
	}
	added := clusterset.FamilyOf(want.IPs[n])
	return have.AllocatedBy == b.cfg.Self ||
		want.ExtendedBy == b.cfg.Self && have.Extender(added, []clusterset.ClusterID{b.cfg.Self}, b.Registry().HasBlock) == b.cfg.Self
}

// extendOther adds an address of this member's block to those of another allocator. The broker accepts it only from a listed
// member. A broker that refuses it, for example one with older policies, costs the Service that address alone.
func (b *Broker) extendOther(ctx context.Context, have clusterset.Aggregate, si *v1beta1.ServiceImport, want clusterset.Aggregate) (clusterset.Aggregate, error) {
	if want.ExtendedBy == "" || len(si.Spec.IPs) != len(have.IPs) || !b.extends(have, want) {
		return have, nil
	}
	setAddresses(si, want)
	err := b.client.Update(ctx, si)
	if apierrors.IsForbidden(err) {
		b.registry.warnOnce("", fmt.Sprint("extend ", want.Service), fmt.Errorf("the broker refuses the address %s that this cluster adds to aggregate %s: %w", want.IPs[len(have.IPs)], want.Service, err))
		return have, nil
	}
	if err != nil {
		return clusterset.Aggregate{}, wrap("extend aggregate", si.Name, err)
	}
	b.cfg.Log.Info("added an address to another cluster's ClusterSetIP", "namespace", want.Service.Namespace, "service", want.Service.Name,
		"vip", want.IPs, "allocator", want.AllocatedBy)
	have.IPs, have.ExtendedBy = want.IPs, want.ExtendedBy
	return have, nil
}

// setAddresses gives an aggregate the addresses of want, and their owners.
func setAddresses(si *v1beta1.ServiceImport, want clusterset.Aggregate) {
	fresh := mcs.Aggregate(want)
	si.Spec.IPs, si.Spec.IPFamilies, si.Spec.Type = fresh.Spec.IPs, fresh.Spec.IPFamilies, fresh.Spec.Type
	for _, key := range []string{v1alpha1.AnnotationAllocatedBy, v1alpha1.AnnotationExtendedBy} {
		if by, ok := fresh.Annotations[key]; ok {
			metav1.SetMetaDataAnnotation(&si.ObjectMeta, key, by)
		}
	}
}

func lacksChoice(have, want clusterset.Aggregate) bool {
	return have.UseIP == clusterset.Unknown && want.UseIP != clusterset.Unknown
}

// Restore adds ips, which are of this member's block, to an aggregate that has lost its addresses. Only the owner of a
// block may do so.
func (b *Broker) Restore(ctx context.Context, name clusterset.ServiceName, ips []netip.Addr) error {
	have, si, err := b.read(ctx, name)
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	_, err = b.complete(ctx, have, si, clusterset.Aggregate{Service: name, Type: clusterset.ClusterSetIP, IPs: ips, AllocatedBy: b.cfg.Self, UseIP: clusterset.Enabled})
	return err
}

// complete sets the addresses and the choice of want where the aggregate has none, or fewer addresses.
func (b *Broker) complete(ctx context.Context, have clusterset.Aggregate, si *v1beta1.ServiceImport, want clusterset.Aggregate) (clusterset.Aggregate, error) {
	addresses := want.AllocatedBy == b.cfg.Self && (lacksAddresses(have, want) && len(si.Spec.IPs) == 0 || len(si.Spec.IPs) == len(have.IPs) && b.extends(have, want))
	// Addresses replace a choice against them: it was no exporter's, or the exporters would not want addresses.
	choice := lacksChoice(have, want) || addresses && have.UseIP == clusterset.Disabled
	if !addresses && !choice {
		return have, nil
	}
	if have.UseIP == clusterset.Disabled { // package export does not log it while the cache lacks the aggregate
		b.cfg.Log.Warn(clusterset.ChoiceIgnored, "namespace", have.Service.Namespace, "service", have.Service.Name,
			"annotation", v1alpha1.AnnotationUseClusterSetIP, "value", have.UseIP.String())
	}
	if addresses {
		setAddresses(si, want)
		have.IPs, have.AllocatedBy = want.IPs, want.AllocatedBy
	}
	if choice {
		metav1.SetMetaDataAnnotation(&si.ObjectMeta, v1alpha1.AnnotationUseClusterSetIP, want.UseIP.String())
		have.UseIP = want.UseIP
	}
	return have, wrap("update aggregate", si.Name, b.client.Update(ctx, si))
}

// create creates the aggregate, or reads the one that another member has just created.
func (b *Broker) create(ctx context.Context, want clusterset.Aggregate) (clusterset.Aggregate, *v1beta1.ServiceImport, error) {
	if want.ExtendedBy != "" { // the addresses to extend vanished with the aggregate
		want.IPs, want.AllocatedBy, want.ExtendedBy = nil, "", ""
	}
	si := mcs.Aggregate(want)
	si.Namespace = b.cfg.Namespace
	si.Status = v1beta1.ServiceImportStatus{}
	metav1.SetMetaDataAnnotation(&si.ObjectMeta, v1alpha1.AnnotationCreatedBy, string(b.cfg.Self))
	err := b.client.Create(ctx, si)
	if apierrors.IsAlreadyExists(err) {
		return b.read(ctx, want.Service)
	}
	if err != nil {
		return clusterset.Aggregate{}, nil, quota.WithRefusal(wrap("create aggregate", si.Name, err), true)
	}
	want.Clusters = nil
	return want, si, nil
}

// leave removes this member from the aggregate, and deletes the aggregate if no other member is listed. Both writes carry
// the version that was read, so they fail if another member joins meanwhile.
func (b *Broker) leave(ctx context.Context, name clusterset.ServiceName) error {
	known, ok, err := b.Aggregate(name)
	owns := func(a clusterset.Aggregate) bool { return a.AllocatedBy == b.cfg.Self || a.ExtendedBy == b.cfg.Self }
	if err == nil && (!ok || !slices.Contains(known.Clusters, b.cfg.Self) && (len(known.Clusters) > 0 || !owns(known))) {
		return nil // according to the cache; a change that it lacks triggers another reconcile
	}
	a, si, err := b.read(ctx, name)
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	listed := slices.Contains(a.Clusters, b.cfg.Self)
	others := len(a.Clusters) > 1 || len(a.Clusters) == 1 && !listed
	switch {
	case !others && (listed || owns(a)):
		err := b.client.Delete(ctx, si, client.Preconditions{UID: &si.UID, ResourceVersion: &si.ResourceVersion})
		return wrap("delete aggregate", si.Name, client.IgnoreNotFound(err))
	case listed:
		si.Status.Clusters = slices.DeleteFunc(si.Status.Clusters, func(c v1beta1.ClusterStatus) bool { return c.Cluster == string(b.cfg.Self) })
		return wrap("leave aggregate", si.Name, b.client.Status().Update(ctx, si))
	default:
		return nil
	}
}
