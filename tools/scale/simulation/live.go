package simulation

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

const (
	// renewal is the interval at which a simulated member renews its Lease, and leaseDuration the Lease's duration.
	renewal       = 5 * time.Second
	leaseDuration = 15
	// rewatch is the delay before a watch is restarted.
	rewatch = time.Second
)

// watched lists what a member watches in the broker's namespace, with the encoding. The API server encodes an event once for
// all watches with the same encoding.
var watched = []struct{ path, accept string }{
	{"/apis/discovery.k8s.io/v1/namespaces/%s/endpointslices", "application/vnd.kubernetes.protobuf;stream=watch"},
	{"/apis/coordination.k8s.io/v1/namespaces/%s/leases", "application/vnd.kubernetes.protobuf;stream=watch"},
	{"/apis/multicluster.x-k8s.io/v1beta1/namespaces/%s/serviceimports", "application/json;stream=watch"},
	{"/apis/isthmus.dev/v1alpha1/namespaces/%s/exportrecords", "application/json;stream=watch"},
	{"/apis/isthmus.dev/v1alpha1/namespaces/%s/members", "application/json;stream=watch"},
	{"/apis/isthmus.dev/v1alpha1/namespaces/%s/clustersetconfigs", "application/json;stream=watch"},
}

// live starts the continuous work of the simulated members: Lease renewals and watches.
func (w *ClusterSet) live(ctx context.Context) error {
	for i := range w.cfg.Members {
		id := simulatedID(i)
		if err := w.renewLease(ctx, id); err != nil {
			return err
		}
		httpClient, err := rest.HTTPClientFor(w.broker.As(accountOf(id)))
		if err != nil {
			return err
		}
		for _, kind := range watched {
			url := "https://" + w.broker.Address() + fmt.Sprintf(kind.path, v1alpha1.DefaultBrokerNamespace)
			w.life.Go(func() error { return watchForEver(w.lifetime, httpClient, url, kind.accept) })
		}
	}
	return nil
}

// renewLease creates the Lease of a simulated member and renews it until Close.
func (w *ClusterSet) renewLease(ctx context.Context, id clusterset.ClusterID) error {
	c, err := newClient(w.broker.As(accountOf(id)))
	if err != nil {
		return err
	}
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: v1alpha1.DefaultBrokerNamespace, Name: v1alpha1.MemberLease(string(id)),
			Labels: map[string]string{v1alpha1.LabelCluster: string(id)},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: new(string(id)), LeaseDurationSeconds: new(int32(leaseDuration)), RenewTime: new(metav1.NowMicro())},
	}
	if err := w.onceKnown(ctx, func(ctx context.Context) error { return c.Create(ctx, lease) }); err != nil {
		return fmt.Errorf("create the Lease of %s: %w", id, err)
	}
	w.life.Go(func() error {
		tick := time.NewTicker(renewal)
		defer tick.Stop()
		for {
			select {
			case <-w.lifetime.Done():
				return nil
			case <-tick.C:
			}
			lease.Spec.RenewTime = new(metav1.NowMicro())
			if err := c.Update(w.lifetime, lease); err != nil && w.lifetime.Err() == nil {
				return fmt.Errorf("renew the Lease of %s: %w", id, err)
			}
		}
	})
	return nil
}

// watchForEver watches url until ctx ends and discards the events: only the broker's load matters.
func watchForEver(ctx context.Context, c *http.Client, url, accept string) error {
	tick := time.NewTicker(rewatch)
	defer tick.Stop()
	for ctx.Err() == nil {
		if err := watchOnce(ctx, c, url, accept); err != nil && ctx.Err() == nil {
			return fmt.Errorf("watch the broker: %w", err)
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	return nil
}

// watchOnce watches from now on until the server ends the watch.
func watchOnce(ctx context.Context, c *http.Client, url, accept string) error {
	body, err := get(ctx, c, url+"?limit=1", "application/json")
	if err != nil {
		return err
	}
	var list metav1.PartialObjectMetadataList
	err = json.NewDecoder(body).Decode(&list)
	_ = body.Close()
	if err != nil {
		return err
	}
	body, err = get(ctx, c, url+"?watch=true&allowWatchBookmarks=true&resourceVersion="+list.ResourceVersion, accept)
	if err != nil {
		return err
	}
	defer body.Close()
	_, _ = io.Copy(io.Discard, body) // the server ends the watch, or ctx does
	return nil
}

func get(ctx context.Context, c *http.Client, url, accept string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", accept)
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		_ = resp.Body.Close()
		return nil, fmt.Errorf("%s returned %s", url, resp.Status)
	}
	return resp.Body, nil
}
