package quotacontroller

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

const (
	// publishInterval is the shortest time from one comparison with the quotas to the next.
	publishInterval = 200 * time.Millisecond
	// publishRetry is the delay after an error.
	publishRetry = 2 * time.Second
	// refreshInterval is the time after which changed numbers alone are written to the status.
	refreshInterval = 10 * time.Second
	// maxListed bounds status.overQuota, as its schema does.
	maxListed = 1000
)

var (
	storedGauge      = newGauge("stored", "Amount that a member has on the broker, admitted by readers or not.")
	storedLimitGauge = newGauge("stored_limit", "Limit beyond which a member creates no more objects on the broker.")
)

func newGauge(name, help string) *prometheus.GaugeVec {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "isthmus_controller_" + name, Help: help}, []string{"cluster", "kind"})
	metrics.Registry.MustRegister(g)
	return g
}

// publish lists members that are beyond their quotas in the status of the ClusterSetConfig until ctx ends.
func (c *Controller) publish(ctx context.Context) error {
	refresh := time.NewTicker(refreshInterval)
	defer refresh.Stop()
	for {
		pause, err := publishInterval, c.publishOnce(ctx, time.Now())
		c.fault.Store(&err)
		if err != nil && ctx.Err() == nil {
			c.cfg.Log.Error("members beyond their quotas are not listed yet, retrying", "err", err)
			pause = publishRetry
			c.wake.Notify()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		select {
		case <-ctx.Done():
			return nil
		case <-c.wake.C():
		case <-refresh.C:
		}
	}
}

// publishOnce writes the status if it lacks something.
func (c *Controller) publishOnce(ctx context.Context, now time.Time) error {
	config := c.config()
	if config == nil {
		return fmt.Errorf("namespace %s has no ClusterSetConfig, so it is not a broker; run isthmusctl deploy-broker", c.cfg.Namespace)
	}
	want := c.overQuota(config, now)
	have := config.Status.OverQuota
	sameSet := slices.EqualFunc(have, want, func(a, b v1alpha1.OverQuota) bool { return key(a) == key(b) && a.Limit == b.Limit })
	if sameSet && (now.Sub(c.written) < refreshInterval || slices.EqualFunc(have, want, func(a, b v1alpha1.OverQuota) bool { return a.Used == b.Used })) {
		return nil
	}
	update := config.DeepCopy()
	update.Status.OverQuota = want
	err := c.client.Status().Update(ctx, update)
	switch {
	case apierrors.IsConflict(err):
		c.wake.Notify() // the cache is about to show the newer version
		return nil
	case err != nil:
		return fmt.Errorf("write the status of ClusterSetConfig %s/%s: %w", config.Namespace, config.Name, err)
	}
	c.written = now
	c.report(config, have, want)
	return nil
}

func key(o v1alpha1.OverQuota) [2]string { return [2]string{o.Member, o.Kind} }

// overQuota returns the quotas that members exceed, and sets the metrics.
func (c *Controller) overQuota(config *v1alpha1.ClusterSetConfig, now time.Time) []v1alpha1.OverQuota {
	since := map[[2]string]metav1.Time{}
	for _, o := range config.Status.OverQuota {
		since[key(o)] = o.Since
	}
	limits := quota.StorageLimits(config.Spec.Quotas)
	var all []v1alpha1.OverQuota
	storedGauge.Reset()
	storedLimitGauge.Reset()
	for _, m := range config.Spec.Members {
		used := c.storedBy(clusterset.ClusterID(m.ClusterID))
		for _, k := range quota.StorageKinds() {
			storedGauge.WithLabelValues(m.ClusterID, string(k)).Set(float64(used.Get(k)))
			storedLimitGauge.WithLabelValues(m.ClusterID, string(k)).Set(float64(limits.Get(k)))
		}
		for _, k := range used.Over(limits, 1) {
			o := v1alpha1.OverQuota{Member: m.ClusterID, Kind: string(k), Used: int64(used.Get(k)), Limit: int64(limits.Get(k)), Since: metav1.NewTime(now)}
			if t, ok := since[key(o)]; ok {
				o.Since = t
			}
			all = append(all, o)
		}
	}
	slices.SortFunc(all, func(a, b v1alpha1.OverQuota) int {
		return cmp.Or(cmp.Compare(a.Member, b.Member), cmp.Compare(a.Kind, b.Kind))
	})
	return all[:min(len(all), maxListed)]
}

// report logs what the status lists now and did not before, and the reverse, with an event each on the ClusterSetConfig.
func (c *Controller) report(config *v1alpha1.ClusterSetConfig, have, want []v1alpha1.OverQuota) {
	lacks := func(list []v1alpha1.OverQuota, o v1alpha1.OverQuota) bool {
		return !slices.ContainsFunc(list, func(l v1alpha1.OverQuota) bool { return key(l) == key(o) })
	}
	for _, o := range want {
		if lacks(have, o) {
			c.cfg.Log.Warn("a member exceeds its quota; the broker refuses new objects of it", "cluster", o.Member, "kind", o.Kind, "used", o.Used, "limit", o.Limit)
			c.events.Eventf(config, nil, corev1.EventTypeWarning, "QuotaExceeded", "Refuse",
				"member %s has %d %s of at most %d on the broker; it creates no more of them, its updates and deletions go on", o.Member, o.Used, o.Kind, o.Limit)
		}
	}
	for _, o := range have {
		if lacks(want, o) {
			c.cfg.Log.Info("a member is within its quota again", "cluster", o.Member, "kind", o.Kind)
			c.events.Eventf(config, nil, corev1.EventTypeNormal, "WithinQuota", "Admit", "member %s is within its quota of %s again", o.Member, o.Kind)
		}
	}
}
