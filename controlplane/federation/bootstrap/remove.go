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

// Removal describes the removal of a cluster from a federation.
type Removal struct {
	ID        clusterset.ClusterID
	Namespace string
	// Gone states that the cluster no longer exists or cannot be reached. Its objects stay.
	Gone bool
	// Clusters are the cluster, unless it is gone, and every supervisor; to remove a supervisor, also every member.
	Clusters []Cluster
}

// Removed is the result of Remove.
type Removed struct {
	Objects int // of leaders that were deleted in the cluster
}

// Remove removes a cluster from its federation. First it removes the rights of leaders in the cluster. Then it removes the
// cluster from the Federations of all supervisors, whose leaders remove its Services and policies elsewhere. Last it
// deletes the objects of leaders in the cluster, and those of Form. The objects of users and the definitions stay. A
// repeated call completes an interrupted one.
func Remove(ctx context.Context, r Removal) (Removed, error) {
	var removed Removed
	s, err := newSurvey(ctx, r.Namespace, r.Clusters)
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
			if err := s.removeAccount(ctx, leaving.Cluster, supervisor); err != nil {
				return removed, leaving.wrap(err)
			}
		}
	}
	delete(s.members, r.ID)
	for _, found := range s.clusters {
		if found.ID == r.ID {
			continue
		}
		if err := s.forget(ctx, found, r.ID); err != nil {
			return removed, found.wrap(err)
		}
	}
	if leaving != nil {
		if removed.Objects, err = s.deleteObjects(ctx, leaving); err != nil {
			return removed, leaving.wrap(err)
		}
	}
	return removed, nil
}

// checkLeave returns what is missing for a removal.
func (s *survey) checkLeave(r Removal) error {
	leaving := s.site(r.ID)
	_, known := s.members[r.ID]
	if leaving != nil {
		known = known || leaving.federation != nil || len(leaving.supervisors) > 0
	}
	var errs []error
	switch {
	case !known && !r.Gone:
		return fmt.Errorf("cluster %s is not a member of the federation of any given cluster", r.ID)
	case leaving != nil && r.Gone:
		return fmt.Errorf("cluster %s is given by a context, and --gone states that it cannot be reached; omit one of them", r.ID)
	case leaving == nil && !r.Gone:
		errs = append(errs, fmt.Errorf("cluster %s is not given; give %s, or --gone if it can no longer be reached", r.ID, flag(s.supervisors[r.ID], r.ID)))
	}
	others := func(ids []clusterset.ClusterID) []clusterset.ClusterID {
		return slices.DeleteFunc(ids, func(id clusterset.ClusterID) bool { return id == r.ID })
	}
	supervisors := others(slices.Sorted(maps.Keys(s.supervisors)))
	members := others(slices.Sorted(maps.Keys(s.members)))
	errs = append(errs, s.need(supervisors, "it has to remove "+string(r.ID)+" from its members"))
	if s.supervisors[r.ID] {
		if len(supervisors) == 0 && len(members) > 0 {
			return fmt.Errorf("cluster %s is the last supervisor, and %v would have none; remove those first, or add another supervisor", r.ID, members)
		}
		errs = append(errs, s.need(members, "the supervisor has an account in it"))
	}
	return errors.Join(errs...)
}

// forget removes a leaving member from another cluster: its Secret, its entry in the Federation of a supervisor, and, if it
// was a supervisor, its account.
func (s *survey) forget(ctx context.Context, found *surveyed, id clusterset.ClusterID) error {
	if err := s.removeAccount(ctx, found.Cluster, id); err != nil {
		return err
	}
	if found.federation == nil || len(found.federation.Spec.Members) == 0 {
		return nil
	}
	found.Supervisor = true
	if err := s.writeFederation(ctx, found, found.federation.Spec.ClusterSet, nil); err != nil {
		return err
	}
	return admin.DeleteOwn(ctx, found.Client, &corev1.Secret{ObjectMeta: secretMeta(secretPrefix + string(id))})
}

// deleteObjects deletes the objects of leaders in a cluster, which it counts, and the objects of Form, except for
// [admission.Parameters].
func (s *survey) deleteObjects(ctx context.Context, leaving *surveyed) (int, error) {
	written, err := s.deleteWritten(ctx, leaving.Client)
	if err != nil {
		return written, err
	}
	own := []client.Object{
		&federationv1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName}},
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: roleName}},
		&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: roleName}},
	}
	own = append(own, secretRights(s.namespace)...)
	if leaving.federation != nil {
		for _, m := range leaving.federation.Spec.Members {
			own = append(own, &corev1.Secret{ObjectMeta: secretMeta(m.Secret)})
		}
	}
	for _, obj := range append(slices.Concat(admission.Fence(s.namespace, leaving.ID), admission.Own(s.namespace), admission.Endpoints(s.namespace), admission.Tokens(s.namespace), admission.VIPs(s.namespace), admission.Claims()), own...) {
		if err := admin.DeleteOwn(ctx, leaving.Client, obj); err != nil {
			return written, err
		}
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: string(leaving.ID)}}
	if err := admin.DeleteIfThere(ctx, leaving.Client, lease); err != nil {
		return written, err
	}
	for _, property := range []string{about.ClusterSet, about.ClusterID} {
		if err := deleteProperty(ctx, leaving.Client, property); err != nil {
			return written, err
		}
	}
	for _, claim := range []string{federationv1alpha1.ClaimSupervisor, federationv1alpha1.ClaimClusterSet, federationv1alpha1.ClaimID} {
		// The API server may enforce the claims policy for a moment after its Federation is gone.
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
	return written, admin.RemoveFences(ctx, leaving.Client, s.namespace, &v1alpha1.MemberList{})
}

// deleteProperty deletes a ClusterProperty that a controller made from a claim. One that a broker's ClusterSet needs stays,
// because the API server refuses to delete it.
func deleteProperty(ctx context.Context, c client.Client, name string) error {
	p := &about.ClusterProperty{}
	switch err := c.Get(ctx, client.ObjectKey{Name: name}, p); {
	case err != nil && !admin.IsAbsent(err):
		return fmt.Errorf("read ClusterProperty %s: %w", name, err)
	case p.Labels[v1alpha1.LabelManagedBy] != federationv1alpha1.ManagedBy: // or it does not exist
		return nil
	}
	if err := admin.DeleteIfThere(ctx, c, p, client.Preconditions{UID: &p.UID}); !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) {
		return err
	}
	return nil
}

// deleteWritten deletes the objects of leaders: those with our label and the epoch of a leader. It also removes the
// annotations of leaders from users' Services and policies.
func (s *survey) deleteWritten(ctx context.Context, c client.Client) (int, error) {
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

// unmark removes the annotations of leaders from a user's object.
func unmark(ctx context.Context, c client.Client, o *metav1.PartialObjectMetadata) error {
	patch := []byte(fmt.Sprintf(`{"metadata":{"annotations":{%q:null,%q:null,%q:null}}}`,
		federationv1alpha1.AnnotationEpoch, federationv1alpha1.AnnotationServiceStatus, policies.AnnotationStatus))
	if err := c.Patch(ctx, o, client.RawPatch(types.MergePatchType, patch), admin.FieldOwner); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove the federation's annotations from %s %s: %w", o.Kind, client.ObjectKeyFromObject(o), err)
	}
	return nil
}
