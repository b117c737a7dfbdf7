package controller

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/certs"
)

// A GatewayNode has the expiry of the agent's certificate, and a condition that is False once less than a quarter of its lifetime
// is left. Nothing is written while neither changes.
func TestCertificateOfGateway(t *testing.T) {
	w := newTestbed(t)
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	year := certs.Validity{NotBefore: start, NotAfter: start.Add(400 * 24 * time.Hour)}
	w.gateways.certificates = map[string]certs.Validity{"gw1": year}
	at := func(days int) { w.now = func() time.Time { return start.Add(time.Duration(days) * 24 * time.Hour) } }
	for _, step := range []struct {
		days   int
		is     certs.Validity
		status metav1.ConditionStatus
		writes bool
	}{
		{1, year, metav1.ConditionTrue, true},
		{299, year, metav1.ConditionTrue, false},
		{301, year, metav1.ConditionFalse, true},
		{302, year, metav1.ConditionFalse, false},
		{302, certs.Validity{}, metav1.ConditionFalse, false}, // the controller has just started, and the agent does not answer
		{303, certs.Validity{NotBefore: start, NotAfter: start.Add(800 * 24 * time.Hour)}, metav1.ConditionTrue, true},
	} {
		at(step.days)
		if step.days == 1 {
			w.noError(w.Sync(t.Context()))
		}
		w.gateways.certificates["gw1"] = step.is
		before := w.writes.Load()
		w.noError(w.Refresh(t.Context()))
		s := w.gateway("gw1").Status
		c := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionCertificateUpToDate)
		if c == nil || c.Status != step.status {
			t.Fatalf("after %d days: %+v, want %s", step.days, c, step.status)
		}
		if late := strings.Contains(c.Message, "expires at 2027-02-05T00:00:00Z; renew it"); late != (c.Status == metav1.ConditionFalse) {
			t.Errorf("after %d days: %q", step.days, c.Message)
		}
		if step.is != (certs.Validity{}) && !s.CertificateNotAfter.Time.Equal(step.is.NotAfter) {
			t.Errorf("after %d days: it ends at %s", step.days, s.CertificateNotAfter)
		}
		if wrote := w.writes.Load() > before; step.days > 1 && wrote != step.writes {
			t.Errorf("after %d days: wrote %t", step.days, wrote)
		}
	}
	if c := meta.FindStatusCondition(w.gateway("gw2").Status.Conditions, v1alpha1.ConditionCertificateUpToDate); c != nil {
		t.Errorf("a gateway without a known certificate: %+v", c)
	}
}
