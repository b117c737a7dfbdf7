package controller

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/service"
)

var (
	quotaUsed = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_gateway_quota_used", Help: "Number of a resource in the OpenStack project.",
	}, []string{"resource"})
	quotaLimit = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_gateway_quota_limit", Help: "Quota of a resource in the OpenStack project; -1: no limit.",
	}, []string{"resource"})
	servicesMapped = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "isthmus_gateway_services_mapped", Help: "Services that have addresses.",
	})
	servicesRefused = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_gateway_services_refused", Help: "Services that are not served as they ask, by the reason of their condition.",
	}, []string{"reason"})
)

func init() { metrics.Registry.MustRegister(quotaUsed, quotaLimit, servicesMapped, servicesRefused) }

// countServices exports how many Services there are.
func (w *worker) countServices() {
	servicesMapped.Set(float64(len(w.services)))
	servicesRefused.Reset()
	for _, reason := range w.unmapped {
		servicesRefused.WithLabelValues(reason).Inc()
	}
	for _, v := range w.verdicts {
		if v.reason != service.ReasonApplied {
			servicesRefused.WithLabelValues(v.reason).Inc()
		}
	}
}

// readQuota exports the usage and the limits of the project.
func readQuota(ctx context.Context, c Cloud, log *slog.Logger) {
	q, err := c.Quota(ctx)
	if err != nil {
		log.Debug("cannot read the quota", "err", err)
		return
	}
	for resource, use := range map[string]openstack.Use{"port": q.Ports, "floatingip": q.FloatingIPs} {
		quotaUsed.WithLabelValues(resource).Set(float64(use.Used))
		quotaLimit.WithLabelValues(resource).Set(float64(use.Limit))
	}
}
