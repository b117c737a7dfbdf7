package mcs

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// properties is the domain form of a ServiceImportSpec, which is part of a record (one member's export) and of a
// ServiceImport (the merged import).
type properties struct {
	typ                   clusterset.ServiceType
	ips                   []netip.Addr
	families              []clusterset.Family
	ports                 []clusterset.Port
	sessionAffinity       clusterset.SessionAffinity
	internalTrafficPolicy string
	trafficDistribution   string
}

// formatSpec returns p as a spec. Ports are never nil, because the schema requires them.
func formatSpec(p properties) v1beta1.ServiceImportSpec {
	spec := v1beta1.ServiceImportSpec{
		Type:  v1beta1.ServiceImportType(p.typ.String()),
		Ports: []v1beta1.ServicePort{},
		IPs:   formatAddrs(p.ips),
	}
	for _, f := range p.families {
		spec.IPFamilies = append(spec.IPFamilies, corev1.IPFamily(f.String()))
	}
	for _, port := range p.ports {
		spec.Ports = append(spec.Ports, v1beta1.ServicePort{
			Name:        port.Name,
			Protocol:    corev1.Protocol(port.Protocol.String()),
			AppProtocol: pointerUnlessEmpty(port.AppProtocol),
			Port:        int32(port.Port),
		})
	}
	spec.SessionAffinity = corev1.ServiceAffinityNone
	if p.sessionAffinity.ClientIP {
		seconds := int32(p.sessionAffinity.Timeout / time.Second)
		spec.SessionAffinity = corev1.ServiceAffinityClientIP
		spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
	}
	if p.internalTrafficPolicy != "" {
		policy := corev1.ServiceInternalTrafficPolicy(p.internalTrafficPolicy)
		spec.InternalTrafficPolicy = &policy
	}
	spec.TrafficDistribution = pointerUnlessEmpty(p.trafficDistribution)
	return spec
}

// parseSpec is the inverse of formatSpec. Its error joins all faults; each begins with at and the field.
func parseSpec(at string, spec *v1beta1.ServiceImportSpec) (properties, error) {
	var (
		p    properties
		errs []error
		err  error
	)
	note := func(field string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s.%s: %w", at, field, err))
		}
	}
	p.typ, err = parseType(spec.Type)
	note("type", err)
	p.ips, err = parseAddrs(spec.IPs)
	note("ips", err)
	p.families, err = parseFamilies(spec.IPFamilies)
	note("ipFamilies", err)
	if len(p.families) == 0 {
		for _, ip := range p.ips {
			p.families = append(p.families, clusterset.FamilyOf(ip))
		}
	}
	for i, port := range spec.Ports {
		q, err := parsePort(port.Name, port.Protocol, port.AppProtocol, port.Port)
		note(fmt.Sprintf("ports[%d]", i), err)
		p.ports = append(p.ports, q)
	}
	p.sessionAffinity, err = parseAffinity(spec.SessionAffinity, spec.SessionAffinityConfig)
	note("sessionAffinity", err)
	if spec.InternalTrafficPolicy != nil {
		p.internalTrafficPolicy = string(*spec.InternalTrafficPolicy)
	}
	if spec.TrafficDistribution != nil {
		p.trafficDistribution = *spec.TrafficDistribution
	}
	if len(errs) > 0 {
		return properties{}, errors.Join(errs...)
	}
	return p, nil
}

func parseType(t v1beta1.ServiceImportType) (clusterset.ServiceType, error) {
	switch t {
	case v1beta1.ClusterSetIP:
		return clusterset.ClusterSetIP, nil
	case v1beta1.Headless:
		return clusterset.Headless, nil
	default:
		return 0, fmt.Errorf("%q is neither ClusterSetIP nor Headless", string(t))
	}
}

// parseAddrs parses ClusterSetIPs: unicast, at most one per family.
func parseAddrs(ips []string) ([]netip.Addr, error) {
	var addrs []netip.Addr
	for _, ip := range ips {
		a, err := netip.ParseAddr(ip)
		if err != nil {
			return nil, fmt.Errorf("%q is not an IP address", ip)
		}
		a = a.Unmap()
		if !clusterset.IsUnicast(a) {
			return nil, fmt.Errorf("%s can never be the address of a service", ip)
		}
		if slices.ContainsFunc(addrs, func(o netip.Addr) bool { return clusterset.FamilyOf(o) == clusterset.FamilyOf(a) }) {
			return nil, fmt.Errorf("%s is a second %s address", ip, clusterset.FamilyOf(a))
		}
		addrs = append(addrs, a)
	}
	return addrs, nil
}

func formatAddrs(addrs []netip.Addr) []string {
	var ips []string
	for _, a := range addrs {
		ips = append(ips, a.String())
	}
	return ips
}

func parseFamilies(families []corev1.IPFamily) ([]clusterset.Family, error) {
	var parsed []clusterset.Family
	for _, f := range families {
		var q clusterset.Family
		switch f {
		case corev1.IPv4Protocol:
			q = clusterset.IPv4
		case corev1.IPv6Protocol:
			q = clusterset.IPv6
		default:
			return nil, fmt.Errorf("%q is neither IPv4 nor IPv6", string(f))
		}
		if slices.Contains(parsed, q) {
			return nil, fmt.Errorf("%s occurs twice", q)
		}
		parsed = append(parsed, q)
	}
	return parsed, nil
}

func parsePort(name string, protocol corev1.Protocol, appProtocol *string, number int32) (clusterset.Port, error) {
	proto, err := parseProtocol(protocol)
	if err != nil {
		return clusterset.Port{}, err
	}
	if number < 1 || number > 65535 {
		return clusterset.Port{}, fmt.Errorf("port %d is not in 1..65535", number)
	}
	if name != "" && !clusterset.IsLabel(name, maxLabel) {
		return clusterset.Port{}, fmt.Errorf("name %q is not an RFC 1123 label", shorten(name))
	}
	p := clusterset.Port{Name: name, Protocol: proto, Port: uint16(number)}
	if appProtocol != nil && *appProtocol != "" {
		if !isQualifiedName(*appProtocol) {
			return clusterset.Port{}, fmt.Errorf("appProtocol %q is not a qualified name", shorten(*appProtocol))
		}
		p.AppProtocol = *appProtocol
	}
	return p, nil
}

// parseProtocol parses a protocol; an empty one is TCP, as everywhere in the Kubernetes API.
func parseProtocol(p corev1.Protocol) (clusterset.Protocol, error) {
	switch p {
	case corev1.ProtocolTCP, "":
		return clusterset.TCP, nil
	case corev1.ProtocolUDP:
		return clusterset.UDP, nil
	case corev1.ProtocolSCTP:
		return clusterset.SCTP, nil
	default:
		return 0, fmt.Errorf("protocol %q is none of TCP, UDP and SCTP", string(p))
	}
}

// parseAffinity parses session affinity; ClientIP without a timeout has the API's default of 3 hours.
func parseAffinity(affinity corev1.ServiceAffinity, config *corev1.SessionAffinityConfig) (clusterset.SessionAffinity, error) {
	switch affinity {
	case corev1.ServiceAffinityNone, "":
		return clusterset.SessionAffinity{}, nil
	case corev1.ServiceAffinityClientIP:
	default:
		return clusterset.SessionAffinity{}, fmt.Errorf("%q is neither ClientIP nor None", string(affinity))
	}
	seconds := corev1.DefaultClientIPServiceAffinitySeconds
	if config != nil && config.ClientIP != nil && config.ClientIP.TimeoutSeconds != nil {
		seconds = *config.ClientIP.TimeoutSeconds
	}
	if seconds < 1 || seconds > 24*60*60 {
		return clusterset.SessionAffinity{}, fmt.Errorf("timeout of %d seconds is not in 1..86400", seconds)
	}
	return clusterset.SessionAffinity{ClientIP: true, Timeout: time.Duration(seconds) * time.Second}, nil
}

func pointerUnlessEmpty(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
