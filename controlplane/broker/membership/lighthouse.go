package membership

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/access"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// LighthouseBridge describes the bridge between a broker of Isthmus and one of Submariner, on the same API server
// (controlplane/broker/lighthouse).
type LighthouseBridge struct {
	// Namespace is the broker of Isthmus, Lighthouse that of Submariner.
	Namespace, Lighthouse string
	// Clusters are those of Submariner to represent; nil means all that are not members of Isthmus yet. One that is a member runs
	// Lighthouse again from now on.
	Clusters []clusterset.ClusterID
	// Silence is for how long the controller of a member must not have renewed its Lease before the bridge acts for it; 0 means two
	// renewals.
	Silence time.Duration
	// Image runs the bridge as a Deployment in Namespace. With an empty one, DeployLighthouseBridge only writes its rights.
	Image string
	// PullSecrets are the names of Secrets in Namespace with which nodes pull Image: nil keeps those that there are.
	PullSecrets []string
}

// Bridged is a cluster of Submariner that the bridge represents.
type Bridged struct {
	Member *v1alpha1.Member
	// Again means that it was a member of Isthmus.
	Again bool
	Notes []string // for the administrator, one sentence each
}

// submarinerClusters is the kind with which Submariner registers its clusters on its broker.
var submarinerClusters = schema.GroupVersionKind{Group: "submariner.io", Version: "v1", Kind: "ClusterList"}

// DeployLighthouseBridge registers clusters of Submariner with the broker of Isthmus, by the addresses that they have registered with
// that of Submariner, and runs the bridge that exports for them. It continues an interrupted call, and changes nothing of Submariner.
func DeployLighthouseBridge(ctx context.Context, broker client.Client, l LighthouseBridge) ([]Bridged, error) {
	if l.Namespace == l.Lighthouse {
		return nil, fmt.Errorf("namespace %s cannot be the broker of Isthmus and that of Submariner", l.Namespace)
	}
	found, err := l.clusters(ctx, broker)
	if err != nil {
		return nil, err
	}
	var all []Bridged
	for _, c := range found {
		b, err := l.represent(ctx, broker, c)
		if err != nil {
			return all, err
		}
		all = append(all, b)
	}
	running, err := runningOn(ctx, broker, l.Namespace, v1alpha1.LighthouseBridge)
	if err != nil {
		return all, err
	}
	if err := applyAll(ctx, broker, running.keep(l.objects())); err != nil {
		return all, err
	}
	return all, l.grant(ctx, broker)
}

// submarinerCluster is a cluster that is registered with Submariner's broker.
type submarinerCluster struct {
	id                     clusterset.ClusterID
	pods, services, global []netip.Prefix
	moved                  bool // it is a member of Isthmus
}

// clusters returns the clusters to represent.
func (l LighthouseBridge) clusters(ctx context.Context, broker client.Client) ([]submarinerCluster, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(submarinerClusters)
	if err := broker.List(ctx, list, client.InNamespace(l.Lighthouse)); err != nil {
		if admin.IsAbsent(err) {
			return nil, fmt.Errorf("namespace %s is not a broker of Submariner, because the cluster has no kind clusters.submariner.io; use the kubeconfig of the cluster in which subctl deploy-broker ran", l.Lighthouse)
		}
		return nil, fmt.Errorf("list the clusters of Submariner: %w", err)
	}
	all, err := readReservations(ctx, broker, l.Namespace)
	if err != nil {
		return nil, err
	}
	var found []submarinerCluster
	var errs []error
	for i := range list.Items {
		c, err := parseSubmariner(&list.Items[i])
		own := all.own(string(c.id))
		c.moved = own != nil && own.registered && !own.bridged
		if l.Clusters == nil && c.moved || l.Clusters != nil && !slices.Contains(l.Clusters, c.id) {
			continue
		}
		if err == nil && len(c.global) > 0 {
			err = fmt.Errorf("cluster %s of Submariner uses Globalnet (field global_cidr), which the bridge does not translate", c.id)
		}
		errs = append(errs, err)
		found = append(found, c)
	}
	for _, id := range l.Clusters {
		if !slices.ContainsFunc(found, func(c submarinerCluster) bool { return c.id == id }) {
			errs = append(errs, fmt.Errorf("Submariner's broker, namespace %s, has no cluster %s", l.Lighthouse, id)) //nolint:staticcheck // a name
		}
	}
	return found, errors.Join(errs...)
}

// parseSubmariner reads a registration with Submariner (pkg/apis/submariner.io/v1, ClusterSpec).
func parseSubmariner(u *unstructured.Unstructured) (submarinerCluster, error) {
	id, _, err := unstructured.NestedString(u.Object, "spec", "cluster_id")
	c := submarinerCluster{id: clusterset.ClusterID(id)}
	errs := []error{err, c.id.Validate()}
	for _, field := range []struct {
		name string
		set  *[]netip.Prefix
	}{{"cluster_cidr", &c.pods}, {"service_cidr", &c.services}, {"global_cidr", &c.global}} {
		texts, _, err := unstructured.NestedStringSlice(u.Object, "spec", field.name)
		errs = append(errs, err)
		for _, text := range texts {
			p, err := netip.ParsePrefix(text)
			if err == nil {
				*field.set = append(*field.set, p.Masked())
			}
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return c, fmt.Errorf("cluster %s of Submariner: %w", u.GetName(), err)
	}
	return c, nil
}

// defaultSilence is a little more than two renewals of a Lease, see liveness.DefaultTimes.
const defaultSilence = 11 * time.Second

// errStillRuns means that the controller of a member renews its Lease.
var errStillRuns = errors.New("its isthmus-controller still runs")

// awaitSilence waits until the Lease of a member has not been renewed for l.Silence, for three times as long. Two that act for one
// cluster would overwrite each other.
func (l LighthouseBridge) awaitSilence(ctx context.Context, broker client.Client, id string) error {
	silence := cmp.Or(l.Silence, defaultSilence)
	var renewed metav1.MicroTime
	since := time.Now()
	for limit := since.Add(3 * silence); ; {
		lease := &coordinationv1.Lease{}
		err := broker.Get(ctx, client.ObjectKey{Namespace: l.Namespace, Name: v1alpha1.MemberLease(id)}, lease)
		switch {
		case apierrors.IsNotFound(err) || err == nil && lease.Spec.RenewTime == nil:
			return nil
		case err != nil:
			return fmt.Errorf("read the Lease of cluster %s: %w", id, err)
		case !lease.Spec.RenewTime.Equal(&renewed):
			renewed, since = *lease.Spec.RenewTime, time.Now()
		}
		now := time.Now()
		if now.Sub(since) >= silence || now.Sub(renewed.Time) >= max(10*silence, time.Minute) {
			return nil
		}
		if now.After(limit) {
			return fmt.Errorf("cluster %s: %w, and renewed its Lease at %s; stop it: kubectl -n %s scale deployment isthmus-controller --replicas 0", id, errStillRuns, renewed.UTC().Format(time.RFC3339), v1alpha1.DefaultNamespace)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(silence / 10):
		}
	}
}

// represent registers a cluster as a member that the bridge acts for.
func (l LighthouseBridge) represent(ctx context.Context, broker client.Client, c submarinerCluster) (Bridged, error) {
	id := string(c.id)
	if c.moved {
		if err := l.awaitSilence(ctx, broker, id); err != nil {
			return Bridged{}, err
		}
	}
	var b Bridged
	m, err := register(ctx, broker, l.Namespace, id, func(all *reservations) (*v1alpha1.Member, error) {
		b = Bridged{}
		uid := ""
		if own := all.own(id); own != nil {
			uid, b.Again = own.ClusterUID, own.registered && !own.bridged
		}
		r := Request{ClusterID: c.id, Broker: BrokerInfo{Namespace: l.Namespace}, Addresses: Addresses{Pods: c.pods, Services: c.services}}
		j, err := r.decide(all, uid, discovery{})
		if err != nil {
			return nil, err
		}
		b.Notes = j.Notes
		// The join of the cluster itself discovers its addresses again.
		delete(j.Member.Annotations, annotationGiven)
		j.Member.Annotations[v1alpha1.AnnotationBridge] = v1alpha1.BridgeLighthouse
		return j.Member, nil
	}, func(credential string) error { return grantRights(ctx, broker, l.Namespace, id, credential) })
	b.Member = m
	return b, err
}

// objects returns the account of the bridge, its rights, and the Deployment if there is an image.
func (l LighthouseBridge) objects() []client.Object {
	meta := metav1.ObjectMeta{Namespace: l.Namespace, Name: v1alpha1.LighthouseBridge, Labels: admin.Ours()}
	bound := binding(l.Lighthouse, v1alpha1.LighthouseBridge, v1alpha1.LighthouseBridge, v1alpha1.LighthouseBridge)
	bound.Subjects[0].Namespace = l.Namespace
	objects := []client.Object{
		&corev1.ServiceAccount{ObjectMeta: meta},
		binding(l.Namespace, v1alpha1.LighthouseBridge, v1alpha1.LighthouseBridge, v1alpha1.LighthouseBridge),
		&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: l.Lighthouse, Name: v1alpha1.LighthouseBridge, Labels: admin.Ours()}, Rules: access.LighthouseRules()},
		bound,
		reviews(l.Namespace, "lighthouse-bridge", v1alpha1.LighthouseBridge),
	}
	if l.Image != "" {
		d := brokerDeployment(meta, l.Image, l.PullSecrets, "bridge", "--lighthouse-bridge="+l.Lighthouse)
		objects = append(objects, d)
	}
	return objects
}

// grant lets the bridge act for all clusters that it represents.
func (l LighthouseBridge) grant(ctx context.Context, broker client.Client) error {
	role, err := l.rights(ctx, broker)
	if err != nil {
		return err
	}
	return admin.Apply(ctx, broker, role)
}

// rights returns the Role of grant.
func (l LighthouseBridge) rights(ctx context.Context, broker client.Client) (client.Object, error) {
	accounts, err := bridged(ctx, broker, l.Namespace)
	if err != nil {
		return nil, err
	}
	for i, id := range accounts {
		accounts[i] = v1alpha1.MemberAccount(id)
	}
	return &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Namespace: l.Namespace, Name: v1alpha1.LighthouseBridge, Labels: admin.Ours()},
		Rules:      access.BridgeRules(accounts),
	}, nil
}

// bridged returns the clusters that the bridge represents.
func bridged(ctx context.Context, broker client.Client, namespace string) (ids []string, err error) {
	members := &v1alpha1.MemberList{}
	if err := broker.List(ctx, members, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list members on the broker: %w", err)
	}
	for _, m := range members.Items {
		if m.IsBridged() {
			ids = append(ids, m.Name)
		}
	}
	return ids, nil
}

// RemoveLighthouseBridge stops the bridge and removes its rights. It refuses while the bridge represents a cluster.
func RemoveLighthouseBridge(ctx context.Context, broker client.Client, namespace, lighthouse string) error {
	ids, err := bridged(ctx, broker, namespace)
	if err != nil {
		return err
	}
	if len(ids) > 0 {
		return fmt.Errorf("clusters %s still run Lighthouse; let each of them join first, or leave: isthmusctl leave --force ID", strings.Join(ids, ", "))
	}
	meta := metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.LighthouseBridge}
	there := metav1.ObjectMeta{Namespace: lighthouse, Name: v1alpha1.LighthouseBridge}
	for _, obj := range []client.Object{
		&appsv1.Deployment{ObjectMeta: meta}, &rbacv1.RoleBinding{ObjectMeta: there}, &rbacv1.Role{ObjectMeta: there},
		&rbacv1.RoleBinding{ObjectMeta: meta}, &rbacv1.Role{ObjectMeta: meta}, reviews(namespace, "lighthouse-bridge", v1alpha1.LighthouseBridge),
		&corev1.ServiceAccount{ObjectMeta: meta}, &coordinationv1.Lease{ObjectMeta: meta},
	} {
		if err := admin.DeleteIfThere(ctx, broker, obj, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
			return err
		}
	}
	return nil
}

// annotationAged begins the annotations by which Lighthouse remembers the ages of exports on a ServiceImport.
const annotationAged = "timestamp.submariner.io/"

// AdoptImports lets Isthmus take over the ServiceImports of a cluster that its Lighthouse has written, and returns their names. Stop
// lighthouse-agent before. Their EndpointSlices of Lighthouse stay, so that its name server answers as before.
func AdoptImports(ctx context.Context, member client.Client) (adopted []clusterset.ServiceName, err error) {
	imports := &mcsv1beta1.ServiceImportList{}
	if err := member.List(ctx, imports); err != nil {
		return nil, fmt.Errorf("list ServiceImports: %w", err)
	}
	imported, err := lighthouseServices(ctx, member)
	if err != nil {
		return nil, err
	}
	for i := range imports.Items {
		si := &imports.Items[i]
		name := clusterset.ServiceName{Namespace: si.Namespace, Name: si.Name}
		if !IsOfLighthouse(si) && (!imported[name] || isOurs(si) || IsCopy(si)) {
			continue
		}
		before := si.DeepCopy()
		metav1.SetMetaDataLabel(&si.ObjectMeta, v1alpha1.LabelManagedBy, v1alpha1.ManagedBy)
		if err := member.Patch(ctx, si, client.MergeFrom(before), admin.FieldOwner); err != nil {
			return adopted, fmt.Errorf("take over ServiceImport %s/%s: %w", si.Namespace, si.Name, err)
		}
		adopted = append(adopted, name)
	}
	slices.SortFunc(adopted, clusterset.ServiceName.Compare)
	return adopted, nil
}

// lighthouseServices returns the Services of which a member has EndpointSlices of Lighthouse. Before version 0.19 nothing else tells
// that Lighthouse wrote their ServiceImports.
func lighthouseServices(ctx context.Context, member client.Client) (map[clusterset.ServiceName]bool, error) {
	all := &discoveryv1.EndpointSliceList{}
	if err := member.List(ctx, all, client.MatchingLabels{discoveryv1.LabelManagedBy: "lighthouse-agent.submariner.io"}); err != nil {
		return nil, fmt.Errorf("list the EndpointSlices of Lighthouse: %w", err)
	}
	found := map[clusterset.ServiceName]bool{}
	for _, es := range all.Items {
		if es.Namespace == es.Labels["lighthouse.submariner.io/sourceNamespace"] {
			found[clusterset.ServiceName{Namespace: es.Namespace, Name: es.Labels[mcsv1beta1.LabelServiceName]}] = true
		}
	}
	return found, nil
}

func isOurs(si *mcsv1beta1.ServiceImport) bool {
	return si.Labels[v1alpha1.LabelManagedBy] == v1alpha1.ManagedBy
}

// IsCopy reports whether a ServiceImport says which Service it is about, so that it is not the import itself.
func IsCopy(si *mcsv1beta1.ServiceImport) bool {
	_, labelled := si.Labels[mcsv1beta1.LabelServiceName]
	_, annotated := si.Annotations[mcsv1beta1.LabelServiceName]
	return labelled || annotated
}

// IsOfLighthouse reports whether Lighthouse imported a ServiceImport of a member. Those of its own cluster, in the namespace of
// Submariner, and those of a broker in the same cluster are copies.
func IsOfLighthouse(si *mcsv1beta1.ServiceImport) bool {
	if IsCopy(si) || isOurs(si) {
		return false
	}
	for key := range si.Annotations {
		if strings.HasPrefix(key, annotationAged) {
			return true
		}
	}
	return false
}
