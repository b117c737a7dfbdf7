package broker

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/export"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
)

// The profiles.
const (
	profileKEP        = "kep"
	profileLighthouse = "lighthouse"
)

// Settings override the registration of one member. The zero value overrides nothing.
type Settings struct {
	v1alpha1.Settings

	// ClusterSetIP is enabled or disabled: whether an exported Service gets a ClusterSetIP by default.
	ClusterSetIP string
	// Liveness is evidence or lease. With evidence a member is dead when its Lease is old and its endpoints do not
	// answer, or after the hard TTL. With lease a member is dead when its Lease is old.
	Liveness string
	// RestrictedNamespaces are patterns, as of path.Match, of namespaces that are neither exported nor imported. Nil
	// means DefaultRestrictedNamespaces; an empty pattern matches no namespace.
	RestrictedNamespaces []string
	// Quarantine is how long a released ClusterSetIP is not allocated again. 0 means DefaultQuarantine.
	Quarantine time.Duration
	// TimeScale multiplies every Lease duration, TTL, window and quarantine. 0 means 1.
	TimeScale float64
}

// DefaultRestrictedNamespaces are the namespaces of Kubernetes and OpenShift.
var DefaultRestrictedNamespaces = []string{"kube-*", "openshift", "openshift-*"}

// Validate reports every fault, by the names of the controller's flags.
func (s Settings) Validate() error {
	var errs []error
	oneOf := func(flag, value string, allowed ...string) {
		if value != "" && !slices.Contains(allowed, value) {
			errs = append(errs, fmt.Errorf("--%s=%s is unknown; use %s or %s", flag, value, allowed[0], allowed[1]))
		}
	}
	oneOf("profile", s.Profile, profileKEP, profileLighthouse)
	oneOf("port-merge", s.PortMerge, "union", "intersection")
	oneOf("type-conflict", s.TypeConflict, "merge", "exclude")
	oneOf("endpoints", s.Endpoints, "pods", "service-vip")
	oneOf("conflict-precedence", s.ConflictPrecedence, "export-time", "broker-time")
	oneOf("clusterset-ip", s.ClusterSetIP, "enabled", "disabled")
	oneOf("liveness", s.Liveness, "evidence", "lease")
	for _, p := range s.RestrictedNamespaces {
		if _, err := path.Match(p, ""); err != nil {
			errs = append(errs, fmt.Errorf("--restricted-namespaces: %q is not a pattern; use one such as kube-*", p))
		}
	}
	if s.Quarantine < 0 {
		errs = append(errs, fmt.Errorf("--clusterset-ip-quarantine=%s is negative", s.Quarantine))
	}
	if s.TimeScale < 0 {
		errs = append(errs, fmt.Errorf("--time-scale=%v is negative; use 1 for the documented times, 0.1 for a tenth of them", s.TimeScale))
	}
	return errors.Join(errs...)
}

// DefaultQuarantine is longer than clients cache a DNS answer or keep an idle connection.
const DefaultQuarantine = 5 * time.Minute

// Exporting is what a program needs that exports in the place of a member's controller.
type Exporting struct {
	Exports export.Settings
	Times   liveness.Times
	// Shared reports whether a namespace is exported.
	Shared func(namespace string) bool
}

// Exporting combines s with the registration m of the member.
func (s Settings) Exporting(m v1alpha1.MemberSpec) Exporting {
	e := s.resolve(m)
	return Exporting{Exports: e.export, Times: e.times, Shared: func(namespace string) bool { return !e.isRestricted(namespace) }}
}

// effectiveSettings combine the Settings of a member with its registration.
type effectiveSettings struct {
	export     export.Settings
	brokerTime bool
	restricted []string
	mode       liveness.Mode
	times      liveness.Times
	scale      timescale.Factor
}

// resolve combines s with the registration m, which s overrides.
func (s Settings) resolve(m v1alpha1.MemberSpec) effectiveSettings {
	profile := cmp.Or(s.Profile, m.Profile, profileKEP)
	lighthouse := profile == profileLighthouse
	pick := func(own, registered, kep, other string) string {
		fallback := kep
		if lighthouse {
			fallback = other
		}
		if s.Profile != "" {
			registered = "" // a profile given here replaces the whole registration
		}
		return cmp.Or(own, registered, fallback)
	}
	useIP := m.ClusterSetIPEnabled
	if s.Profile != "" {
		useIP = !lighthouse
	}
	if s.ClusterSetIP != "" {
		useIP = s.ClusterSetIP == "enabled"
	}
	c := effectiveSettings{scale: timescale.Factor(s.TimeScale), restricted: s.RestrictedNamespaces}
	if c.restricted == nil {
		c.restricted = DefaultRestrictedNamespaces
	}
	c.times = liveness.DefaultTimes().Scale(c.scale)
	if s.Liveness == "lease" {
		c.mode = liveness.Lease
	}
	c.brokerTime = pick(s.ConflictPrecedence, m.ConflictPrecedence, "export-time", "export-time") == "broker-time"
	c.export = export.Settings{
		Policy: clusterset.Policy{
			IntersectPorts: pick(s.PortMerge, m.PortMerge, "union", "intersection") == "intersection",
			ExcludeTypes:   pick(s.TypeConflict, m.TypeConflict, "merge", "exclude") == "exclude",
		},
		UseIP: useIP,
		// A profile without ClusterSetIPs exports Service addresses all the same, because its imports decline the ClusterSetIP.
		ServiceVIP: pick(s.Endpoints, m.Endpoints, "pods", "pods") == "service-vip",
		Quarantine: s.Quarantine,
	}
	if s.Quarantine == 0 {
		c.export.Quarantine = c.scale.Scale(DefaultQuarantine)
	}
	c.export.Tombstone = max(c.times.HardTTL, c.export.Quarantine)
	return c
}

// isRestricted reports whether a namespace is neither exported nor imported.
func (c effectiveSettings) isRestricted(namespace string) bool {
	for _, p := range c.restricted {
		if ok, err := path.Match(p, namespace); err == nil && ok {
			return true
		}
	}
	return false
}
