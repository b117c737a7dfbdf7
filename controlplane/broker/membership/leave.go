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

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// tombstoneLife is how long the registration of a member that left tells the others so. Whoever has been away
// for longer finds neither it nor anything else of the member.
const tombstoneLife = time.Hour

// annotationReplicas on the controller's Deployment is how many there were before the member left.
const annotationReplicas = "isthmus.dev/replicas"

// Left is what became of a Leave: how many objects went, here and on the broker.
type Left struct {
	ClusterID, ClusterSetID string
	Already                 bool // it had left before; what was still there is gone now
	Exports                 int  // the member's records on the broker that were not withdrawn before
	Aggregates              int  // those that it was taken off, or that are gone because it was the last
	Imports                 int  // ServiceImports in the member
	Notes                   []string
}

// Leave ends the membership of the cluster behind member, installed in namespace. It stops the controller,
// takes the member's rights on the broker, says there that its Services are withdrawn and that it has left,
// which the others believe at once, and removes what it had written there: its own objects, and its place on
// those that all share. In the member it removes what Isthmus imported and what join wrote; ServiceExports
// and everything that is not Isthmus's stays, and so does the broker, if that lives in the member. It may be
// cut off anywhere and is finished by doing it again. Errors: ErrNotJoined, ErrNoBroker, ErrOlderDefinitions.
func Leave(ctx context.Context, broker, member client.Client, namespace string) (Left, error) {
	var left Left
	s, err := locate(ctx, broker, member, namespace)
	if err != nil {
		return left, err
	}
	left.ClusterID, left.ClusterSetID = s.id, s.clusterSet
	if err := checkDefinitions(ctx, broker); err != nil {
		return left, err
	}
	if s.copied.Spec.LeftAt == nil { // a controller that runs elsewhere is told so, too
		s.copied.Spec.LeftAt = new(metav1.Now())
		if err := applyMember(ctx, member, s.copied); err != nil {
			return left, fmt.Errorf("in the member: %w", err)
		}
	}
	if err := stopController(ctx, member, namespace); err != nil {
		return left, err
	}
	if s.replaced {
		left.Notes = append(left.Notes, fmt.Sprintf("another cluster is member %s by now, so nothing was changed on the broker", s.id))
	} else if err := depart(ctx, broker, s.brokerNamespace, s.id, &left); err != nil {
		return left, fmt.Errorf("on the broker: %w", err)
	}
	if err := clearMember(ctx, member, namespace, s, &left); err != nil {
		return left, fmt.Errorf("in the member: %w", err)
	}
	if err := prune(ctx, broker, s.brokerNamespace, time.Now()); err != nil {
		return left, fmt.Errorf("on the broker: %w", err)
	}
	return left, nil
}

// ForceLeave ends the membership of cluster id without the cluster, because that no longer exists: it does on
// the broker what Leave does there. Should the cluster come back, its controller has no rights any more.
// Nobody under that id is ErrNoMember.
func ForceLeave(ctx context.Context, broker client.Client, namespace, id string) (Left, error) {
	left := Left{ClusterID: id}
	l, err := readLedger(ctx, broker, namespace)
	if err != nil {
		return left, err
	}
	left.ClusterSetID = l.config.Spec.ClusterSetID
	if err := checkDefinitions(ctx, broker); err != nil {
		return left, err
	}
	if l.own(id) == nil { // a join that was cut off may have got no further than its reservation
		if _, err := readMember(ctx, broker, namespace, id); err != nil {
			return left, err
		}
	}
	if err := depart(ctx, broker, namespace, id, &left); err != nil {
		return left, err
	}
	return left, prune(ctx, broker, namespace, time.Now())
}

// depart is the broker's part of leaving. First the member can write nothing any more, so nothing that follows
// is undone by its controller. Then it says what is about to happen, and does it.
func depart(ctx context.Context, broker client.Client, namespace, id string, left *Left) error {
	m, err := readMember(ctx, broker, namespace, id)
	if err != nil && !errors.Is(err, ErrNoMember) {
		return err
	}
	left.Already = m == nil || m.Spec.LeftAt != nil
	if err := closeAccount(ctx, broker, namespace, id); err != nil {
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
	if err := departSlices(ctx, broker, owned); err != nil {
		return err
	}
	if err := departAggregates(ctx, broker, namespace, id, left); err != nil {
		return err
	}
	for i := range records.Items {
		if err := admin.DeleteIfThere(ctx, broker, &records.Items[i]); err != nil {
			return err
		}
	}
	return admin.DeleteIfThere(ctx, broker, &coordinationv1.Lease{ObjectMeta: named(namespace, v1alpha1.MemberLease(id), id)})
}

// applyMember writes the whole registration of a member, so that a later join may take any of it back.
func applyMember(ctx context.Context, c client.Client, m *v1alpha1.Member) error {
	return admin.Apply(ctx, c, &v1alpha1.Member{
		ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, Labels: m.Labels, Annotations: m.Annotations},
		Spec:       m.Spec,
	})
}

// departSlices empties a member's EndpointSlices, which is how endpoints are withdrawn, and deletes them.
func departSlices(ctx context.Context, broker client.Client, owned []client.ListOption) error {
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

// departAggregates takes a member off all aggregates, and deletes those that are nobody's then. Another member
// may write them at the same time; what it wrote is looked at again.
func departAggregates(ctx context.Context, broker client.Client, namespace, id string, left *Left) error {
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
			if !listed && (len(others) > 0 || a.Annotations[v1alpha1.AnnotationAllocatedBy] != id) {
				return nil
			}
			concerned = true
			wanted := len(others) > 0
			if !wanted { // somebody may be about to list itself
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

// stopController scales the member's controller to nothing and waits until it is gone, so that it does not
// import again what is removed. There may be no Deployment, when Isthmus was uninstalled first.
func stopController(ctx context.Context, member client.Client, namespace string) error {
	d := &appsv1.Deployment{}
	key := client.ObjectKey{Namespace: namespace, Name: controllerDeployment}
	err := member.Get(ctx, key, d)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read Deployment %s: %w", key, err)
	}
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
	return admin.AwaitFor(ctx, limit, fmt.Sprintf("pods of Deployment %s still run after %s; end them, then leave again", key, limit), func() (bool, error) {
		pods := &corev1.PodList{}
		if err := member.List(ctx, pods, client.InNamespace(namespace), client.MatchingLabelsSelector{Selector: selector}); err != nil {
			return false, fmt.Errorf("list pods in namespace %s: %w", namespace, err)
		}
		return len(pods.Items) == 0, nil
	})
}

// Stopped reports whether a member's controller does not run because the cluster has left.
func Stopped(d *appsv1.Deployment) bool {
	_, stopped := d.Annotations[annotationReplicas]
	return stopped && d.Spec.Replicas != nil && *d.Spec.Replicas == 0
}

// resumeController undoes stopController, for a cluster that joins again while Isthmus is still installed.
func resumeController(ctx context.Context, member client.Client, namespace string) error {
	d := &appsv1.Deployment{}
	key := client.ObjectKey{Namespace: namespace, Name: controllerDeployment}
	if err := member.Get(ctx, key, d); err != nil {
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("read Deployment %s: %w", key, err)
	}
	was, err := strconv.ParseInt(d.Annotations[annotationReplicas], 10, 32)
	if err != nil {
		return nil //nolint:nilerr // it was not we who stopped it
	}
	if err := scale(ctx, member, d, int32(was), nil); err != nil {
		return fmt.Errorf("start Deployment %s: %w", key, err)
	}
	return nil
}

// scale sets how many pods a Deployment has, and the annotation that remembers how many it had.
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

// clearMember removes from the member what Isthmus imported and what join wrote, the copy of the registration
// last: it is by that copy that another Leave goes on.
func clearMember(ctx context.Context, member client.Client, namespace string, s site, left *Left) error {
	skip, err := brokersIn(ctx, member)
	if err != nil {
		return err
	}
	slicesHere := &discoveryv1.EndpointSliceList{}
	if err := member.List(ctx, slicesHere, client.MatchingLabels{discoveryv1.LabelManagedBy: v1alpha1.ManagedBy}); err != nil {
		return fmt.Errorf("list EndpointSlices: %w", err)
	}
	for i := range slicesHere.Items {
		if o := &slicesHere.Items[i]; !skip[o.Namespace] {
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
	if err := retireExports(ctx, member, s); err != nil {
		return err
	}
	if err := admin.DeleteOwn(ctx, member, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.BrokerSecret}}); err != nil {
		return err
	}
	if err := clearProperties(ctx, member); err != nil {
		return err
	}
	return admin.DeleteIfThere(ctx, member, s.copied)
}

// brokersIn returns the namespaces of a cluster that are brokers. What stands there belongs to all members.
func brokersIn(ctx context.Context, c client.Client) (map[string]bool, error) {
	configs := &v1alpha1.ClusterSetConfigList{}
	if err := c.List(ctx, configs); err != nil && !admin.IsAbsent(err) {
		return nil, fmt.Errorf("look for brokers: %w", err)
	}
	found := map[string]bool{}
	for _, config := range configs.Items {
		found[config.Namespace] = true
	}
	return found, nil
}

// retireExports says on all ServiceExports that they are exported no more, since no controller will.
func retireExports(ctx context.Context, member client.Client, s site) error {
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
				return nil // nobody had looked at it
			}
			ready := mcsv1beta1.NewServiceExportCondition(mcsv1beta1.ServiceExportConditionReady, metav1.ConditionFalse, mcsv1beta1.ServiceExportReasonPending,
				fmt.Sprintf("cluster %s has left ClusterSet %s; the Service is exported when the cluster joins again", s.id, s.clusterSet))
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

// prune deletes the tombstones of members that have left long ago.
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
		if err != nil && !apierrors.IsConflict(err) { // somebody joins under that id right now
			return err
		}
	}
	return nil
}
