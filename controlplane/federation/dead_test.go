package federation_test

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
	"github.com/isthmus-net/isthmus/tools/await"
)

// A cluster dies: neither its API server nor its endpoints answer. They leave the federated Services of all others, but not one that nobody
// else serves, and come back with the cluster. While its endpoints answer they stay, whatever its API server does.
func TestDeadMember(t *testing.T) {
	w := newTestbed(t)
	var down atomic.Bool // the endpoints of c
	w.probe = func(_ context.Context, endpoints []netip.AddrPort) liveness.Verdict {
		of := func(prefix string) func(netip.AddrPort) bool {
			return func(e netip.AddrPort) bool { return strings.HasPrefix(e.String(), prefix) }
		}
		if slices.ContainsFunc(endpoints, of("10.3.")) && down.Load() {
			return liveness.Silent
		}
		return liveness.Answering
	}
	w.supervise("a", "one")
	w.supervise("b", "two")
	w.offer("a", "web", "10.1.0.1")
	w.offer("c", "web", "10.3.0.1")
	w.offer("c", "alone", "10.3.0.2")
	w.awaitEverywhere("web", "10.1.0.1", "10.3.0.1")
	w.awaitEverywhere("alone", "10.3.0.2")
	times := federation.Scaled(factor).Liveness
	<-time.After(10 * federation.Scaled(factor).Probe) // until both supervisors have reached endpoints of c

	for _, gate := range []string{"a c", "b c"} {
		w.gates[gate].Shut()
	}
	await.True(t, "both supervisors report that c is unreachable", func() bool { return !w.status("a", "c").Reachable && !w.status("b", "c").Reachable })
	<-time.After(4 * times.Stale)
	for _, id := range ids[:2] {
		w.leadsTo(id, "web", "10.1.0.1", "10.3.0.1")
	}
	down.Store(true)
	began := time.Now()
	for _, id := range ids[:2] {
		w.leadsTo(id, "web", "10.1.0.1")
		w.leadsTo(id, "alone", "10.3.0.2")
	}
	t.Logf("gone after %v", time.Since(began))
	await.True(t, "the status says so", func() bool { return strings.Contains(w.status("a", "c").Message, "its endpoints do not answer either") })

	down.Store(false)
	for _, gate := range []string{"a c", "b c"} {
		w.gates[gate].Open()
	}
	w.awaitEverywhere("web", "10.1.0.1", "10.3.0.1")
	await.True(t, "the status is clean", func() bool { m := w.status("a", "c"); return m.Reachable && m.Message == "" })
}

// Agents of a member say that a cluster is silent, which nobody else knows. Its endpoints go if its API server does not answer either,
// and stay while it does, or while other agents get answers.
func TestSilenceSeenByAgents(t *testing.T) {
	w := newTestbed(t)
	w.probe = federation.NoProbe
	w.supervise("a", "one")
	w.offer("a", "web", "10.1.0.1")
	w.offer("c", "web", "10.3.0.1")
	w.awaitEverywhere("web", "10.1.0.1", "10.3.0.1")
	report := &v1alpha1.NodeReport{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "node"}, Spec: v1alpha1.NodeReportSpec{Silent: []string{"c"}}}
	w.create("b", report)
	t.Cleanup(func() {
		if err := w.admin["b"].Delete(context.Background(), report); err != nil {
			t.Error(err)
		}
	})
	w.offer("a", "late", "10.1.0.2") // is written after the report was read
	w.awaitEverywhere("late", "10.1.0.2")
	w.leadsTo("b", "web", "10.1.0.1", "10.3.0.1")
	other := &v1alpha1.NodeReport{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "other"}, Spec: v1alpha1.NodeReportSpec{Answering: []string{"c"}}}
	w.create("a", other)
	w.gates["a c"].Shut()
	<-time.After(6 * federation.Scaled(factor).Liveness.Stale)
	w.leadsTo("b", "web", "10.1.0.1", "10.3.0.1")
	if err := w.admin["a"].Delete(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	for _, id := range ids[:2] {
		w.leadsTo(id, "web", "10.1.0.1")
	}
	w.gates["a c"].Open()
	w.awaitEverywhere("web", "10.1.0.1", "10.3.0.1")
}
