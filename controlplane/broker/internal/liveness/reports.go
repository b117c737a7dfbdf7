package liveness

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Reports is evidence by what the nodes of this member have seen of another one's packets, and by a probe of our own
// where they say nothing, or nothing good. All fields are required.
//
// One node that hears from the member proves that it serves, whatever became of probes: a NetworkPolicy may stand
// between. A node that waits in vain proves nothing about others, so the probe may still save the member; if it does
// not, the member is Silent, even where the probe alone would know nothing.
type Reports struct {
	Client    client.Reader // of this member's API server; read when a member is stale, so it needs no cache
	Namespace string        // where the NodeReports are
	Probe     Evidence
	Log       *slog.Logger
}

// +kubebuilder:rbac:groups=isthmus.dev,resources=nodereports,verbs=list,namespace=isthmus-system

// Answers reads the reports, and asks Probe if no node has heard from the member.
func (r *Reports) Answers(ctx context.Context, id clusterset.ClusterID) Verdict {
	said, err := r.read(ctx, id)
	if err != nil {
		r.Log.Error("read what nodes report; nothing follows for now", "peer", string(id), "err", err)
		return Unknown
	}
	if said == Answering {
		return Answering
	}
	probed := r.Probe.Answers(ctx, id)
	if probed == Unknown {
		return said
	}
	return probed
}

// read returns what the nodes say together. A cluster that has no such reports says nothing.
func (r *Reports) read(ctx context.Context, id clusterset.ClusterID) (Verdict, error) {
	var reports v1alpha1.NodeReportList
	err := r.Client.List(ctx, &reports, client.InNamespace(r.Namespace))
	switch {
	case meta.IsNoMatchError(err), apierrors.IsNotFound(err), apierrors.IsForbidden(err):
		return Unknown, nil // definitions or rights of a version before
	case err != nil:
		return Unknown, fmt.Errorf("list NodeReports: %w", err)
	}
	said := Unknown
	for i := range reports.Items {
		spec := &reports.Items[i].Spec
		switch {
		case slices.Contains(spec.Answering, string(id)):
			return Answering, nil
		case slices.Contains(spec.Silent, string(id)):
			said = Silent
		}
	}
	return said, nil
}
