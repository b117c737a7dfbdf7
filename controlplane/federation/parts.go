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

// Parts returns what makes all Parts of this release, for Config.Parts. namespace is where Isthmus is installed; factor
// is that of Scaled.
func Parts(namespace string, factor float64, log *slog.Logger) func(federationv1alpha1.FederationSpec) ([]reconcile.Part, error) {
	return func(spec federationv1alpha1.FederationSpec) ([]reconcile.Part, error) {
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
		return []reconcile.Part{s, p}, nil
	}
}

// guarded returns how a Part's guard believes, its times multiplied.
func guarded[K comparable](factor float64, log *slog.Logger) withdrawal.Config[K] {
	return withdrawal.Config[K]{
		Times: withdrawal.DefaultTimes().Scale(timescale.Factor(factor)), Log: log,
		Release: "isthmusctl federation release",
	}
}
