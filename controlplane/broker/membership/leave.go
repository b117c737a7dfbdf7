package membership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// tombstoneLife is how long the registration of a former member stays as a tombstone. A member that was away for longer
// finds no object of the former one.
const tombstoneLife = time.Hour

// annotationReplicas on the controller's Deployment is its number of replicas before the member left.
const annotationReplicas = "isthmus.dev/replicas"

// Left is the result of Leave or ForceLeave, with the numbers of removed objects.
type Left struct {
	ClusterID, ClusterSetID string
	AlreadyLeft             bool // the member had left before, and the remaining objects are gone now
	Exports                 int  // withdrawn records of the member on the broker
	Aggregates              int  // aggregates that the member was removed from, or that were deleted
	Imports                 int  // deleted ServiceImports in the member
	Notes                   []string
}

// Leave ends the membership of the cluster behind member, installed in namespace. It stops the controller and revokes the
// member's rights on the broker. There it withdraws the member's exports and sets leftAt, on which the other members act at
// once, deletes the member's objects, and removes it from shared ones. In the member it deletes the imports and the objects
// of join; ServiceExports, foreign objects, and a broker in the same cluster stay. An interrupted Leave is completed by
// calling it again. Errors: ErrNotJoined, ErrNoBroker, ErrOlderDefinitions.
func Leave(ctx context.Context, broker, member client.Client, namespace string) (Left, error) {
	var left Left
	m, err := locate(ctx, broker, member, namespace)
	if err != nil {
		return left, err
	}
	left.ClusterID, left.ClusterSetID = m.id, m.clusterSet
	if err := checkDefinitions(ctx, broker); err != nil {
		return left, err
	}
	if m.copied.Spec.LeftAt == nil { // for a controller that runs outside of the cluster
		m.copied.Spec.LeftAt = new(metav1.Now())
		if err := applyMember(ctx, member, m.copied); err != nil {
			return left, fmt.Errorf("in the member: %w", err)
		}
	}
	if err := stopController(ctx, member, namespace); err != nil {
		return left, err
	}
	if m.replaced {
		left.Notes = append(left.Notes, fmt.Sprintf("another cluster is member %s now, so the broker was not changed", m.id))
	} else if err := leaveBroker(ctx, broker, m.brokerNamespace, m.id, &left); err != nil {
		return left, fmt.Errorf("on the broker: %w", err)
	}
	if err := clearMember(ctx, member, namespace, m, &left); err != nil {
		return left, fmt.Errorf("in the member: %w", err)
	}
	if err := prune(ctx, broker, m.brokerNamespace, time.Now()); err != nil {
		return left, fmt.Errorf("on the broker: %w", err)
	}
	return left, nil
}

// LeaveLostBroker does the part of Leave in the cluster itself, whose broker no longer exists. It does not ask the broker whether that is
// true. If it exists, the other members keep the cluster's exports until ForceLeave.
func LeaveLostBroker(ctx context.Context, member client.Client, namespace string) (Left, error) {
	copied, err := ownMember(ctx, member, namespace)
	if err != nil {
		return Left{}, err
	}
	m := managedMember{id: copied.Name, clusterSet: copied.Spec.ClusterSetID, copied: copied}
	left := Left{ClusterID: m.id, ClusterSetID: m.clusterSet}
	if copied.Spec.LeftAt == nil {
		copied.Spec.LeftAt = new(metav1.Now())
		if err := applyMember(ctx, member, copied); err != nil {
			return left, err
		}
	}
	if err := stopController(ctx, member, namespace); err != nil {
		return left, err
	}
	return left, clearMember(ctx, member, namespace, m, &left)
}

// ForceLeave ends the membership of cluster id on the broker as Leave does, without access to the cluster, which no longer
// exists. If the cluster comes back, its controller has no rights. An unknown id is ErrNoMember.
func ForceLeave(ctx context.Context, broker client.Client, namespace, id string) (Left, error) {
	left := Left{ClusterID: id}
	all, err := readReservations(ctx, broker, namespace)
	if err != nil {
		return left, err
	}
	left.ClusterSetID = all.config.Spec.ClusterSetID
	if err := checkDefinitions(ctx, broker); err != nil {
		return left, err
	}
	if all.own(id) == nil { // an interrupted join may have left only a reservation
		if _, err := readMember(ctx, broker, namespace, id); err != nil {
			return left, err
		}
	}
	if err := leaveBroker(ctx, broker, namespace, id, &left); err != nil {
		return left, err
	}
	return left, prune(ctx, broker, namespace, time.Now())
}

// leaveBroker ends a membership on the broker. It first revokes the account, so that the member's controller cannot undo the
// rest. Then it writes tombstones, so that the other members accept the deletions that follow.
func leaveBroker(ctx context.Context, broker client.Client, namespace, id string, left *Left) error {
	m, err := readMember(ctx, broker, namespace, id)
	if err != nil && !errors.Is(err, ErrNoMember) {
		return err
	}
	left.AlreadyLeft = m == nil || m.Spec.LeftAt != nil
	if err := revokeAccount(ctx, broker, namespace, id); err != nil {
		return err
	}
	owned := []client.ListOption{client.InNamespace(namespace), client.MatchingLabels{v1alpha1.LabelCluster: id}}
	records := &v1alpha1.ExportRecordList{}
	if err := broker.List(ctx, records, owned...); err != nil {
		return fmt.Errorf("list export records: %w", err)
	}
	now := metav1.Now().Rfc3339Copy()
	for i := range records.Items {
		if r := &records.Items[i]; r.Spec.WithdrawnAt == nil {
			r.Spec.WithdrawnAt = &now
			if err := broker.Update(ctx, r, admin.FieldOwner); client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("withdraw export record %s: %w", r.Name, err)
			}
			left.Exports++
		}
	}
	if m != nil && m.Spec.LeftAt == nil {
		m.Spec.LeftAt = &now
		if err := applyMember(ctx, broker, m); err != nil {
			return err
		}
	}
	if err := deleteSlices(ctx, broker, owned); err != nil {
		return err
	}
	if err := leaveAggregates(ctx, broker, namespace, id, left); err != nil {
		return err
	}
	for i := range records.Items {
		if err := admin.DeleteIfThere(ctx, broker, &records.Items[i]); err != nil {
			return err
		}
	}
	return admin.DeleteIfThere(ctx, broker, &coordinationv1.Lease{ObjectMeta: named(namespace, v1alpha1.MemberLease(id), id)})
}

// applyMember writes the whole registration of a member, so that isthmusctl owns all its fields at a later join.
func applyMember(ctx context.Context, c client.Client, m *v1alpha1.Member) error {
	return admin.Apply(ctx, c, &v1alpha1.Member{
		ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, Labels: m.Labels, Annotations: m.Annotations},
		Spec:       m.Spec,
	})
}

// deleteSlices empties a member's EndpointSlices, which withdraws their endpoints, and deletes them.
func deleteSlices(ctx context.Context, broker client.Client, owned []client.ListOption) error {
	list := &discoveryv1.EndpointSliceList{}
	if err := broker.List(ctx, list, append(owned, client.MatchingLabels{discoveryv1.LabelManagedBy: v1alpha1.ManagedBy})...); err != nil {
		return fmt.Errorf("list EndpointSlices: %w", err)
	}
	for i := range list.Items {
		s := &list.Items[i]
		if len(s.Endpoints) > 0 {
			s.Endpoints = nil
			if err := broker.Update(ctx, s, admin.FieldOwner); client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("empty EndpointSlice %s: %w", s.Name, err)
			}
		}
		if err := admin.DeleteIfThere(ctx, broker, s); err != nil {
			return err
		}
	}
	return nil
}

// leaveAggregates removes a member from all aggregates, and deletes those without exporters. It retries after concurrent
// writes of other members.
func leaveAggregates(ctx context.Context, broker client.Client, namespace, id string, left *Left) error {
	list := &mcsv1beta1.ServiceImportList{}
	if err := broker.List(ctx, list, client.InNamespace(namespace)); err != nil {
		return fmt.Errorf("list aggregates: %w", err)
	}
	for i := range list.Items {
		concerned := false
		err := retry.RetryOnConflict(contention, func() error {
			a := &mcsv1beta1.ServiceImport{}
			if err := broker.Get(ctx, client.ObjectKeyFromObject(&list.Items[i]), a); err != nil {
				return client.IgnoreNotFound(err)
			}
			mine := func(c mcsv1beta1.ClusterStatus) bool { return c.Cluster == id }
			listed := slices.ContainsFunc(a.Status.Clusters, mine)
			others := slices.DeleteFunc(slices.Clone(a.Status.Clusters), mine)
			owns := a.Annotations[v1alpha1.AnnotationAllocatedBy] == id || a.Annotations[v1alpha1.AnnotationExtendedBy] == id
			if !listed && (len(others) > 0 || !owns) {
				return nil
			}
			concerned = true
			wanted := len(others) > 0
			if !wanted { // a member with a record may be about to list itself
				var err error
				if wanted, err = exported(ctx, broker, a, id); err != nil {
					return err
				}
			}
			if !wanted {
				return client.IgnoreNotFound(broker.Delete(ctx, a, client.Preconditions{UID: &a.UID, ResourceVersion: &a.ResourceVersion}))
			}
			if !listed {
				return nil
			}
			a.Status.Clusters = others
			return client.IgnoreNotFound(broker.Status().Update(ctx, a, admin.FieldOwner))
		})
		if err != nil {
			return fmt.Errorf("leave aggregate %s: %w", list.Items[i].Name, err)
		}
		if concerned {
			left.Aggregates++
		}
	}
	return nil
}

// exported reports whether any member but id exports the Service of an aggregate.
func exported(ctx context.Context, broker client.Client, a *mcsv1beta1.ServiceImport, id string) (bool, error) {
	records := &v1alpha1.ExportRecordList{}
	err := broker.List(ctx, records, client.InNamespace(a.Namespace), client.MatchingLabels{
		v1alpha1.LabelServiceName:      a.Labels[v1alpha1.LabelServiceName],
		v1alpha1.LabelServiceNamespace: a.Labels[v1alpha1.LabelServiceNamespace],
	})
	if err != nil {
		return false, fmt.Errorf("list export records: %w", err)
	}
	return slices.ContainsFunc(records.Items, func(r v1alpha1.ExportRecord) bool {
		return r.Spec.ClusterID != id && r.Spec.WithdrawnAt == nil
	}), nil
}

// stopController scales the member's controller to zero and waits until its pods are gone, so that it does not import the
// deleted objects again. It succeeds without a Deployment, which is gone if Isthmus was uninstalled first.
func stopController(ctx context.Context, member client.Client, namespace string) error {
	d, err := Controller(ctx, member, namespace)
	if err != nil || d == nil {
		return err
	}
	key := client.ObjectKeyFromObject(d)
	if d.Spec.Replicas == nil || *d.Spec.Replicas > 0 {
		was := int32(1)
		if d.Spec.Replicas != nil {
			was = *d.Spec.Replicas
		}
		if err := scale(ctx, member, d, 0, strconv.Itoa(int(was))); err != nil {
			return fmt.Errorf("stop Deployment %s: %w", key, err)
		}
	}
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil {
		return fmt.Errorf("read the selector of Deployment %s: %w", key, err)
	}
	const limit = time.Minute
	return admin.AwaitFor(ctx, limit, fmt.Sprintf("pods of Deployment %s still run after %s; delete them, then leave again", key, limit), func() (bool, error) {
		pods := &corev1.PodList{}
		if err := member.List(ctx, pods, client.InNamespace(namespace), client.MatchingLabelsSelector{Selector: selector}); err != nil {
			return false, fmt.Errorf("list pods in namespace %s: %w", namespace, err)
		}
		return len(pods.Items) == 0, nil
	})
}

// Stopped reports whether Leave has scaled a controller's Deployment to zero.
func Stopped(d *appsv1.Deployment) bool {
	_, stopped := d.Annotations[annotationReplicas]
	return stopped && d.Spec.Replicas != nil && *d.Spec.Replicas == 0
}

// resumeController reverts stopController, for a cluster that joins again with Isthmus still installed.
func resumeController(ctx context.Context, member client.Client, namespace string) error {
	d, err := Controller(ctx, member, namespace)
	if err != nil || d == nil {
		return err
	}
	was, err := strconv.ParseInt(d.Annotations[annotationReplicas], 10, 32)
	if err != nil {
		return nil //nolint:nilerr // Leave did not stop it
	}
	if err := scale(ctx, member, d, int32(was), nil); err != nil {
		return fmt.Errorf("start Deployment %s: %w", client.ObjectKeyFromObject(d), err)
	}
	return nil
}

// scale sets the replicas of a Deployment, and annotationReplicas.
func scale(ctx context.Context, member client.Client, d *appsv1.Deployment, replicas int32, before any) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{annotationReplicas: before}},
		"spec":     map[string]any{"replicas": replicas},
	})
	if err != nil {
		return err
	}
	return member.Patch(ctx, d, client.RawPatch(types.MergePatchType, patch), admin.FieldOwner)
}

// clearMember deletes the imports and the objects of join in the member. It deletes the copy of the registration last,
// because a repeated Leave needs it.
func clearMember(ctx context.Context, member client.Client, namespace string, m managedMember, left *Left) error {
	skip, err := brokerNamespaces(ctx, member)
	if err != nil {
		return err
	}
	imported := &discoveryv1.EndpointSliceList{}
	if err := member.List(ctx, imported, client.MatchingLabels{discoveryv1.LabelManagedBy: v1alpha1.ManagedBy}); err != nil {
		return fmt.Errorf("list EndpointSlices: %w", err)
	}
	for i := range imported.Items {
		if o := &imported.Items[i]; !skip[o.Namespace] {
			if err := admin.DeleteIfThere(ctx, member, o); err != nil {
				return err
			}
		}
	}
	imports := &mcsv1beta1.ServiceImportList{}
	if err := member.List(ctx, imports, client.MatchingLabels{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy}); err != nil && !admin.IsAbsent(err) {
		return fmt.Errorf("list ServiceImports: %w", err)
	}
	for i := range imports.Items {
		if o := &imports.Items[i]; !skip[o.Namespace] {
			if err := admin.DeleteIfThere(ctx, member, o); err != nil {
				return err
			}
			left.Imports++
		}
	}
	if err := resetExports(ctx, member, m); err != nil {
		return err
	}
	if err := admin.DeleteOwn(ctx, member, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.BrokerSecret}}); err != nil {
		return err
	}
	if err := clearProperties(ctx, member); err != nil {
		return err
	}
	if err := admin.RemoveFences(ctx, member, namespace, &federationv1alpha1.FederationList{}); err != nil {
		return err
	}
	return admin.DeleteIfThere(ctx, member, m.copied)
}

// brokerNamespaces returns the broker namespaces of a cluster, whose objects belong to all members.
func brokerNamespaces(ctx context.Context, c client.Client) (map[string]bool, error) {
	configs := &v1alpha1.ClusterSetConfigList{}
	if err := c.List(ctx, configs); err != nil && !admin.IsAbsent(err) {
		return nil, fmt.Errorf("list ClusterSetConfigs: %w", err)
	}
	found := map[string]bool{}
	for _, config := range configs.Items {
		found[config.Namespace] = true
	}
	return found, nil
}

// resetExports sets all ServiceExports to not Ready, because no controller updates them any more.
func resetExports(ctx context.Context, member client.Client, m managedMember) error {
	exports := &mcsv1beta1.ServiceExportList{}
	if err := member.List(ctx, exports); err != nil {
		if admin.IsAbsent(err) {
			return nil
		}
		return fmt.Errorf("list ServiceExports: %w", err)
	}
	for i := range exports.Items {
		key := client.ObjectKeyFromObject(&exports.Items[i])
		err := retry.RetryOnConflict(contention, func() error {
			e := &mcsv1beta1.ServiceExport{}
			if err := member.Get(ctx, key, e); err != nil {
				return client.IgnoreNotFound(err)
			}
			kept := slices.DeleteFunc(slices.Clone(e.Status.Conditions), func(c metav1.Condition) bool {
				return c.Type != string(mcsv1beta1.ServiceExportConditionReady)
			})
			if len(kept) == 0 {
				return nil // it was never reconciled
			}
			ready := mcsv1beta1.NewServiceExportCondition(mcsv1beta1.ServiceExportConditionReady, metav1.ConditionFalse, mcsv1beta1.ServiceExportReasonPending,
				fmt.Sprintf("cluster %s has left ClusterSet %s; the service is exported again when the cluster joins again", m.id, m.clusterSet))
			if kept[0].Status == metav1.ConditionFalse {
				ready.LastTransitionTime = kept[0].LastTransitionTime
			}
			if len(e.Status.Conditions) == 1 && kept[0].Message == ready.Message {
				return nil
			}
			e.Status.Conditions = []metav1.Condition{ready}
			return client.IgnoreNotFound(member.Status().Update(ctx, e, admin.FieldOwner))
		})
		if err != nil {
			return fmt.Errorf("write the status of ServiceExport %s: %w", key, err)
		}
	}
	return nil
}

// prune deletes member tombstones older than tombstoneLife.
func prune(ctx context.Context, broker client.Client, namespace string, now time.Time) error {
	members := &v1alpha1.MemberList{}
	if err := broker.List(ctx, members, client.InNamespace(namespace)); err != nil {
		return fmt.Errorf("list members: %w", err)
	}
	for i := range members.Items {
		m := &members.Items[i]
		if m.Spec.LeftAt == nil || now.Sub(m.Spec.LeftAt.Time) < tombstoneLife {
			continue
		}
		err := admin.DeleteIfThere(ctx, broker, m, client.Preconditions{UID: &m.UID, ResourceVersion: &m.ResourceVersion})
		if err != nil && !apierrors.IsConflict(err) { // a cluster joins with that id right now
			return err
		}
	}
	return nil
}
