package federation

import (
	"context"
	"log/slog"
	"net/netip"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/grants"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// Probe is that of services.Config.
type Probe = services.Probe

// NoProbe is a Probe that tries nothing and knows nothing.
func NoProbe(context.Context, []netip.AddrPort) liveness.Verdict { return liveness.Unknown }

// Reconcilers returns a function that makes the Reconcilers of this release, for Config.Reconcilers. namespace is the
// namespace of Isthmus, and factor that of Scaled. A nil probe tries TCP handshakes.
func Reconcilers(namespace string, factor float64, probe Probe, log *slog.Logger) func(federationv1alpha1.FederationSpec) ([]reconcile.Reconciler, error) {
	return func(spec federationv1alpha1.FederationSpec) ([]reconcile.Reconciler, error) {
		p := policies.New(policies.Config{
			Kinds: policies.Kinds(spec.Policies), Namespace: namespace, Grants: grants.New(spec), Guard: guarded[reconcile.Key](factor, log),
		})
		s, err := services.New(services.Config{
			Federation: spec, Namespace: namespace, Probe: probe, Log: log,
			Guard: guarded[clusterset.ServiceName](factor, log), Changed: p.ServiceChanged,
		})
		if err != nil {
			return nil, err
		}
		return []reconcile.Reconciler{s, p}, nil
	}
}

// guarded returns the settings of a Reconciler's withdrawal guard, with its times multiplied by factor.
func guarded[K comparable](factor float64, log *slog.Logger) withdrawal.Config[K] {
	return withdrawal.Config[K]{
		Times: withdrawal.DefaultTimes().Scale(timescale.Factor(factor)), Log: log,
		Release: "isthmusctl federation release",
	}
}
