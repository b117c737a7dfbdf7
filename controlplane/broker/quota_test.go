package broker_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// quotas sets the quotas of the ClusterSet.
func (w *testbed) quotas(q v1alpha1.Quotas) {
	w.t.Helper()
	config := &v1alpha1.ClusterSetConfig{}
	w.noError(w.broker.Get(w.t.Context(), client.ObjectKey{Namespace: w.brokerNS, Name: v1alpha1.ClusterSetConfigName}, config))
	config.Spec.Quotas = &q
	w.noError(w.broker.Update(w.t.Context(), config))
}

// Cluster a exports three Services of a quota of two. The youngest waits in every cluster, its ServiceExport names the quota
// and the remedy, and the others and those of b go on. A restart of both controllers changes nothing. The waiting export
// follows when another goes, and one more when the quota is raised.
func TestQuotaOfServices(t *testing.T) {
	w := newTestbed(t)
	w.quotas(v1alpha1.Quotas{Services: 2})
	w.run()
	for _, name := range []string{"first", "second"} {
		w.a.service(name)
		w.a.export(name)
		w.b.wants(name, helloOfA)
		w.laterThan(w.a, name)
	}
	w.a.service("third")
	w.a.export("third")
	message := w.a.condition("third", "Ready", metav1.ConditionFalse, "QuotaExceeded")
	if !strings.Contains(message, "uses 2 of its quota of 2 services") || !strings.Contains(message, "raise spec.quotas.services") {
		t.Errorf("the message is %q", message)
	}
	w.eventually(func() error {
		if reasons := w.a.eventsOn("third"); !slices.Contains(reasons, "QuotaExceeded") {
			return fmt.Errorf("events: %v", reasons)
		}
		return nil
	})
	w.b.service("fourth")
	w.b.export("fourth")
	w.b.condition("fourth", "Ready", metav1.ConditionTrue, "Exported")
	check := func() {
		t.Helper()
		for _, m := range w.both() {
			m.wants("first", helloOfA)
			m.wants("second", helloOfA)
			m.wantsNone("third")
		}
	}
	check()
	w.quiet()
	w.a.stop()
	w.b.stop()
	w.run()
	w.a.condition("third", "Ready", metav1.ConditionFalse, "QuotaExceeded")
	check()

	w.laterThan(w.a, "third")
	w.a.service("fifth")
	w.a.export("fifth")
	w.a.condition("fifth", "Ready", metav1.ConditionFalse, "QuotaExceeded")
	w.a.unexport("first")
	w.b.wants("third", helloOfA)
	w.a.condition("third", "Ready", metav1.ConditionTrue, "Exported")
	w.b.wantsNone("fifth")
	w.quotas(v1alpha1.Quotas{Services: 3})
	w.b.wants("fifth", helloOfA)
	w.a.condition("fifth", "Ready", metav1.ConditionTrue, "Exported")
}
