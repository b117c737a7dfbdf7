package controller

import (
	"net/http"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
)

// gauges returns the exported quota of the project, by metric and resource.
func gauges(t *testing.T) map[string]float64 {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "resource" || l.GetName() == "reason" {
					all[f.GetName()+" "+l.GetValue()] = m.GetGauge().GetValue()
				}
			}
		}
	}
	return all
}

// The metrics show the usage of the quota before it is exhausted, also while Neutron does not answer.
func TestQuotaGauges(t *testing.T) {
	w := newTestbed(t)
	w.fake.SetQuota("floatingip", 5)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", nil, 80), w.newService("b", nil, 80), w.newService("c", nil, 81))
	w.noError(w.converge())
	says := func(step string) {
		t.Helper()
		got := gauges(t)
		for what, want := range map[string]float64{ // two ports are those of the gateways
			"isthmus_gateway_quota_used port": 4, "isthmus_gateway_quota_limit port": -1, "isthmus_gateway_quota_used floatingip": 2, "isthmus_gateway_quota_limit floatingip": 5,
		} {
			if is, ok := got[what]; !ok || is != want {
				t.Errorf("%s: %s is %v, want %v", step, what, is, want)
			}
		}
	}
	w.noError(readQuota(t.Context(), w.cloud))
	says("two ports, two floating IPs")
	w.fake.SetQuota("floatingip", 2)
	w.fake.Fault = func(*http.Request) openstacktest.Fault { return openstacktest.Refuse }
	if err := readQuota(t.Context(), w.cloud); err == nil {
		t.Error("it was read without Neutron")
	}
	says("with Neutron away")
}
