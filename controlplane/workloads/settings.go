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
	// DefaultPorts are those of a server that names none, where its cloud's settings name none either.
	DefaultPorts = "80/TCP"
	// DefaultInterval is how often a cloud is asked.
	DefaultInterval = 15 * time.Second
)

// Settings are what people choose, in a file.
type Settings struct {
	// Clouds are the projects whose servers may stand behind Services.
	Clouds []CloudSettings `json:"clouds"`
}

// CloudSettings are those of one project of a cloud.
type CloudSettings struct {
	// Name is the entry of clouds.yaml that leads to the project. It stands on EndpointSlices, so it is a label value.
	Name string `json:"name"`
	// Namespace is where Services of its servers are.
	Namespace string `json:"namespace"`
	// Namespaces are others that a server may choose for its own.
	Namespaces []string `json:"namespaces,omitempty"`
	// Ports are those of servers that name none, as a server names them; empty: DefaultPorts.
	Ports string `json:"ports,omitempty"`
	// Network is the only network whose addresses count; empty: floating addresses before others, of any.
	Network string `json:"network,omitempty"`
	// Interval is how often the cloud is asked; empty: DefaultInterval.
	Interval metav1.Duration `json:"interval,omitzero"`
}

// Complete fills in what is not said and returns all that is wrong, each with its field.
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
			wrong("name", "%q is no name of a cloud; give the entry of clouds.yaml one of at most 63 letters, digits, dots and dashes", c.Name)
		case names[c.Name]:
			wrong("name", "%q is there twice; name each project once", c.Name)
		}
		names[c.Name] = true
		for field, namespaces := range map[string][]string{"namespace": {c.Namespace}, "namespaces": c.Namespaces} {
			for _, n := range namespaces {
				if len(validation.IsDNS1123Label(n)) > 0 {
					wrong(field, "%q is no namespace; name the one that Services of its servers shall be in", n)
				}
			}
		}
		if _, err := parsePorts(c.Ports); err != nil {
			wrong("ports", "%w", err)
		}
		if c.Interval.Duration < time.Second {
			wrong("interval", "%s is shorter than a second; leave it out for %s", c.Interval.Duration, DefaultInterval)
		}
	}
	return errors.Join(errs...)
}
