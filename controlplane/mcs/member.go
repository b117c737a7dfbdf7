package mcs

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Member parses a registration. Its error joins all faults and names the object and each field.
func Member(m *v1alpha1.Member) (clusterset.Member, error) {
	parsed := clusterset.Member{ID: clusterset.ClusterID(m.Spec.ClusterID), JoinedAt: m.Spec.JoinTime.UTC()}
	errs := []error{parsed.ID.Validate()}
	if m.Name != m.Spec.ClusterID {
		errs = append(errs, fmt.Errorf("spec.clusterID is %q, which must be the name of the object", m.Spec.ClusterID))
	}
	parse := func(field string, texts []string) []netip.Prefix {
		prefixes, err := Prefixes(field, texts)
		errs = append(errs, err)
		return prefixes
	}
	parsed.Blocks = parse("spec.clustersetIPCIDR", m.Spec.ClusterSetIPCIDR)
	parsed.Services = parse("spec.serviceCIDRs", m.Spec.ServiceCIDRs)
	parsed.ServiceVIP = m.Spec.Endpoints == v1alpha1.EndpointsServiceVIP
	parsed.Routed = slices.Concat(
		parse("spec.podCIDRs", m.Spec.PodCIDRs), parse("spec.nodeCIDRs", m.Spec.NodeCIDRs), parse("spec.extraCIDRs", m.Spec.ExtraCIDRs))
	parsed.Supernets = parse("spec.podSupernets", m.Spec.PodSupernets)
	if m.Spec.LeftAt != nil {
		parsed.LeftAt = m.Spec.LeftAt.UTC()
	}
	if err := errors.Join(errs...); err != nil {
		return clusterset.Member{}, fmt.Errorf("member %s: %w", m.Name, err)
	}
	return parsed, nil
}

// Prefixes parses the texts of a field in CIDR notation. Its error names the field and each fault.
func Prefixes(field string, texts []string) ([]netip.Prefix, error) {
	var prefixes []netip.Prefix
	var errs []error
	for i, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s[%d]: %q is not a CIDR", field, i, text))
			continue
		}
		prefixes = append(prefixes, p)
	}
	return prefixes, errors.Join(errs...)
}
