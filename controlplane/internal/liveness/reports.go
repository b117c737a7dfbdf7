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

// Reports is Evidence from the NodeReports of this cluster's nodes, and from a probe where no node reports an answer. All
// fields are required.
//
// A single node that receives answers proves that the member serves, even if a NetworkPolicy blocks the probe. A node
// without answers proves nothing about other nodes, so the probe may still find the member Answering; if it does not,
// the member is Silent, even where the probe alone would be Unknown.
type Reports struct {
	Client    client.Reader // of this cluster's API server; used only while a member is stale, so it needs no cache
	Namespace string        // of the NodeReports
	Probe     Evidence
	Log       *slog.Logger
}

// +kubebuilder:rbac:groups=isthmus.dev,resources=nodereports,verbs=list,namespace=isthmus-system

// Answers reads the reports, and queries Probe if no node has an answer from the member.
func (r *Reports) Answers(ctx context.Context, id clusterset.ClusterID) Verdict {
	reported, err := r.read(ctx, id)
	if err != nil {
		r.Log.Error("read NodeReports; the verdict is unknown for now", "peer", string(id), "err", err)
		return Unknown
	}
	if reported == Answering {
		return Answering
	}
	probedEndpoints := r.Probe.Answers(ctx, id)
	if probedEndpoints == Unknown {
		return reported
	}
	return probedEndpoints
}

// read combines the reports of all nodes. Without reports the verdict is Unknown.
func (r *Reports) read(ctx context.Context, id clusterset.ClusterID) (Verdict, error) {
	var reports v1alpha1.NodeReportList
	err := r.Client.List(ctx, &reports, client.InNamespace(r.Namespace))
	switch {
	case meta.IsNoMatchError(err), apierrors.IsNotFound(err), apierrors.IsForbidden(err):
		return Unknown, nil // the definitions or rights are of an older version
	case err != nil:
		return Unknown, fmt.Errorf("list NodeReports: %w", err)
	}
	verdict := Unknown
	for i := range reports.Items {
		spec := &reports.Items[i].Spec
		switch {
		case slices.Contains(spec.Answering, string(id)):
			return Answering, nil
		case slices.Contains(spec.Silent, string(id)):
			verdict = Silent
		}
	}
	return verdict, nil
}
