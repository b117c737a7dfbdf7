package services

import (
	"context"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// labelMemberOf is a label in the cache alone: the federated Service of a member Service, for the index.
const labelMemberOf = "federation.isthmus.dev/member-of"

// memberOf returns the value of labelMemberOf. The name of a Service has no dot.
func memberOf(name clusterset.ServiceName) string { return name.Name + "." + name.Namespace }

// gatewayOf returns the value of labelMemberOf of a Service whose gateways balance a federated Service.
func gatewayOf(name clusterset.ServiceName) string { return memberOf(name) + "/gateway" }

// Watches is part of reconcile.Reconciler.
func (r *Reconciler) Watches() []reconcile.Watch {
	return []reconcile.Watch{
		{
			Kind: objectcache.Kind{
				Source: objectcache.Source{Object: &corev1.Service{}, Trim: r.trimService},
				Pack:   pack[corev1.Service], IndexLabel: labelMemberOf,
			},
			Keys:    r.keysOfService,
			Counted: func(o client.Object) bool { return o.GetLabels()[isthmus.LabelManagedBy] == v1alpha1.ManagedBy },
		},
		// A slice of ours follows from objects that are watched already, so it changes nothing in other members.
		{
			Kind: objectcache.Kind{
				Source: objectcache.Source{Object: &discoveryv1.EndpointSlice{}, Keep: hasService, Trim: trimSlice},
				Pack:   packSlice, IndexLabel: discoveryv1.LabelServiceName,
				Local: func(o client.Object) bool { return offers.IsOurs(o) },
			},
			Keys: r.keysOfSlice,
		},
		{Kind: objectcache.Kind{Source: objectcache.Source{Object: &corev1.Node{}, Trim: r.trimNode}}, Keys: r.keysOfNode},
		{Kind: objectcache.Kind{Source: objectcache.Source{Object: &corev1.Namespace{}, Trim: trimNamespace}}, Keys: r.keysOfNamespace},
		{Kind: objectcache.Kind{Source: objectcache.Source{Object: &v1beta1.ServiceImport{}, Trim: trimImport, Optional: true}}, Keys: r.keysOfImport},
		{
			Kind: objectcache.Kind{Source: objectcache.Source{
				Object: &isthmus.NodeReport{}, Namespace: r.isthmus, Trim: trimReport, Optional: true, SkipIfForbidden: true,
			}},
			Keys: noKeys,
		},
	}
}

func (r *Reconciler) keysOfService(from reconcile.Member, o client.Object) []reconcile.Key {
	r.vips.note(from.ID(), o)
	var keys []reconcile.Key
	own := clusterset.ServiceName{Namespace: o.GetNamespace(), Name: o.GetName()}
	name, member, err := offers.Name(o, r.system)
	if member {
		r.wanted.Store(name, true)
		keys = append(keys, keyOf(name))
	}
	if to, ok := balanced(o); ok && !member {
		if _, wanted := r.wanted.Load(to); wanted {
			keys = append(keys, keyOf(to))
		}
	}
	if _, told := o.GetAnnotations()[v1alpha1.AnnotationServiceStatus]; told && !member || err != nil {
		keys = append(keys, reconcile.Key{Kind: kindStatus, Namespace: own.Namespace, Name: own.Name})
	}
	if _, wanted := r.wanted.Load(own); wanted || offers.IsOurs(o) {
		keys = append(keys, keyOf(own)) // the federated Service, or a user's Service of the name
	}
	return keys
}

func (r *Reconciler) keysOfSlice(from reconcile.Member, o client.Object) []reconcile.Key {
	of := clusterset.ServiceName{Namespace: o.GetNamespace(), Name: o.GetLabels()[discoveryv1.LabelServiceName]}
	if offers.IsOurs(o) {
		return []reconcile.Key{keyOf(of)}
	}
	var svc corev1.Service
	if err := from.Get(context.Background(), client.ObjectKey(of), &svc); err != nil {
		return nil // the Service brings its own key when it is created
	}
	if name, member, _ := offers.Name(&svc, r.system); member {
		return []reconcile.Key{keyOf(name)}
	}
	return nil
}

// keysOfNode returns all federated Services with a member of type NodePort, or one that asks for near endpoints.
func (r *Reconciler) keysOfNode(from reconcile.Member, o client.Object) []reconcile.Key {
	r.vips.note(from.ID(), o)
	var all corev1.ServiceList
	if err := from.List(context.Background(), &all); err != nil {
		return nil // each Service brings its own key when it is read
	}
	var keys []reconcile.Key
	for i := range all.Items {
		if name, member, _ := offers.Name(&all.Items[i], r.system); member &&
			(all.Items[i].Spec.Type == corev1.ServiceTypeNodePort || all.Items[i].Spec.TrafficDistribution != nil) {
			keys = append(keys, keyOf(name))
		}
	}
	return keys
}

// keysOfNamespace returns all federated Services of a namespace, and those with member Services in one that is being deleted.
func (r *Reconciler) keysOfNamespace(from reconcile.Member, o client.Object) []reconcile.Key {
	r.endings.Note(from.ID(), o)
	var keys []reconcile.Key
	if o.GetDeletionTimestamp() != nil {
		for _, name := range r.seen.inNamespace(from.ID(), o.GetName()) {
			keys = append(keys, keyOf(name))
		}
	}
	r.wanted.Range(func(key, _ any) bool {
		if name, ok := key.(clusterset.ServiceName); ok && name.Namespace == o.GetName() {
			keys = append(keys, keyOf(name))
		}
		return true
	})
	return keys
}

func (r *Reconciler) keysOfImport(_ reconcile.Member, o client.Object) []reconcile.Key {
	own := clusterset.ServiceName{Namespace: o.GetNamespace(), Name: o.GetName()}
	if _, wanted := r.wanted.Load(own); wanted || offers.IsOurs(o) {
		return []reconcile.Key{keyOf(own)}
	}
	return nil
}

// trimService keeps only the name of a Service that is not federated, because a federated Service may need the name, and its
// ClusterIPs if one lies in the ranges of ClusterSetIPs. Member
// Services and federated Services keep their spec and the annotations that matter.
func (r *Reconciler) trimService(obj any) (any, error) {
	svc, ok := obj.(*corev1.Service)
	if !ok {
		return obj, nil
	}
	name, member, err := offers.Name(svc, r.system)
	_, told := svc.Annotations[v1alpha1.AnnotationServiceStatus]
	switch {
	case offers.IsOurs(svc):
		return svc, nil
	case member || err != nil || told:
		maps.DeleteFunc(svc.Annotations, func(key, _ string) bool {
			return !strings.HasPrefix(key, "federation.isthmus.dev/") && !strings.Contains(key, ".antreaplus.")
		})
		svc.Labels = nil
		if member {
			svc.Labels = map[string]string{labelMemberOf: memberOf(name)}
		}
		svc.OwnerReferences, svc.Finalizers = nil, nil
		return svc, nil
	case balances(svc):
		to, _ := balanced(svc)
		kept := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
			Namespace: mcs.Share(svc.Namespace), Name: svc.Name, UID: svc.UID, ResourceVersion: svc.ResourceVersion, CreationTimestamp: svc.CreationTimestamp,
			Annotations: map[string]string{v1alpha1.AnnotationServiceImport: to.Name}, Labels: map[string]string{labelMemberOf: gatewayOf(to)},
		}}
		kept.Spec.Type, kept.Spec.Ports, kept.Status.LoadBalancer = svc.Spec.Type, svc.Spec.Ports, svc.Status.LoadBalancer
		if len(r.vips.addressesOf(svc)) > 0 {
			kept.Spec.ClusterIPs = svc.Spec.ClusterIPs
		}
		return kept, nil
	default:
		kept := &corev1.Service{ObjectMeta: metav1.ObjectMeta{
			Namespace: mcs.Share(svc.Namespace), Name: svc.Name, UID: svc.UID, ResourceVersion: svc.ResourceVersion,
		}}
		if len(r.vips.addressesOf(svc)) > 0 {
			kept.Spec.ClusterIPs = svc.Spec.ClusterIPs
		}
		return kept, nil
	}
}

// hasService reports whether a slice belongs to a Service.
func hasService(o client.Object) bool { return serviceOf(o) != "" }

// serviceOf returns the Service of a slice, "" for none. A slice of ours that somebody took the label from is still that of its owner.
func serviceOf(o client.Object) string {
	if name := o.GetLabels()[discoveryv1.LabelServiceName]; name != "" || !offers.IsOurs(o) {
		return name
	}
	for _, owner := range o.GetOwnerReferences() {
		if owner.Kind == "Service" {
			return owner.Name
		}
	}
	return ""
}

// trimSlice keeps a digest of a slice of ours, and the offered content of other slices. 20 members of 500 Services have
// 200,000 slices of ours.
func trimSlice(obj any) (any, error) {
	es, ok := obj.(*discoveryv1.EndpointSlice)
	if !ok {
		return obj, nil
	}
	if !offers.IsOurs(es) {
		mcs.Trim(es)
		es.Annotations, es.OwnerReferences = nil, nil
		maps.DeleteFunc(es.Labels, func(key, _ string) bool {
			return key != discoveryv1.LabelServiceName && key != discoveryv1.LabelManagedBy
		})
		es.Labels = shared(es.Labels)
		return es, nil
	}
	if es.GenerateName != "" {
		return es, nil // trimmed already
	}
	kept := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: mcs.Share(es.Namespace), Name: mcs.Share(es.Name), UID: es.UID, ResourceVersion: es.ResourceVersion,
		GenerateName: digest(es),
		Labels:       es.Labels,
		Annotations:  way{source: es.Annotations[offers.AnnotationSource], host: es.Annotations[offers.AnnotationHost]}.annotations(),
	}}
	metav1.SetMetaDataLabel(&kept.ObjectMeta, discoveryv1.LabelServiceName, serviceOf(es)) // for the index; its digest differs
	return kept, nil
}

// digest returns the digest of a slice of ours. A trimmed slice carries it in generateName, which stored objects do not
// use.
func digest(es *discoveryv1.EndpointSlice) string {
	marks := maphash.String(seed, es.Annotations[v1alpha1.MarkCluster]+"\x00"+es.Annotations[offers.AnnotationSource]+"\x00"+es.Annotations[offers.AnnotationHost])
	return fmt.Sprintf("%x", uint64(mcs.SliceDigest(es))^marks)
}

// seed makes the digests of this process comparable with each other, and with no others.
var seed = maphash.MakeSeed()

func (r *Reconciler) trimNode(obj any) (any, error) {
	node, ok := obj.(*corev1.Node)
	if !ok {
		return obj, nil
	}
	kept := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion, DeletionTimestamp: node.DeletionTimestamp,
	}}
	if zone := node.Labels[corev1.LabelTopologyZone]; zone != "" {
		kept.Labels = shared(map[string]string{corev1.LabelTopologyZone: zone})
	}
	if len(r.vips.addressesOf(node)) > 0 {
		kept.Spec.PodCIDRs = node.Spec.PodCIDRs
	}
	kept.Status.Addresses = slices.Clone(node.Status.Addresses)
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			kept.Status.Conditions = []corev1.NodeCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	return kept, nil
}

func trimNamespace(obj any) (any, error) {
	ns, ok := obj.(*corev1.Namespace)
	if !ok {
		return obj, nil
	}
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: ns.Name, UID: ns.UID, ResourceVersion: ns.ResourceVersion, DeletionTimestamp: ns.DeletionTimestamp,
	}}, nil
}

// trimImport removes the epoch, which does not distinguish imports.
func trimImport(obj any) (any, error) {
	if si, ok := obj.(*v1beta1.ServiceImport); ok && offers.IsOurs(si) {
		delete(si.Annotations, v1alpha1.AnnotationEpoch)
	}
	return obj, nil
}

// shared returns one map for all equal maps. It must not be changed.
func shared(m map[string]string) map[string]string {
	var text strings.Builder
	for _, k := range slices.Sorted(maps.Keys(m)) {
		text.WriteString(k + "\x00" + m[k] + "\x00")
	}
	known, _ := sharedMaps.LoadOrStore(text.String(), m)
	return known.(map[string]string) //nolint:forcetypeassert // nothing else is in there
}

// sharedMaps are the results of shared: one for each name of a Service with slices, and one for each zone.
var sharedMaps sync.Map
