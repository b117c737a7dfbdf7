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

// Heartbeat renews this member's Lease on the broker, which tells the other members that it is live. All fields are
// required.
type Heartbeat struct {
	Self      clusterset.ClusterID
	Client    client.Client // of the broker; its mapper knows Leases, and its reads may be stale
	Namespace string        // of the broker
	Times     Times
	// Statements returns annotations of the Lease; "" removes one, and others stay as they are. It does not block.
	Statements func() map[string]string
	Log        *slog.Logger
}

// NeedLeaderElection tells the manager that one replica renews: two would overwrite each other.
func (h *Heartbeat) NeedLeaderElection() bool { return true }

// Start renews or creates the Lease every Times.Renew until ctx ends, and always returns nil. It retries while the broker
// does not answer, and rewrites a Lease that another client changed or deleted. At the end it leaves the Lease, which
// grows old.
func (h *Heartbeat) Start(ctx context.Context) error {
	tick := time.NewTicker(h.Times.Renew)
	defer tick.Stop()
	var lease *coordinationv1.Lease // as last returned by the broker
	var logged *bool                // whether the last log line reported success
	for {
		next, err := h.renew(ctx, lease)
		lease = next
		if ctx.Err() != nil {
			return nil
		}
		if ok := err == nil; logged == nil || *logged != ok {
			logged = &ok
			if ok {
				h.Log.Info("this member renews its lease on the broker")
			} else {
				h.Log.Error("this member cannot renew its lease on the broker, so the others will treat it as stale; retrying", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// tries is how often one renewal reads the Lease again because another client wrote or deleted it meanwhile.
const tries = 3

// minTimeout is the least time for one renewal, even with a short Times.Renew: an API server may be slow.
const minTimeout = time.Second

// renew renews the Lease within Times.Renew. It starts from lease, which is nil if the state on the broker is unknown, and
// returns the Lease from which the next renewal starts.
func (h *Heartbeat) renew(ctx context.Context, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, max(h.Times.Renew, minTimeout))
	defer cancel()
	var err error
	for range tries {
		if lease, err = h.write(ctx, lease); err == nil {
			return lease, nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) && !apierrors.IsNotFound(err) {
			break
		}
		lease = nil
	}
	return nil, err
}

// write writes the Lease once, and reads it first if lease is nil.
func (h *Heartbeat) write(ctx context.Context, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
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
	for key, value := range h.Statements() {
		if value == "" {
			delete(lease.Annotations, key)
		} else {
			metav1.SetMetaDataAnnotation(&lease.ObjectMeta, key, value)
		}
	}
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

// sign sets the holder and the renewal time of lease to this member and now.
func (h *Heartbeat) sign(lease *coordinationv1.Lease) {
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
