package controller

import (
	"context"
	"sync/atomic"

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
	servicesWaiting = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "isthmus_gateway_services_waiting", Help: "Services without an address that wait for OpenStack.",
	})
	cloudWork = &cloudWorkAge{desc: prometheus.NewDesc(
		"isthmus_gateway_cloud_work_age_seconds", "Time for which calls to OpenStack have been outstanding or failing, by kind of object; 0: none.", []string{"calls"}, nil,
	)}
)

func init() {
	metrics.Registry.MustRegister(quotaUsed, quotaLimit, servicesMapped, servicesRefused, servicesWaiting, cloudWork)
}

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

// cloudWorkAge exports the ages of the lanes' work.
type cloudWorkAge struct {
	desc *prometheus.Desc
	of   atomic.Pointer[lanes]
}

// Describe implements prometheus.Collector.
func (c *cloudWorkAge) Describe(to chan<- *prometheus.Desc) { to <- c.desc }

// Collect implements prometheus.Collector.
func (c *cloudWorkAge) Collect(to chan<- prometheus.Metric) {
	of := c.of.Load()
	if of == nil {
		return // another replica leads
	}
	for kind, age := range of.ages() {
		to <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, age.Seconds(), kind)
	}
}

// readQuota exports the usage and the limits of the project.
func readQuota(ctx context.Context, c Cloud) error {
	q, err := c.Quota(ctx)
	if err != nil {
		return err
	}
	for resource, use := range map[string]openstack.Use{"port": q.Ports, "floatingip": q.FloatingIPs} {
		quotaUsed.WithLabelValues(resource).Set(float64(use.Used))
		quotaLimit.WithLabelValues(resource).Set(float64(use.Limit))
	}
	return nil
}
