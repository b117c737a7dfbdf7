package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/writers"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
)

// servicePath holds the objects of one Service of the ClusterSet on a cluster's API server.
type servicePath struct {
	key       client.ObjectKey
	cluster   string // the id of this cluster, "" if it is not a member
	served    bool   // the cluster serves the MCS API
	namespace bool   // it exists
	exported  *mcsv1beta1.ServiceExport
	imported  *mcsv1beta1.ServiceImport
	slices    []discoveryv1.EndpointSlice // of the import
}

// servicePath reads the objects of a Service.
func (c *collector) servicePath(ctx context.Context, key client.ObjectKey) (*servicePath, error) {
	r := &servicePath{key: key, served: true}
	members := &v1alpha1.MemberList{}
	err := c.client.List(ctx, members, client.InNamespace(c.namespace))
	if err != nil && !isAbsent(err) {
		return nil, fmt.Errorf("list members in namespace %s: %w", c.namespace, err)
	}
	if len(members.Items) == 1 {
		r.cluster = members.Items[0].Spec.ClusterID
	}
	if r.namespace, err = c.find(ctx, client.ObjectKey{Name: key.Namespace}, &corev1.Namespace{}); err != nil {
		return nil, err
	}
	exported, imported := &mcsv1beta1.ServiceExport{}, &mcsv1beta1.ServiceImport{}
	found, err := c.find(ctx, key, exported)
	if found {
		r.exported = exported
	}
	if err == nil {
		if found, err = c.find(ctx, key, imported); found {
			r.imported = imported
		}
	}
	if meta.IsNoMatchError(err) {
		r.served = false
		return r, nil
	}
	if err != nil {
		return nil, err
	}
	slices := &discoveryv1.EndpointSliceList{}
	err = c.client.List(ctx, slices, client.InNamespace(key.Namespace), client.MatchingLabels{mcsv1beta1.LabelServiceName: key.Name})
	if err != nil {
		return nil, fmt.Errorf("list EndpointSlices in namespace %s: %w", key.Namespace, err)
	}
	r.slices = slices.Items
	return r, nil
}

// find reads an object and returns false if it does not exist.
func (c *collector) find(ctx context.Context, key client.ObjectKey, o client.Object) (bool, error) {
	err := c.client.Get(ctx, key, o)
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case meta.IsNoMatchError(err):
		return false, err
	case err != nil:
		return false, fmt.Errorf("read %s: %w", key, err)
	}
	return true, nil
}

// links returns the links of the cluster, up to the first one on which all others depend.
func (r *servicePath) links() []status.Link {
	ok := func(link, format string, args ...any) status.Link {
		return status.Link{Link: link, State: status.LinkOK, Text: fmt.Sprintf(format, args...)}
	}
	if !r.served {
		return []status.Link{{Link: "cluster", State: status.LinkBroken, Text: "it does not serve the MCS API", Fix: "let it join: isthmusctl join"}}
	}
	if !r.namespace {
		return []status.Link{{
			Link: "namespace", State: status.LinkBroken, Text: fmt.Sprintf("this cluster has no namespace %s, so it does not import the service", r.key.Namespace),
			Fix: "create it: kubectl create namespace " + r.key.Namespace,
		}}
	}
	links := []status.Link{ok("namespace", "%s exists", r.key.Namespace), r.exportLink(), r.importLink()}
	if r.imported == nil {
		return links
	}
	if len(r.imported.Spec.IPs) > 0 {
		links = append(links, ok("ClusterSetIP", "%s", strings.Join(r.imported.Spec.IPs, " ")))
	}
	return append(links, r.endpointLink())
}

// exportLink returns the state of the export from this cluster, if there is one.
func (r *servicePath) exportLink() status.Link {
	l := status.Link{Link: "export", State: status.LinkOK}
	if r.exported == nil {
		l.State, l.Text = status.LinkNote, "not exported from this cluster"
		return l
	}
	l.Text = "exported from this cluster"
	for _, t := range []mcsv1beta1.ServiceExportConditionType{mcsv1beta1.ServiceExportConditionValid, mcsv1beta1.ServiceExportConditionReady} {
		cond := meta.FindStatusCondition(r.exported.Status.Conditions, string(t))
		switch {
		case cond == nil && r.cluster == "": // another implementation may have other conditions
		case cond == nil:
			l.State, l.Text = status.LinkBroken, fmt.Sprintf("the ServiceExport has not been processed yet: it has no condition %s", t)
			l.Fix = "check that the controller runs: isthmusctl status"
			return l
		case cond.Status != metav1.ConditionTrue:
			l.State, l.Text = status.LinkBroken, fmt.Sprintf("%s=%s, %s: %s", cond.Type, cond.Status, cond.Reason, cond.Message)
			l.Fix = fmt.Sprintf("correct the fault that the condition names, or withdraw the export: isthmusctl unexport service %s -n %s", r.key.Name, r.key.Namespace)
			return l
		case t == mcsv1beta1.ServiceExportConditionReady && cond.Message != "":
			l.Text = cond.Message
			if r.cluster != "" && cond.Reason != string(mcsv1beta1.ServiceExportReasonExported) { // a part of it is refused or waits
				l.State, l.Text = status.LinkNote, fmt.Sprintf("%s: %s", cond.Reason, cond.Message)
			}
		}
	}
	if cond := meta.FindStatusCondition(r.exported.Status.Conditions, string(mcsv1beta1.ServiceExportConditionConflict)); cond != nil && cond.Status == metav1.ConditionTrue {
		l.State, l.Text = status.LinkNote, fmt.Sprintf("%s, in conflict with others: %s", l.Text, strings.ReplaceAll(cond.Message, "\n", " "))
	}
	return l
}

// importLink returns the state of the import.
func (r *servicePath) importLink() status.Link {
	l := status.Link{Link: "import", State: status.LinkOK}
	if r.imported == nil {
		l.State = status.LinkBroken
		if r.exported == nil {
			l.Text = "it has no ServiceImport: no cluster exports the service"
			l.Fix = fmt.Sprintf("export it from a cluster with the service: isthmusctl export service %s -n %s", r.key.Name, r.key.Namespace)
		} else {
			l.Text = "it has no ServiceImport, although this cluster exports the service"
			l.Fix = "check that the controller runs and reaches the broker: isthmusctl status"
		}
		return l
	}
	var clusters []string
	for _, c := range r.imported.Status.Clusters {
		clusters = append(clusters, c.Cluster)
	}
	slices.Sort(clusters)
	l.Text = fmt.Sprintf("%s, exported by %s", r.imported.Spec.Type, list(clusters))
	if by := r.imported.Labels[v1alpha1.LabelManagedBy]; r.cluster != "" && !slices.Contains(writers.Own(), by) {
		l.State, l.Text = status.LinkBroken, fmt.Sprintf("another controller wrote the ServiceImport (label %s=%q), so no cluster is reached by it", v1alpha1.LabelManagedBy, by)
		l.Fix = fmt.Sprintf("delete it, and Isthmus imports the service: kubectl delete serviceimport %s -n %s", r.key.Name, r.key.Namespace)
		if membership.IsOfLighthouse(r.imported) {
			l.Fix = "stop lighthouse-agent, and let Isthmus take over its imports: isthmusctl lighthouse adopt"
		}
		return l
	}
	cond := meta.FindStatusCondition(r.imported.Status.Conditions, string(mcsv1beta1.ServiceImportConditionReady))
	if cond != nil && cond.Status != metav1.ConditionTrue {
		l.State, l.Text = status.LinkBroken, fmt.Sprintf("%s=%s, %s: %s", cond.Type, cond.Status, cond.Reason, cond.Message)
		l.Fix = "see the conditions of its ServiceExports in the exporting clusters"
	}
	return l
}

// endpointLink returns the state of the endpoints, by cluster.
func (r *servicePath) endpointLink() status.Link {
	by := tally(r.slices)
	for _, c := range r.imported.Status.Clusters {
		if _, ok := by[c.Cluster]; !ok {
			by[c.Cluster] = counts{}
		}
	}
	ready := 0
	for _, n := range by {
		ready += n.ready
	}
	var parts []string
	for _, id := range slices.Sorted(maps.Keys(by)) {
		parts = append(parts, fmt.Sprintf("%d of %d ready in %s", by[id].ready, by[id].all, id))
	}
	l := status.Link{Link: "endpoints", State: status.LinkOK, Text: strings.Join(parts, ", ")}
	if ready == 0 {
		l.State = status.LinkBroken
		l.Text = "none is ready"
		if len(parts) > 0 {
			l.Text += ": " + strings.Join(parts, ", ")
		}
		l.Fix = fmt.Sprintf("make its pods ready in these clusters: kubectl get pods -n %s", r.key.Namespace)
	}
	return l
}

// counts are numbers of endpoints.
type counts struct{ ready, all int }

// tally counts endpoints by source cluster. A Service with two families has each endpoint twice, so tally takes the larger
// number of the two families.
func tally(slices []discoveryv1.EndpointSlice) map[string]counts {
	type key struct {
		cluster string
		family  discoveryv1.AddressType
	}
	both := map[key]counts{}
	for _, s := range slices {
		k := key{s.Labels[mcsv1beta1.LabelSourceCluster], s.AddressType}
		n := both[k]
		for _, e := range s.Endpoints {
			n.all++
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				n.ready++
			}
		}
		both[k] = n
	}
	by := map[string]counts{}
	for k, n := range both {
		have := by[k.cluster]
		by[k.cluster] = counts{max(have.ready, n.ready), max(have.all, n.all)}
	}
	return by
}
