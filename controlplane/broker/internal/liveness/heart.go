package liveness

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Heart renews the Lease by which a member says that it lives. All fields are required.
type Heart struct {
	Self      clusterset.ClusterID
	Client    client.Client // of the broker; it knows Leases without asking, and may read from a cache that is behind
	Namespace string        // the broker's
	Times     Times
	Log       *slog.Logger
}

// NeedLeaderElection tells the manager that of several replicas one beats: two would write in turn.
func (h *Heart) NeedLeaderElection() bool { return true }

// Start renews the Lease, or creates it, every Times.Renew until ctx ends, and writes nothing else. It always
// returns nil: a broker that does not answer is asked again, and a Lease that somebody else wrote or deleted is
// written anew. What is left behind grows old, as it should: nobody beats any more.
func (h *Heart) Start(ctx context.Context) error {
	tick := time.NewTicker(h.Times.Renew)
	defer tick.Stop()
	var lease *coordinationv1.Lease // as the broker last returned it
	var said *bool                  // whether the last words were good ones
	for {
		next, err := h.beat(ctx, lease)
		lease = next
		if ctx.Err() != nil {
			return nil
		}
		if ok := err == nil; said == nil || *said != ok {
			said = &ok
			if ok {
				h.Log.Info("the lease of this member is renewed")
			} else {
				h.Log.Error("the lease of this member cannot be renewed, so others will think that it is gone; trying goes on", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// tries is how often a beat reads the Lease again because somebody else wrote or deleted it meanwhile.
const tries = 3

// shortest is how long a beat may take at least, however fast the heart: an API server takes its time.
const shortest = time.Second

// beat renews the Lease within Times.Renew. It starts from lease, which is nil when what the broker has is not
// known, and returns what the next beat starts from.
func (h *Heart) beat(ctx context.Context, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, max(h.Times.Renew, shortest))
	defer cancel()
	var err error
	for range tries {
		if lease, err = h.renew(ctx, lease); err == nil {
			return lease, nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) && !apierrors.IsNotFound(err) {
			break
		}
		lease = nil
	}
	return nil, err
}

func (h *Heart) renew(ctx context.Context, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	name := v1alpha1.MemberLease(string(h.Self))
	if lease == nil {
		lease = &coordinationv1.Lease{}
		err := h.Client.Get(ctx, client.ObjectKey{Namespace: h.Namespace, Name: name}, lease)
		if apierrors.IsNotFound(err) {
			lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: h.Namespace, Name: name}}
		} else if err != nil {
			return nil, fmt.Errorf("read lease %s: %w", name, err)
		}
	}
	h.sign(lease)
	if lease.ResourceVersion == "" {
		if err := h.Client.Create(ctx, lease); err != nil {
			return nil, fmt.Errorf("create lease %s: %w", name, err)
		}
		return lease, nil
	}
	if err := h.Client.Update(ctx, lease); err != nil {
		return nil, fmt.Errorf("renew lease %s: %w", name, err)
	}
	return lease, nil
}

// sign makes lease say that this member lives now.
func (h *Heart) sign(lease *coordinationv1.Lease) {
	now := metav1.NowMicro()
	id, seconds := string(h.Self), int32(max((h.Times.Stale+time.Second-1)/time.Second, 1))
	if lease.Labels == nil {
		lease.Labels = map[string]string{}
	}
	lease.Labels[v1alpha1.LabelCluster] = id
	if lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity != id {
		lease.Spec.AcquireTime = &now
	}
	lease.Spec.HolderIdentity = &id
	lease.Spec.LeaseDurationSeconds = &seconds
	lease.Spec.RenewTime = &now
}
