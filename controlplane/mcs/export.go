package mcs

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// InvalidError is the reason why a Service cannot be exported, for the condition Valid. The user must correct it; a retry
// does not help.
type InvalidError struct {
	Reason  v1beta1.ServiceExportConditionReason
	Message string
}

// Error returns the reason and the message.
func (e *InvalidError) Error() string { return string(e.Reason) + ": " + e.Message }

// Export returns cluster's export of a Service, and the labels and annotations that it omits. svc is nil if it does not
// exist. The error is an *InvalidError if the Service is missing or cannot be exported. Exported labels and annotations are
// those of the ServiceExport's spec, not of its metadata; those of the Service are separate.
func Export(svc *corev1.Service, svcExport *v1beta1.ServiceExport, cluster clusterset.ClusterID) (clusterset.Export, []Omission, error) {
	invalid := func(reason v1beta1.ServiceExportConditionReason, format string, args ...any) (clusterset.Export, []Omission, error) {
		return clusterset.Export{}, nil, &InvalidError{reason, fmt.Sprintf(format, args...)}
	}
	name := clusterset.ServiceName{Namespace: svcExport.Namespace, Name: svcExport.Name}
	if svc == nil {
		return invalid(v1beta1.ServiceExportReasonNoService,
			"namespace %[2]s has no service %[1]s; create it, or delete this export", name.Name, name.Namespace)
	}
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		return invalid(v1beta1.ServiceExportReasonInvalidServiceType,
			"a service of type ExternalName has no endpoints and cannot be exported")
	}
	if n := len(svc.Spec.Ports); n > MaxPorts {
		return invalid(ReasonTooManyPorts, "the service has %d ports; at most %d can be exported, divide it into several services", n, MaxPorts)
	}
	var omitted omissions
	e := clusterset.Export{
		Cluster:     cluster,
		Service:     name,
		ExportedAt:  svcExport.CreationTimestamp.UTC(),
		Type:        clusterset.ClusterSetIP,
		Labels:      omitted.labels("spec.exportedLabels", svcExport.Spec.ExportedLabels),
		Annotations: omitted.annotations("spec.exportedAnnotations", svcExport.Spec.ExportedAnnotations),

		ServiceLabels: omitted.serviceLabels("labels of the Service", svc.Labels),
	}
	if svc.Spec.ClusterIP == corev1.ClusterIPNone {
		e.Type = clusterset.Headless
	}
	var err error
	if e.Families, err = parseFamilies(svc.Spec.IPFamilies); err != nil {
		return clusterset.Export{}, nil, fmt.Errorf("service %s: spec.ipFamilies: %w", name, err)
	}
	for i, p := range svc.Spec.Ports {
		q, err := parsePort(p.Name, p.Protocol, p.AppProtocol, p.Port)
		if err != nil {
			return clusterset.Export{}, nil, fmt.Errorf("service %s: spec.ports[%d]: %w", name, i, err)
		}
		e.Ports = append(e.Ports, q)
	}
	if e.SessionAffinity, err = parseAffinity(svc.Spec.SessionAffinity, svc.Spec.SessionAffinityConfig); err != nil {
		return clusterset.Export{}, nil, fmt.Errorf("service %s: spec.sessionAffinity: %w", name, err)
	}
	if p := svc.Spec.InternalTrafficPolicy; p != nil {
		e.InternalTrafficPolicy = string(*p)
	}
	if d := svc.Spec.TrafficDistribution; d != nil {
		e.TrafficDistribution = *d
	}
	return e, omitted, nil
}

// Ignored returns the values of a ServiceExport, and the slices of its Service, that have no effect.
func Ignored(svcExport *v1beta1.ServiceExport, endpoints []discoveryv1.EndpointSlice) []Omission {
	var ignored omissions
	if v, ok := svcExport.Annotations[v1alpha1.AnnotationUseClusterSetIP]; ok {
		if _, err := strconv.ParseBool(v); err != nil {
			ignored.add("metadata.annotations["+v1alpha1.AnnotationUseClusterSetIP+"]", "%q is neither true nor false", shorten(v))
		}
	}
	for i := range endpoints {
		if endpoints[i].AddressType == discoveryv1.AddressTypeFQDN {
			ignored.add("EndpointSlice "+endpoints[i].Name, "addressType FQDN has host names; clusters share IPv4 and IPv6 addresses only")
		}
	}
	slices.SortFunc(ignored, func(a, b Omission) int { return strings.Compare(a.Field, b.Field) })
	return ignored
}

// WantsIP returns whether a ServiceExport requests a ClusterSetIP, by its annotation or else by the cluster's default. It is
// Unknown for a headless Service.
func WantsIP(svcExport *v1beta1.ServiceExport, t clusterset.ServiceType, enabled bool) clusterset.Choice {
	if t != clusterset.ClusterSetIP {
		return clusterset.Unknown
	}
	if asked, err := strconv.ParseBool(svcExport.Annotations[v1alpha1.AnnotationUseClusterSetIP]); err == nil {
		return clusterset.ChoiceOf(asked)
	}
	return clusterset.ChoiceOf(enabled)
}

// ExportRecord returns e as an object of the broker, without a namespace. It truncates times to seconds.
func ExportRecord(e clusterset.Export) *v1alpha1.ExportRecord {
	return &v1alpha1.ExportRecord{
		ObjectMeta: metav1.ObjectMeta{
			Name:   RecordName(e.Cluster, e.Service),
			Labels: ownerLabels(e.Cluster, e.Service),
		},
		Spec: v1alpha1.ExportRecordSpec{
			ClusterID:  string(e.Cluster),
			Namespace:  e.Service.Namespace,
			Name:       e.Service.Name,
			ExportedAt: metav1.NewTime(e.ExportedAt).Rfc3339Copy(),
			IPs:        formatAddrs(e.IPs),
			Import: formatSpec(properties{
				typ: e.Type, families: e.Families, ports: e.Ports,
				sessionAffinity: e.SessionAffinity, internalTrafficPolicy: e.InternalTrafficPolicy,
				trafficDistribution: e.TrafficDistribution,
			}),
			ExportedLabels:      maps.Clone(e.Labels),
			ExportedAnnotations: maps.Clone(e.Annotations),
			ServiceLabels:       maps.Clone(e.ServiceLabels),
			UseClusterSetIP:     formatChoice(e.WantsIP),
			AgreedClusterSetIP:  formatChoice(e.AgreedIP),
		},
	}
}

func formatChoice(c clusterset.Choice) *bool {
	if c == clusterset.Unknown {
		return nil
	}
	return new(c == clusterset.Enabled)
}

func parseChoice(enabled *bool) clusterset.Choice {
	if enabled == nil {
		return clusterset.Unknown
	}
	return clusterset.ChoiceOf(*enabled)
}

// ParseRecord is the inverse of ExportRecord. It trusts no field: it refuses a record whose name does not match its fields,
// whose owner is not its exporting member, or whose ports are not valid, with an error that names the object and the field;
// and it omits labels, annotations and policies that no import may have.
func ParseRecord(r *v1alpha1.ExportRecord) (clusterset.Export, []Omission, error) {
	fail := func(err error) (clusterset.Export, []Omission, error) {
		return clusterset.Export{}, nil, fmt.Errorf("export record %s: %w", r.Name, err)
	}
	e := clusterset.Export{
		Cluster:    clusterset.ClusterID(r.Spec.ClusterID),
		Service:    clusterset.ServiceName{Namespace: r.Spec.Namespace, Name: r.Spec.Name},
		ExportedAt: r.Spec.ExportedAt.UTC(),
		WantsIP:    parseChoice(r.Spec.UseClusterSetIP),
		AgreedIP:   parseChoice(r.Spec.AgreedClusterSetIP),
	}
	if err := e.Cluster.Validate(); err != nil {
		return fail(fmt.Errorf("spec.clusterID: %w", err))
	}
	if !clusterset.IsLabel(e.Service.Name, maxLabel) || !clusterset.IsLabel(e.Service.Namespace, maxLabel) {
		return fail(fmt.Errorf("spec.name %q and spec.namespace %q must be RFC 1123 labels", shorten(e.Service.Name), shorten(e.Service.Namespace)))
	}
	if want := RecordName(e.Cluster, e.Service); r.Name != want {
		return fail(fmt.Errorf("its name must be %s according to its spec", want))
	}
	if name, _ := ServiceOf(r); name != e.Service || OwnerOf(r) != e.Cluster {
		return fail(fmt.Errorf("the labels name service %s of %q, the spec %s of %q", name, OwnerOf(r), e.Service, e.Cluster))
	}
	if n := len(r.Spec.Import.Ports); n > MaxPorts {
		return fail(fmt.Errorf("spec.import.ports has %d entries of at most %d", n, MaxPorts))
	}
	p, err := parseSpec("spec.import", &r.Spec.Import)
	if err != nil {
		return fail(err)
	}
	if e.IPs, err = parseAddrs(r.Spec.IPs); err != nil {
		return fail(fmt.Errorf("spec.ips: %w", err))
	}
	e.Type, e.Families, e.Ports = p.typ, p.families, p.ports
	e.SessionAffinity = p.sessionAffinity
	var omitted omissions
	e.InternalTrafficPolicy = omitted.trafficPolicy("spec.import.internalTrafficPolicy", p.internalTrafficPolicy)
	e.TrafficDistribution = omitted.trafficDistribution("spec.import.trafficDistribution", p.trafficDistribution)
	e.Labels = omitted.labels("spec.exportedLabels", r.Spec.ExportedLabels)
	e.Annotations = omitted.annotations("spec.exportedAnnotations", r.Spec.ExportedAnnotations)
	e.ServiceLabels = omitted.serviceLabels("spec.serviceLabels", r.Spec.ServiceLabels)
	return e, omitted, nil
}

// trafficPolicy returns the internal traffic policy of a field; "" for one that Kubernetes does not define.
func (o *omissions) trafficPolicy(field, policy string) string {
	switch corev1.ServiceInternalTrafficPolicy(policy) {
	case "", corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal:
		return policy
	}
	o.add(field, "%q is neither Cluster nor Local", shorten(policy))
	return ""
}

// trafficDistribution returns the traffic distribution of a field; "" for one that cannot be a value. A later version of
// Kubernetes may define more of them.
func (o *omissions) trafficDistribution(field, distribution string) string {
	if distribution == "" || isQualifiedName(distribution) {
		return distribution
	}
	o.add(field, "%q is not a traffic distribution", shorten(distribution))
	return ""
}
