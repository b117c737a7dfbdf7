package workloads

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// machine is a machine or a load balancer outside of the cluster, and the Service that it serves.
type machine struct {
	source      source
	name        string
	id          string // unique in its source, or in the cluster for an ExternalWorkload
	since       time.Time
	service     clusterset.ServiceName
	byDefault   bool // nobody chose the name of the Service
	ports       []port
	refused     []string     // for the owner: what else it wants to serve, and why it does not
	addrs       []netip.Addr // at most one of each family
	ready       bool
	annotations map[string]string // for its Service
	labels      map[string]string // by which policies select it
}

// String names the machine to people.
func (m machine) String() string {
	if m.source == (source{}) {
		return m.source.noun() + " " + m.id
	}
	return fmt.Sprintf("%s %s (%s) of cloud %s", m.source.noun(), m.name, m.id, m.source.cloud)
}

// compare orders machines by age.
func (m machine) compare(o machine) int {
	return cmp.Or(m.since.Compare(o.since), strings.Compare(m.source.String(), o.source.String()), strings.Compare(m.id, o.id))
}

// carried are the annotations that a machine may pass to its Service. They make it a member of a federated one.
var carried = []string{
	v1alpha1.AnnotationGlobalService, v1alpha1.AnnotationGlobalServiceAntreaTanzu, v1alpha1.AnnotationGlobalServiceAntrea,
	v1alpha1.AnnotationService, v1alpha1.AnnotationServiceAntreaTanzu, v1alpha1.AnnotationServiceAntrea,
	v1alpha1.AnnotationAskHostname,
}

// carry returns the labels that a Service gets as annotations.
func carry(labels map[string]string) map[string]string {
	all := map[string]string{}
	for _, key := range carried {
		if value, ok := labels[key]; ok {
			all[key] = value
		}
	}
	return all
}

// ofWorkload returns the machine of an ExternalWorkload, which the API server has validated.
func ofWorkload(w *v1alpha1.ExternalWorkload) machine {
	m := machine{
		name: w.Name, id: w.Namespace + "/" + w.Name, since: w.CreationTimestamp.Time, annotations: carry(w.Annotations), labels: policyLabels(w.Labels),
		service: clusterset.ServiceName{Namespace: w.Namespace, Name: cmp.Or(w.Spec.Service, w.Name)}, byDefault: w.Spec.Service == "",
		ready: w.Spec.Ready == nil || *w.Spec.Ready,
	}
	for _, p := range w.Spec.Ports {
		m.ports = append(m.ports, newPort(p.Name, p.Port, corev1.Protocol(p.Protocol), cmp.Or(p.TargetPort, p.Port)))
	}
	for _, text := range w.Spec.Addresses {
		if a, err := netip.ParseAddr(text); err == nil {
			m.addrs = append(m.addrs, a)
		}
	}
	return m
}

// ofResource returns the machine of a cloud's resource. ok is false if the resource asks for no Service. The error is for the
// owner of the resource.
func ofResource(r Resource, from source, c CloudSettings) (m machine, ok bool, err error) {
	name, ok := either(r.Labels, v1alpha1.MachineService, v1alpha1.MachineServiceAntrea)
	if !ok {
		return m, false, nil
	}
	m = machine{source: from, name: r.Name, id: r.ID, since: r.Created, addrs: r.Addrs, ready: r.Running, annotations: carry(r.Labels), labels: policyLabels(r.Labels)}
	m.service, m.byDefault = clusterset.ServiceName{Namespace: c.Namespace, Name: cmp.Or(name, from.labelOf(r.ID))}, name == ""
	if faults := validation.IsDNS1123Label(m.service.Name); len(faults) > 0 {
		return m, true, fmt.Errorf("%s: %q cannot name a Service (%s); write a name such as web", v1alpha1.MachineServiceAntrea, m.service.Name, strings.Join(faults, ", "))
	}
	if namespace, _ := either(r.Labels, v1alpha1.MachineNamespace, v1alpha1.MachineNamespaceAntrea); namespace != "" && namespace != c.Namespace {
		if !slices.Contains(c.Namespaces, namespace) {
			return m, true, fmt.Errorf("%s: %ss of cloud %s may not choose namespace %q; choose another, or add it to the namespaces of the cloud", v1alpha1.MachineNamespaceAntrea, from.noun(), c.Name, namespace)
		}
		m.service.Namespace = namespace
	}
	text, labelled := either(r.Labels, v1alpha1.MachinePorts, v1alpha1.MachinePortsAntrea)
	switch {
	case !from.loadBalancers:
		m.ports, err = parsePorts(cmp.Or(text, c.Ports))
	case labelled:
		err = errors.New("the ports of a load balancer are those of its listeners; remove the tag")
	default:
		m.ports, m.refused = listenerPorts(r.Listeners)
	}
	if err != nil {
		return m, true, fmt.Errorf("%s: %w", v1alpha1.MachinePortsAntrea, err)
	}
	return m, true, nil
}

// either returns the value of the first of two keys in labels.
func either(labels map[string]string, first, second string) (string, bool) {
	if value, ok := labels[first]; ok {
		return value, true
	}
	value, ok := labels[second]
	return value, ok
}

// labelOf makes the name of a Service from the ID of a resource, which no other resource of its cloud has, unlike a name. It begins
// with a letter, as Kubernetes before 1.36 requires.
func (s source) labelOf(id string) string {
	text := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(id))
	prefix := "vm-"
	if s.loadBalancers {
		prefix = "lb-"
	}
	text = prefix + text
	return strings.TrimRight(text[:min(len(text), validation.DNS1123LabelMaxLength)], "-")
}
