package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// Released is a supervisor that was asked to release a hold.
type Released struct {
	Supervisor clusterset.ClusterID `json:"supervisor"`
	Held       int64                `json:"held"` // the number of withdrawals that it held back
}

// Release asks all supervisors to accept all withdrawals of the member source that are held back. All supervisors that the
// clusters know must be given, since each decides for the members that it leads.
func Release(ctx context.Context, namespace string, clusters []Cluster, source clusterset.ClusterID, now time.Time) ([]Released, error) {
	s, err := newSurvey(ctx, namespace, clusters)
	if err != nil {
		return nil, err
	}
	if len(s.supervisors) == 0 {
		return nil, errors.New("none of the given clusters is part of a federation; give all supervisors, by --supervisor ID=CONTEXT")
	}
	if err := s.need(slices.Sorted(maps.Keys(s.supervisors)), "it decides for the members that it leads"); err != nil {
		return nil, err
	}
	if _, ok := s.members[source]; !ok {
		return nil, fmt.Errorf("cluster %s is not a member of the federation; its members are %v", source, slices.Sorted(maps.Keys(s.members)))
	}
	var released []Released
	for _, site := range s.clusters {
		if !s.supervisors[site.ID] {
			continue
		}
		done := Released{Supervisor: site.ID}
		err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			f := &federationv1alpha1.Federation{}
			if err := site.Client.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, f); err != nil {
				return err
			}
			for _, m := range f.Status.Members {
				if m.ClusterID == string(source) {
					done.Held = m.Held
				}
			}
			before := f.DeepCopy()
			if f.Annotations == nil {
				f.Annotations = map[string]string{}
			}
			f.Annotations[federationv1alpha1.AnnotationReleaseHold] = withdrawal.RequestRelease(f.Annotations[federationv1alpha1.AnnotationReleaseHold], source, now)
			return site.Client.Patch(ctx, f, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}), admin.FieldOwner)
		})
		if err != nil {
			return released, site.wrap(fmt.Errorf("release the withdrawals of cluster %s: %w", source, err))
		}
		released = append(released, done)
	}
	return released, nil
}
