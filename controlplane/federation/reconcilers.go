package federation

import (
	"log/slog"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services"
	"github.com/isthmus-net/isthmus/controlplane/internal/timescale"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// Reconcilers returns a function that makes the Reconcilers of this release, for Config.Reconcilers. namespace is the
// namespace of Isthmus, and factor that of Scaled.
func Reconcilers(namespace string, factor float64, log *slog.Logger) func(federationv1alpha1.FederationSpec) ([]reconcile.Reconciler, error) {
	return func(spec federationv1alpha1.FederationSpec) ([]reconcile.Reconciler, error) {
		s, err := services.New(services.Config{
			Federation: spec, Log: log,
			Guard: guarded[clusterset.ServiceName](factor, log),
		})
		if err != nil {
			return nil, err
		}
		p := policies.New(policies.Config{
			Kinds: policies.Kinds(spec.Policies), Namespace: namespace, Guard: guarded[reconcile.Key](factor, log),
		})
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
