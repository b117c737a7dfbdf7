package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Removal is a cluster that shall leave a federation.
type Removal struct {
	ID        clusterset.ClusterID
	Namespace string
	// Gone says that the cluster does not exist any more, or cannot be reached: what is in it stays.
	Gone bool
	// Clusters are the cluster, unless it is gone, and every supervisor; with a supervisor that leaves every member.
	Clusters []Cluster
}

// Removed is what became of a Removal.
type Removed struct {
	Objects int // that leaders had written in the cluster
}

// Remove takes a cluster out of its federation. First leaders can write nothing there any more, then all supervisors
// forget it, and so its Services and policies vanish elsewhere; then what leaders wrote in it is removed, and what
// Form did. Everybody else's objects stay, and so do the definitions. It is finished by doing it again.
func Remove(ctx context.Context, r Removal) (Removed, error) {
	var removed Removed
	s, err := look(ctx, r.Namespace, r.Clusters)
	if err != nil {
		return removed, err
	}
	if err := s.checkLeave(r); err != nil {
		return removed, err
	}
	leaving := s.site(r.ID)
	if r.Gone {
		leaving = nil
	}
	if leaving != nil {
		for _, supervisor := range leaving.supervisors {
			if err := s.shut(ctx, leaving.Cluster, supervisor); err != nil {
				return removed, leaving.wrap(err)
			}
		}
	}
	delete(s.members, r.ID)
	for _, found := range s.sites {
		if found.ID == r.ID {
			continue
		}
		if err := s.forget(ctx, found, r.ID); err != nil {
			return removed, found.wrap(err)
		}
	}
	if leaving != nil {
		if removed.Objects, err = s.clear(ctx, leaving); err != nil {
			return removed, leaving.wrap(err)
		}
	}
	return removed, nil
}

// checkLeave reports what is missing for a removal.
func (s *survey) checkLeave(r Removal) error {
	leaving := s.site(r.ID)
	_, known := s.members[r.ID]
	if leaving != nil {
		known = known || leaving.federation != nil || len(leaving.supervisors) > 0
	}
	var errs []error
	switch {
	case !known && !r.Gone:
		return fmt.Errorf("cluster %s is no member of a federation that any of the clusters knows", r.ID)
	case leaving != nil && r.Gone:
		return fmt.Errorf("cluster %s is given by a context, and --gone says that it cannot be reached; leave one of them away", r.ID)
	case leaving == nil && !r.Gone:
		errs = append(errs, fmt.Errorf("cluster %s is not given; give %s, or --gone if it cannot be reached any more", r.ID, flag(s.supervisors[r.ID], r.ID)))
	}
	others := func(ids []clusterset.ClusterID) []clusterset.ClusterID {
		return slices.DeleteFunc(ids, func(id clusterset.ClusterID) bool { return id == r.ID })
	}
	supervisors := others(slices.Sorted(maps.Keys(s.supervisors)))
	members := others(slices.Sorted(maps.Keys(s.members)))
	errs = append(errs, s.need(supervisors, "it has to forget "+string(r.ID)))
	if s.supervisors[r.ID] {
		if len(supervisors) == 0 && len(members) > 0 {
			return fmt.Errorf("cluster %s is the last supervisor, and nobody would look after %v; remove those first, or add another supervisor", r.ID, members)
		}
		errs = append(errs, s.need(members, "the supervisor has an account in it"))
	}
	return errors.Join(errs...)
}

// forget takes a member that leaves out of what another cluster knows: its Secret and its place in the Federation of
// a supervisor, and its account if it was a supervisor.
func (s *survey) forget(ctx context.Context, found *site, id clusterset.ClusterID) error {
	if err := s.shut(ctx, found.Cluster, id); err != nil {
		return err
	}
	if found.federation == nil || len(found.federation.Spec.Members) == 0 {
		return nil
	}
	found.Supervisor = true
	if err := s.name(ctx, found, found.federation.Spec.ClusterSet); err != nil {
		return err
	}
	return admin.DeleteOwn(ctx, found.Client, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: secretPrefix + string(id)}})
}

// clear removes from a cluster what leaders wrote, which it counts, and what Form did.
func (s *survey) clear(ctx context.Context, leaving *site) (int, error) {
	written, err := s.clearWritten(ctx, leaving.Client)
	if err != nil {
		return written, err
	}
	own := []client.Object{
		&federationv1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName}},
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: roleName}},
		&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: roleName}},
	}
	if leaving.federation != nil {
		for _, m := range leaving.federation.Spec.Members {
			own = append(own, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: m.Secret}})
		}
	}
	for _, obj := range append(slices.Concat(admission.Fence(s.namespace, leaving.ID), admission.Own(s.namespace), admission.Claims()), own...) {
		if err := admin.DeleteOwn(ctx, leaving.Client, obj); err != nil {
			return written, err
		}
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: string(leaving.ID)}}
	if err := admin.DeleteIfThere(ctx, leaving.Client, lease); err != nil {
		return written, err
	}
	for _, property := range []string{about.ClusterSet, about.ClusterID} {
		if err := clearProperty(ctx, leaving.Client, property); err != nil {
			return written, err
		}
	}
	for _, claim := range []string{federationv1alpha1.ClaimSupervisor, federationv1alpha1.ClaimClusterSet, federationv1alpha1.ClaimID} {
		// The API server may hold on for a moment to a policy that keeps a claim of a Federation.
		err := admin.Await(ctx, "the API server still refuses to delete ClusterClaim "+claimName(claim), func() (bool, error) {
			err := admin.DeleteOwn(ctx, leaving.Client, &federationv1alpha1.ClusterClaim{ObjectMeta: metav1.ObjectMeta{Name: claimName(claim)}})
			if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) {
				return false, nil
			}
			return err == nil, err
		})
		if err != nil {
			return written, err
		}
	}
	return written, nil
}

// clearProperty deletes a ClusterProperty that a controller made of a claim. One that a broker's ClusterSet relies on stays,
// for the API server refuses to delete it.
func clearProperty(ctx context.Context, c client.Client, name string) error {
	p := &about.ClusterProperty{}
	switch err := c.Get(ctx, client.ObjectKey{Name: name}, p); {
	case err != nil && !admin.IsAbsent(err):
		return fmt.Errorf("read ClusterProperty %s: %w", name, err)
	case p.Labels[v1alpha1.LabelManagedBy] != federationv1alpha1.ManagedBy: // or there is none
		return nil
	}
	if err := admin.DeleteIfThere(ctx, c, p, client.Preconditions{UID: &p.UID}); !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) {
		return err
	}
	return nil
}

// clearWritten removes what leaders wrote: everything with our label and the epoch of a leader. What they noted on
// other people's Services and policies goes, too.
func (s *survey) clearWritten(ctx context.Context, c client.Client) (int, error) {
	kinds := []schema.GroupVersionKind{
		discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"), corev1.SchemeGroupVersion.WithKind("Service"),
		corev1.SchemeGroupVersion.WithKind("ConfigMap"),
		{Group: mcsv1beta1.GroupVersion.Group, Version: mcsv1beta1.GroupVersion.Version, Kind: "ServiceImport"},
	}
	for _, kind := range s.kinds() {
		kinds = append(kinds, schema.GroupVersionKind(kind))
	}
	removed := 0
	for _, gvk := range kinds {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(gvk.GroupVersion().WithKind(gvk.Kind + "List"))
		if err := c.List(ctx, list); err != nil {
			if admin.IsAbsent(err) {
				continue
			}
			return removed, fmt.Errorf("list objects of kind %s: %w", gvk.Kind, err)
		}
		for i := range list.Items {
			o := &list.Items[i]
			o.SetGroupVersionKind(gvk)
			if o.Annotations[federationv1alpha1.AnnotationEpoch] == "" {
				continue
			}
			if o.Labels[v1alpha1.LabelManagedBy] != federationv1alpha1.ManagedBy && o.Labels[discoveryv1.LabelManagedBy] != federationv1alpha1.ManagedBy {
				if err := unmark(ctx, c, o); err != nil {
					return removed, err
				}
				continue
			}
			if err := admin.DeleteIfThere(ctx, c, o, client.Preconditions{UID: &o.UID}); err != nil {
				return removed, err
			}
			removed++
		}
	}
	return removed, nil
}

// unmark takes what leaders noted off an object that is somebody else's.
func unmark(ctx context.Context, c client.Client, o *metav1.PartialObjectMetadata) error {
	patch := []byte(fmt.Sprintf(`{"metadata":{"annotations":{%q:null,%q:null,%q:null}}}`,
		federationv1alpha1.AnnotationEpoch, federationv1alpha1.AnnotationServiceStatus, policies.AnnotationStatus))
	if err := c.Patch(ctx, o, client.RawPatch(types.MergePatchType, patch), admin.FieldOwner); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take the federation's annotations off %s %s: %w", o.Kind, client.ObjectKeyFromObject(o), err)
	}
	return nil
}
