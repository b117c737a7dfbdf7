package controller

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/gateway/openstack"
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
)

func init() { metrics.Registry.MustRegister(quotaUsed, quotaLimit, servicesMapped) }

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
