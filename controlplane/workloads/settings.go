package workloads

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

const (
	// DefaultPorts are the ports of a server if neither its metadata nor the settings of its cloud name any.
	DefaultPorts = "80/TCP"
	// DefaultInterval is the interval between two requests to a cloud.
	DefaultInterval = 15 * time.Second

	// SecurityGroupsPolicies applies the NetworkPolicies of a cluster to the servers of the cloud, by security groups.
	SecurityGroupsPolicies = "Policies"
	// SecurityGroupsRelease returns the servers' security groups to what they were before.
	SecurityGroupsRelease = "Release"
)

// Settings are the contents of the configuration file.
type Settings struct {
	// Clouds are the projects whose servers and load balancers may serve Services.
	Clouds []CloudSettings `json:"clouds"`
	// ExternalNodes writes an ExternalNode of Antrea for each server and ExternalWorkload.
	ExternalNodes bool `json:"externalNodes,omitempty"`
}

// CloudSettings configure one project of a cloud.
type CloudSettings struct {
	// Name is the entry of clouds.yaml for the project. It is a label of EndpointSlices, so it must be a label value.
	Name string `json:"name"`
	// LoadBalancers adds the load balancers of Octavia to the servers.
	LoadBalancers bool `json:"loadBalancers,omitempty"`
	// Namespace is the namespace of the Services of its servers and load balancers.
	Namespace string `json:"namespace"`
	// Namespaces are other namespaces that these may choose.
	Namespaces []string `json:"namespaces,omitempty"`
	// Ports are the ports of servers that name none, in the same form; empty means DefaultPorts.
	Ports string `json:"ports,omitempty"`
	// Network is the only network of servers whose addresses are used. Empty uses any network, floating addresses first.
	Network string `json:"network,omitempty"`
	// SecurityGroups is SecurityGroupsPolicies, SecurityGroupsRelease, or empty to leave the security groups of servers alone.
	SecurityGroups string `json:"securityGroups,omitempty"`
	// Interval is the interval between two requests to the cloud; empty means DefaultInterval.
	Interval metav1.Duration `json:"interval,omitzero"`
}

// Complete sets defaults and returns all faults, each with its field.
func (s *Settings) Complete() error {
	var errs []error
	names := map[string]bool{}
	for i := range s.Clouds {
		c := &s.Clouds[i]
		c.Ports, c.Interval.Duration = cmp.Or(c.Ports, DefaultPorts), cmp.Or(c.Interval.Duration, DefaultInterval)
		wrong := func(field, format string, args ...any) {
			errs = append(errs, fmt.Errorf("clouds[%d].%s: %w", i, field, fmt.Errorf(format, args...)))
		}
		switch {
		case c.Name == "" || len(validation.IsValidLabelValue(c.Name)) > 0:
			wrong("name", "%q is not a valid name; rename the entry of clouds.yaml to at most 63 letters, digits, dots and dashes", c.Name)
		case names[c.Name]:
			wrong("name", "%q is listed twice; list each project once", c.Name)
		}
		names[c.Name] = true
		for field, namespaces := range map[string][]string{"namespace": {c.Namespace}, "namespaces": c.Namespaces} {
			for _, n := range namespaces {
				if len(validation.IsDNS1123Label(n)) > 0 {
					wrong(field, "%q is not a namespace; write the namespace for the Services of its servers", n)
				}
			}
		}
		if _, err := parsePorts(c.Ports); err != nil {
			wrong("ports", "%w", err)
		}
		switch c.SecurityGroups {
		case "", SecurityGroupsPolicies, SecurityGroupsRelease:
		default:
			wrong("securityGroups", "%q is neither %s nor %s; omit it to leave security groups alone", c.SecurityGroups, SecurityGroupsPolicies, SecurityGroupsRelease)
		}
		if c.Interval.Duration < time.Second {
			wrong("interval", "%s is shorter than a second; omit it for %s", c.Interval.Duration, DefaultInterval)
		}
	}
	return errors.Join(errs...)
}
