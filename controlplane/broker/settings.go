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
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/liveness"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
)

// The profiles.
const (
	profileKEP        = "kep"
	profileLighthouse = "lighthouse"
)

// Settings are how one member behaves, where it differs from what its registration says. The zero value
// differs in nothing.
type Settings struct {
	v1alpha1.Settings

	// ClusterSetIP is enabled or disabled: whether a Service exported here gets a ClusterSetIP without asking.
	ClusterSetIP string
	// Liveness is evidence (a member is dead when its Lease is old and its endpoints do not answer, or after the
	// hard TTL) or lease (when its Lease is old).
	Liveness string
	// RestrictedNamespaces are patterns (as of path.Match) of namespaces that belong to each cluster itself.
	// Nothing is exported from them nor imported into them. None means DefaultRestrictedNamespaces; one that
	// is empty restricts nothing.
	RestrictedNamespaces []string
	// Quarantine is how long a ClusterSetIP that nobody uses any more is given to nobody else. 0 means
	// DefaultQuarantine.
	Quarantine time.Duration
	// TimeScale multiplies every Lease, time to live, window and quarantine. 0 means 1.
	TimeScale float64
}

// DefaultRestrictedNamespaces are those of Kubernetes and of OpenShift.
var DefaultRestrictedNamespaces = []string{"kube-*", "openshift", "openshift-*"}

// Validate reports everything that is wrong, by the names of the controller's flags.
func (s Settings) Validate() error {
	var errs []error
	one := func(flag, value string, of ...string) {
		if value != "" && !slices.Contains(of, value) {
			errs = append(errs, fmt.Errorf("--%s=%s is unknown; use %s or %s", flag, value, of[0], of[1]))
		}
	}
	one("profile", s.Profile, profileKEP, profileLighthouse)
	one("port-merge", s.PortMerge, "union", "intersection")
	one("type-conflict", s.TypeConflict, "merge", "exclude")
	one("endpoints", s.Endpoints, "pods", "service-vip")
	one("conflict-precedence", s.ConflictPrecedence, "export-time", "broker-time")
	one("clusterset-ip", s.ClusterSetIP, "enabled", "disabled")
	one("liveness", s.Liveness, "evidence", "lease")
	for _, p := range s.RestrictedNamespaces {
		if _, err := path.Match(p, ""); err != nil {
			errs = append(errs, fmt.Errorf("--restricted-namespaces: %q is no pattern, such as kube-*", p))
		}
	}
	if s.Quarantine < 0 {
		errs = append(errs, fmt.Errorf("--clusterset-ip-quarantine=%s is negative", s.Quarantine))
	}
	if s.TimeScale < 0 {
		errs = append(errs, fmt.Errorf("--time-scale=%v is negative; 1 is as documented, 0.1 ten times as fast", s.TimeScale))
	}
	return errors.Join(errs...)
}

// DefaultQuarantine is longer than anybody keeps a DNS answer, or uses a connection that was idle.
const DefaultQuarantine = 5 * time.Minute

// chosen is what the Settings of a member and of its registration come to.
type chosen struct {
	export     export.Settings
	brokerTime bool
	restricted []string
	mode       liveness.Mode
	times      liveness.Times
	scale      timescale.Factor
}

// choose lets s overrule what the registration says.
func (s Settings) choose(m v1alpha1.MemberSpec) chosen {
	profile := cmp.Or(s.Profile, m.Profile, profileKEP)
	lighthouse := profile == profileLighthouse
	pick := func(own, registered, kep, other string) string {
		fallback := kep
		if lighthouse {
			fallback = other
		}
		if s.Profile != "" {
			registered = "" // a profile of one's own replaces all that was registered
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
	c := chosen{scale: timescale.Factor(s.TimeScale), restricted: s.RestrictedNamespaces}
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
		// A profile without ClusterSetIPs exports Service addresses all the same, because its imports decline.
		ServiceVIP: pick(s.Endpoints, m.Endpoints, "pods", "pods") == "service-vip",
		Quarantine: s.Quarantine,
	}
	if s.Quarantine == 0 {
		c.export.Quarantine = c.scale.Of(DefaultQuarantine)
	}
	c.export.Tombstone = max(c.times.HardTTL, c.export.Quarantine)
	return c
}

// isRestricted reports whether nothing of a namespace is shared.
func (c chosen) isRestricted(namespace string) bool {
	for _, p := range c.restricted {
		if ok, err := path.Match(p, namespace); err == nil && ok {
			return true
		}
	}
	return false
}
