package services

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// applyImport creates, updates or removes the ServiceImport with a ClusterSetIP. It does not touch a ServiceImport of the
// name that is not ours.
func (r *Reconciler) applyImport(ctx context.Context, into reconcile.Writer, all []reconcile.Member, s *snapshot, fed offers.Federated) error {
	if !r.vips.on() {
		return r.removeImport(ctx, into, s.name)
	}
	have := &v1beta1.ServiceImport{}
	err := into.Get(ctx, client.ObjectKey(s.name), have)
	switch {
	case errors.Is(err, objectcache.ErrKindMissing):
		return nil // report mentions it
	case client.IgnoreNotFound(err) != nil:
		return fmt.Errorf("read service import %s: %w", s.name, err)
	case err == nil && !offers.IsOurs(have):
		return nil
	}
	imp := clusterset.Import{
		Service: s.name, Type: clusterset.ClusterSetIP, Ports: fed.Ports, Clusters: fed.Clusters, SessionAffinity: fed.Affinity,
	}
	if imp.IPs, err = r.vips.of(ctx, s, into, all); err != nil {
		return err
	}
	var owner string
	if imp.IPs, owner = s.blocked.withhold(into.ID(), imp.IPs); owner != "" {
		owner += "; give spec.clusterSetIP.ranges of the Federation a range that no cluster uses"
	}
	for _, a := range imp.IPs {
		imp.Families = append(imp.Families, clusterset.FamilyOf(a))
	}
	want := mcs.ServiceImport(imp)
	want.Labels[isthmus.LabelManagedBy] = v1alpha1.ManagedBy
	status := want.Status
	want.Status = have.Status
	switch {
	case err == nil && have.UID != "" && mcs.ImportDigest(have) == mcs.ImportDigest(want):
		want = have
	case have.UID != "":
		want.ResourceVersion, want.UID = have.ResourceVersion, have.UID
		if faults := r.vips.faults(have, s.blocked); len(faults) > 0 {
			into.Event(have, corev1.EventTypeWarning, ReasonForeignAddress, fmt.Sprintf("%s; the import was replaced and has %s now",
				strings.Join(faults, "; "), cmp.Or(strings.Join(want.Spec.IPs, ", "), "no address")))
		}
		err = into.Replace(ctx, want)
	default:
		err = into.Create(ctx, want)
	}
	if r.recordWithheld(into.ID(), s, owner, err) {
		r.requeue(s.name) // all member Services report it
	}
	if err != nil {
		return fmt.Errorf("write service import %s: %w", s.name, err)
	}
	return r.applyImportStatus(ctx, into, want, status)
}

// recordWithheld records whether a cluster gets the ClusterSetIP, given its owner in that cluster and the error of the write, and
// reports whether that changed.
func (r *Reconciler) recordWithheld(cluster clusterset.ClusterID, s *snapshot, owner string, err error) bool {
	key := taken{cluster, s.name}
	if err == nil && owner != "" {
		text := fmt.Sprintf("cluster %s does not get the ClusterSetIP: %s", cluster, owner)
		before, _ := r.rejectedVIPs.Swap(key, text)
		return before != text
	}
	if err == nil {
		_, was := r.rejectedVIPs.LoadAndDelete(key)
		return was
	}
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), admission.VIPsName) {
		return false // the error is not about the address
	}
	text := fmt.Sprintf("cluster %s refuses the ClusterSetIP: %v", cluster, err)
	before, _ := r.rejectedVIPs.Swap(key, text)
	return before != text
}

// applyImportStatus sets the status of the stored si.
func (r *Reconciler) applyImportStatus(ctx context.Context, into reconcile.Writer, si *v1beta1.ServiceImport, status v1beta1.ServiceImportStatus) error {
	conditions := append([]metav1.Condition(nil), si.Status.Conditions...)
	for _, c := range status.Conditions {
		c.ObservedGeneration = si.Generation
		meta.SetStatusCondition(&conditions, c)
	}
	status.Conditions = conditions
	if equality.Semantic.DeepEqual(status, si.Status) {
		return nil
	}
	want := &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: si.Namespace, Name: si.Name, ResourceVersion: si.ResourceVersion}, Spec: si.Spec, Status: status,
	}
	if err := into.ApplyStatus(ctx, want); err != nil {
		return fmt.Errorf("write status of service import %s/%s: %w", si.Namespace, si.Name, err)
	}
	return nil
}

// removeImport deletes our ServiceImport of a federated Service, if there is one.
func (r *Reconciler) removeImport(ctx context.Context, into reconcile.Writer, name clusterset.ServiceName) error {
	have := &v1beta1.ServiceImport{}
	err := into.Get(ctx, client.ObjectKey(name), have)
	if errors.Is(err, objectcache.ErrKindMissing) {
		return nil
	}
	if err == nil && offers.IsOurs(have) {
		err = into.Delete(ctx, have)
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove service import %s: %w", name, err)
	}
	return nil
}
