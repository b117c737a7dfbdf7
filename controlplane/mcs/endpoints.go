package mcs

import (
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// BrokerSlice returns a member's EndpointSlice as an object of the broker, without a namespace. It keeps addresses,
// conditions, hostname, node, zone and hints. For the DNS of a headless Service it keeps the names of pods without a
// hostname; it drops other references to objects of the member.
func BrokerSlice(source *discoveryv1.EndpointSlice, cluster clusterset.ClusterID) *discoveryv1.EndpointSlice {
	name := clusterset.ServiceName{Namespace: source.Namespace, Name: source.Labels[discoveryv1.LabelServiceName]}
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name:   BrokerSliceName(cluster, name, source.Name, source.AddressType),
			Labels: withManagedBy(ownerLabels(cluster, name)),
		},
		AddressType: source.AddressType,
		Endpoints:   portable(source.Endpoints, hasLabel(source, corev1.IsHeadlessService)),
		Ports:       slices.Clone(source.Ports),
	}
}

// ServiceSlices returns slices of the broker, without a namespace, whose only endpoint is an address of svc itself, one slice
// per family. They serve clusters that cannot reach pods. ready tells whether svc has a ready pod; if not, the slices are
// empty.
func ServiceSlices(svc *corev1.Service, ready bool, cluster clusterset.ClusterID) []*discoveryv1.EndpointSlice {
	name := clusterset.ServiceName{Namespace: svc.Namespace, Name: svc.Name}
	var ports []discoveryv1.EndpointPort
	for _, p := range svc.Spec.Ports {
		ports = append(ports, discoveryv1.EndpointPort{Name: new(p.Name), Protocol: new(p.Protocol), Port: new(p.Port), AppProtocol: p.AppProtocol})
	}
	var all []*discoveryv1.EndpointSlice
	for _, text := range svc.Spec.ClusterIPs {
		a, err := netip.ParseAddr(text)
		if err != nil {
			continue // None
		}
		t := discoveryv1.AddressTypeIPv4
		if clusterset.FamilyOf(a) == clusterset.IPv6 {
			t = discoveryv1.AddressTypeIPv6
		}
		es := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name:   BrokerSliceName(cluster, name, serviceSource, t),
				Labels: withManagedBy(ownerLabels(cluster, name)),
			},
			AddressType: t,
			Endpoints:   []discoveryv1.Endpoint{},
			Ports:       ports,
		}
		if ready {
			es.Endpoints = []discoveryv1.Endpoint{{
				Addresses:  []string{text},
				Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			}}
		}
		all = append(all, es)
	}
	return all
}

// IsServiceSlice reports whether ServiceSlices made a slice of the broker.
func IsServiceSlice(es *discoveryv1.EndpointSlice, cluster clusterset.ClusterID, name clusterset.ServiceName) bool {
	return es.Name == BrokerSliceName(cluster, name, serviceSource, es.AddressType)
}

// serviceSource is the source name of a slice without a source. No EndpointSlice can have this name.
const serviceSource = "<service>"

// AnyReady reports whether any endpoint of slices is ready.
func AnyReady(slices []discoveryv1.EndpointSlice) bool {
	for i := range slices {
		for _, e := range slices[i].Endpoints {
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				return true
			}
		}
	}
	return false
}

// Vet removes from es every endpoint with an address for which check returns an error, and returns those errors.
func Vet(es *discoveryv1.EndpointSlice, check func(netip.Addr) error) []error {
	var refused []error
	es.Endpoints = slices.DeleteFunc(es.Endpoints, func(e discoveryv1.Endpoint) bool {
		bad := false
		for _, text := range e.Addresses {
			a, err := netip.ParseAddr(text)
			if err == nil {
				err = check(a)
			}
			if err != nil {
				refused = append(refused, err)
				bad = true
			}
		}
		return bad
	})
	if es.Endpoints == nil {
		es.Endpoints = []discoveryv1.Endpoint{} // the API requires the field
	}
	return refused
}

// ChangedAt returns the beginning of the change that obj carries, on the clock of its member, and whether it is known.
func ChangedAt(obj metav1.Object) (time.Time, bool) {
	ns, err := strconv.ParseInt(obj.GetAnnotations()[v1alpha1.AnnotationChangedAt], 10, 64)
	if err != nil {
		return time.Time{}, false
	}
	return time.Unix(0, ns), true
}

// ExportedAt returns the place of the export of an imported slice in the order of precedence; zero if it is unknown.
func ExportedAt(es *discoveryv1.EndpointSlice) time.Time {
	t, err := time.Parse(time.RFC3339, es.Annotations[v1alpha1.AnnotationExportedAt])
	if err != nil {
		return time.Time{}
	}
	return t
}

// SetChangedAt records the beginning of the change that obj carries.
func SetChangedAt(obj metav1.Object, t time.Time) {
	annotations := obj.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[v1alpha1.AnnotationChangedAt] = strconv.FormatInt(t.UnixNano(), 10)
	obj.SetAnnotations(annotations)
}

// ImportedSlice returns the imported form of a slice of the broker, in imp's namespace and without an owner. from is the
// export of the slice's member: the slice keeps only ports of imp that the member exposes (KEP-1645, "Service Port": no
// traffic for a port to a Service that does not expose it). It keeps the regions of its zones. It has the labels of the
// Service, but never kubernetes.io/service-name, which would add remote pods to the cluster's own Service.
func ImportedSlice(broker *discoveryv1.EndpointSlice, imp clusterset.Import, from clusterset.Export) *discoveryv1.EndpointSlice {
	es := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: imp.Service.Namespace,
			Name:      ImportedSliceName(from.Cluster, imp.Service.Name, broker.Name),
			Labels: withManagedBy(map[string]string{
				v1beta1.LabelServiceName:   imp.Service.Name,
				v1beta1.LabelSourceCluster: string(from.Cluster),
			}),
		},
		AddressType: broker.AddressType,
		Endpoints:   portable(broker.Endpoints, imp.Type == clusterset.Headless),
	}
	maps.Copy(es.Labels, from.ServiceLabels)
	if !from.ExportedAt.IsZero() {
		metav1.SetMetaDataAnnotation(&es.ObjectMeta, v1alpha1.AnnotationExportedAt, from.ExportedAt.UTC().Format(time.RFC3339))
	}
	if changed, ok := broker.Annotations[v1alpha1.AnnotationChangedAt]; ok {
		metav1.SetMetaDataAnnotation(&es.ObjectMeta, v1alpha1.AnnotationChangedAt, changed)
	}
	if regions := regionsOf(broker); regions != (clusterset.Regions{}) {
		SetRegions(es, regions.InZone)
	}
	for _, p := range broker.Ports {
		if exposed(p, imp, from) {
			es.Ports = append(es.Ports, p)
		}
	}
	return es
}

// DropServiceLabels removes the labels of its Service from an imported slice, and reports whether it had any.
func DropServiceLabels(es *discoveryv1.EndpointSlice) (dropped bool) {
	for k := range es.Labels {
		switch k {
		case v1beta1.LabelServiceName, v1beta1.LabelSourceCluster, discoveryv1.LabelManagedBy:
		default:
			delete(es.Labels, k)
			dropped = true
		}
	}
	return dropped
}

// exposed reports whether the endpoint port belongs to a port of imp that from exposes too.
func exposed(p discoveryv1.EndpointPort, imp clusterset.Import, from clusterset.Export) bool {
	protocol, err := parseProtocol(deref(p.Protocol))
	if err != nil {
		return false
	}
	return slices.ContainsFunc(imp.Ports, func(q clusterset.Port) bool {
		return q.Name == deref(p.Name) && q.Protocol == protocol && from.Exposes(q)
	})
}

// portable returns copies of endpoints without addresses that can never be a backend, and without references that are valid
// only in their own cluster. named keeps the names of pods without a hostname.
func portable(endpoints []discoveryv1.Endpoint, named bool) []discoveryv1.Endpoint {
	kept := make([]discoveryv1.Endpoint, 0, len(endpoints)) // never nil: the API requires the field
	for i := range endpoints {
		e := endpoints[i].DeepCopy()
		e.Addresses = slices.DeleteFunc(e.Addresses, func(text string) bool {
			a, err := netip.ParseAddr(text)
			return err != nil || !clusterset.IsUnicast(a)
		})
		if len(e.Addresses) == 0 {
			continue
		}
		pod := podOf(e)
		e.TargetRef, e.DeprecatedTopology = nil, nil
		if named && pod != "" {
			e.TargetRef = &corev1.ObjectReference{Kind: kindPod, Name: pod}
		}
		kept = append(kept, *e)
	}
	return kept
}

const kindPod = "Pod"

// podOf returns the name of an endpoint's pod, "" if it is not a pod or has a hostname, which takes precedence.
func podOf(e *discoveryv1.Endpoint) string {
	if e.TargetRef == nil || e.TargetRef.Kind != kindPod || deref(e.Hostname) != "" {
		return ""
	}
	return e.TargetRef.Name
}

func hasLabel(o metav1.Object, label string) bool {
	_, has := o.GetLabels()[label]
	return has
}

// withManagedBy adds the label that marks a slice as Isthmus', so that the cluster's own EndpointSlice controllers ignore
// it.
func withManagedBy(labels map[string]string) map[string]string {
	labels[discoveryv1.LabelManagedBy] = v1alpha1.ManagedBy
	return labels
}
