package membership

import (
	"context"
	"fmt"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// QuotaUse is what a member uses of one of its quotas. Of changesPerMinute that is how many of its objects changed within the
// last minute.
type QuotaUse struct {
	Kind    string `json:"kind"`
	Used    int    `json:"used"`
	Limit   int    `json:"limit"`
	Waiting int    `json:"waiting,omitempty"` // export records and EndpointSlices that wait because the limit is reached
}

// pageSize is how many objects are read from the broker at a time: those of a hostile member are large.
const pageSize = 500

// Quotas returns what each present member uses of its quotas, as the members themselves judge it.
func Quotas(ctx context.Context, broker client.Client, namespace string) (map[string][]QuotaUse, error) {
	config, err := readConfig(ctx, broker, namespace)
	if err != nil {
		return nil, err
	}
	limits := quota.Limits(config.Spec.Quotas)
	records, changes := map[string][]quota.Record{}, map[string]int{}
	lastMinute := time.Now().Add(-time.Minute)
	err = pages(ctx, broker, namespace, &v1alpha1.ExportRecordList{}, func(list *v1alpha1.ExportRecordList) {
		for i := range list.Items {
			r := &list.Items[i]
			if changedAfter(r, lastMinute) {
				changes[r.Spec.ClusterID]++
			}
			if e, _, err := mcs.ParseRecord(r); err == nil && r.Spec.WithdrawnAt == nil {
				records[r.Spec.ClusterID] = append(records[r.Spec.ClusterID], quota.RecordOf(e, r.CreationTimestamp.Time))
			}
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list export records on the broker: %w", err)
	}
	slices := map[string][]quota.Slice{}
	err = pages(ctx, broker, namespace, &discoveryv1.EndpointSliceList{}, func(list *discoveryv1.EndpointSliceList) {
		for i := range list.Items {
			p := mcs.Pack(&list.Items[i])
			slices[string(p.Owner)] = append(slices[string(p.Owner)], quota.SliceOf(p))
			if changedAfter(&list.Items[i], lastMinute) {
				changes[string(p.Owner)]++
			}
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list EndpointSlices on the broker: %w", err)
	}
	uses := map[string][]QuotaUse{}
	for _, m := range config.Spec.Members {
		v := quota.Judge(limits, records[m.ClusterID], slices[m.ClusterID])
		for _, k := range quota.Kinds() {
			uses[m.ClusterID] = append(uses[m.ClusterID], QuotaUse{string(k), v.Used.Get(k), limits.Get(k), v.Waiting[k]})
		}
		uses[m.ClusterID] = append(uses[m.ClusterID], QuotaUse{Kind: "changesPerMinute", Used: changes[m.ClusterID], Limit: quota.ChangesPerMinute(config.Spec.Quotas)})
	}
	return uses, nil
}

// changedAfter reports whether an object was written after t, on the broker's clock.
func changedAfter(obj client.Object, t time.Time) bool {
	for _, f := range obj.GetManagedFields() {
		if f.Time != nil && f.Time.After(t) {
			return true
		}
	}
	return false
}

// pages reads a list from the broker and calls visit with each page.
func pages[L client.ObjectList](ctx context.Context, broker client.Client, namespace string, list L, visit func(L)) error {
	for {
		err := broker.List(ctx, list, client.InNamespace(namespace), client.Limit(pageSize), client.Continue(list.GetContinue()))
		if err != nil {
			return err
		}
		visit(list)
		if list.GetContinue() == "" {
			return nil
		}
	}
}
