package membership

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// ReleaseHold requests the controller in the cluster behind member, installed in namespace, to release its holds of the
// member source. It returns the id of the cluster itself, and whether its controller reports a hold. Error:
// ErrNotJoined.
func ReleaseHold(ctx context.Context, member client.Client, namespace string, source clusterset.ClusterID, now time.Time) (self string, held bool, err error) {
	if err := source.Validate(); err != nil {
		return "", false, err
	}
	err = retry.RetryOnConflict(contention, func() error {
		m, err := ownMember(ctx, member, namespace)
		if err != nil {
			return err
		}
		self, held = m.Name, meta.IsStatusConditionTrue(m.Status.Conditions, v1alpha1.ConditionWithdrawalsHeld)
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
			"resourceVersion": m.ResourceVersion,
			"annotations":     map[string]any{v1alpha1.AnnotationReleaseHold: withdrawal.RequestRelease(m.Annotations[v1alpha1.AnnotationReleaseHold], source, now)},
		}})
		if err != nil {
			return fmt.Errorf("encode annotation: %w", err)
		}
		return member.Patch(ctx, m, client.RawPatch(types.MergePatchType, patch), admin.FieldOwner)
	})
	if err != nil {
		return "", false, fmt.Errorf("request the release of the hold on cluster %s: %w", source, err)
	}
	return self, held, nil
}
