package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/tables/tablestest"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// imported is healthy, with demo/hello imported from a and b: one endpoint of a is ready and one is not, one of b is.
func imported() cluster {
	w := healthy()
	w.objects = slices.DeleteFunc(w.objects, func(o client.Object) bool { return o.GetNamespace() == "demo" })
	no, yes := false, true
	port, tcp := int32(8080), corev1.ProtocolTCP
	slice := func(cluster string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "hello-" + cluster, Labels: map[string]string{
				mcsv1beta1.LabelServiceName: "hello", mcsv1beta1.LabelSourceCluster: cluster,
			}},
			Ports: []discoveryv1.EndpointPort{{Port: &port, Protocol: &tcp}}, Endpoints: endpoints,
		}
	}
	n1 := "n1"
	w.objects = append(w.objects,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "demo"}},
		&mcsv1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "hello"}, Status: mcsv1beta1.ServiceExportStatus{Conditions: []metav1.Condition{
			{Type: "Valid", Status: "True", Reason: "Valid", Message: "the service can be exported"},
			{Type: "Ready", Status: "True", Reason: "Exported", Message: "exported to the clusterset as 243.0.0.5"},
			{Type: "Conflict", Status: "False", Reason: "NoConflicts"},
		}}},
		&mcsv1beta1.ServiceImport{
			ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "hello", Labels: map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy}},
			Spec: mcsv1beta1.ServiceImportSpec{
				Type: mcsv1beta1.ClusterSetIP, IPs: []string{"243.0.0.5"}, Ports: []mcsv1beta1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}},
			},
			Status: mcsv1beta1.ServiceImportStatus{
				Clusters: []mcsv1beta1.ClusterStatus{{Cluster: "b"}, {Cluster: "a"}}, Conditions: []metav1.Condition{{Type: "Ready", Status: "True", Reason: "Ready"}},
			},
		},
		slice("a", discoveryv1.Endpoint{Addresses: []string{"10.1.0.1"}, NodeName: &n1}, discoveryv1.Endpoint{Addresses: []string{"10.1.0.2"}, Conditions: discoveryv1.EndpointConditions{Ready: &no}}),
		// A Service of two families has each endpoint twice.
		&discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "hello-b-6", Labels: map[string]string{
				mcsv1beta1.LabelServiceName: "hello", mcsv1beta1.LabelSourceCluster: "b",
			}},
			AddressType: discoveryv1.AddressTypeIPv6, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"fd00::1"}}},
		},
		slice("b", discoveryv1.Endpoint{Addresses: []string{"10.2.0.1"}, Conditions: discoveryv1.EndpointConditions{Ready: &yes}}),
	)
	for pod, node := range map[string]string{"a-1:9470": "n1", "a-2:19470": "n2"} {
		w.answers[pod+"/explain"] = status.Explanation{Node: node, Service: "demo/hello", Links: []status.Link{
			{Link: "agent", State: status.LinkOK, Text: "ready"},
			{Link: "map", State: status.LinkOK, Text: "1 entry in the kernel"},
			{Link: "clients", State: status.LinkNote, Text: "3 got a backend"},
		}}
	}
	return w
}

// change applies do to the one object of a type.
func change[T client.Object](w *cluster, do func(T)) {
	for _, o := range w.objects {
		if o, ok := o.(T); ok {
			do(o)
		}
	}
}

func remove[T client.Object](w *cluster) {
	w.objects = slices.DeleteFunc(w.objects, func(o client.Object) bool { _, is := o.(T); return is })
}

// The result names the first broken link with its remedy.
func TestExplain(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*cluster)
		nodes  []string
		text   string // "" for whatever it may be
		fails  string
	}{
		"all holds": {text: `Service demo/hello in cluster a
  ✓ namespace    demo exists
  ✓ export       exported to the clusterset as 243.0.0.5
  ✓ import       ClusterSetIP, exported by a, b
  ✓ ClusterSetIP 243.0.0.5
  ✓ endpoints    1 of 2 ready in a, 1 of 1 ready in b
node n1
  ✓ agent        ready
  ✓ map          1 entry in the kernel
  · clients      3 got a backend
node n2
  ✓ agent        ready
  ✓ map          1 entry in the kernel
  · clients      3 got a backend
`},
		"one node": {nodes: []string{"n2"}, change: func(w *cluster) { remove[*mcsv1beta1.ServiceExport](w) }, text: `Service demo/hello in cluster a
  ✓ namespace    demo exists
  · export       not exported from this cluster
  ✓ import       ClusterSetIP, exported by a, b
  ✓ ClusterSetIP 243.0.0.5
  ✓ endpoints    1 of 2 ready in a, 1 of 1 ready in b
node n2
  ✓ agent        ready
  ✓ map          1 entry in the kernel
  · clients      3 got a backend
`},
		"no namespace": {
			change: func(w *cluster) { remove[*corev1.Namespace](w); remove[*mcsv1beta1.ServiceImport](w) },
			text: `Service demo/hello in cluster a
  ✗ namespace    this cluster has no namespace demo, so it does not import the service
                 -> create it: kubectl create namespace demo
`,
			fails: "service demo/hello is broken at namespace: this cluster has no namespace demo, so it does not import the service; create it: kubectl create namespace demo",
		},
		"no cluster exports it": {
			change: func(w *cluster) { remove[*mcsv1beta1.ServiceExport](w); remove[*mcsv1beta1.ServiceImport](w) },
			fails:  "broken at import: it has no ServiceImport: no cluster exports the service; export it from a cluster with the service: isthmusctl export service hello -n demo",
		},
		"exported here and not imported": {
			change: func(w *cluster) { remove[*mcsv1beta1.ServiceImport](w) },
			fails:  "broken at import: it has no ServiceImport, although this cluster exports the service; check that the controller runs and reaches the broker: isthmusctl status",
		},
		"a label of the export is refused": {
			nodes: []string{"n2"},
			change: func(w *cluster) {
				change(w, func(e *mcsv1beta1.ServiceExport) {
					e.Status.Conditions[1].Reason, e.Status.Conditions[1].Message = "MetadataRefused", "exported to the clusterset as 243.0.0.5, without 1 labels"
				})
			},
			text: `Service demo/hello in cluster a
  ✓ namespace    demo exists
  · export       MetadataRefused: exported to the clusterset as 243.0.0.5, without 1 labels
  ✓ import       ClusterSetIP, exported by a, b
  ✓ ClusterSetIP 243.0.0.5
  ✓ endpoints    1 of 2 ready in a, 1 of 1 ready in b
node n2
  ✓ agent        ready
  ✓ map          1 entry in the kernel
  · clients      3 got a backend
`,
		},
		"an import of another controller": {
			change: func(w *cluster) {
				change(w, func(i *mcsv1beta1.ServiceImport) { i.Labels[v1alpha1.LabelManagedBy] = "example.org" })
			},
			fails: `broken at import: another controller wrote the ServiceImport (label app.kubernetes.io/managed-by="example.org"), so no cluster is reached by it; delete it`,
		},
		"the export is invalid": {
			change: func(w *cluster) {
				change(w, func(e *mcsv1beta1.ServiceExport) {
					e.Status.Conditions[0].Status, e.Status.Conditions[0].Reason, e.Status.Conditions[0].Message = "False", "NoService", "there is no Service hello"
				})
			},
			fails: "broken at export: Valid=False, NoService: there is no Service hello; correct the fault",
		},
		"the export is not processed": {
			change: func(w *cluster) { change(w, func(e *mcsv1beta1.ServiceExport) { e.Status.Conditions = nil }) },
			fails:  "broken at export: the ServiceExport has not been processed yet",
		},
		"no address": {
			change: func(w *cluster) {
				change(w, func(i *mcsv1beta1.ServiceImport) {
					i.Spec.IPs = nil
					i.Status.Conditions[0].Status, i.Status.Conditions[0].Reason, i.Status.Conditions[0].Message = "False", "Pending", "no IP yet"
				})
			},
			fails: "broken at import: Ready=False, Pending: no IP yet",
		},
		"no endpoint is ready": {
			change: func(w *cluster) {
				no := false
				change(w, func(s *discoveryv1.EndpointSlice) {
					for i := range s.Endpoints {
						s.Endpoints[i].Conditions.Ready = &no
					}
				})
			},
			fails: "broken at endpoints: none is ready: 0 of 2 ready in a, 0 of 1 ready in b; make its pods ready in these clusters: kubectl get pods -n demo",
		},
		"the kernel of one node": {
			change: func(w *cluster) {
				w.answers["a-2:19470/explain"] = status.Explanation{Links: []status.Link{
					{Link: "agent", State: status.LinkOK}, {Link: "map", State: status.LinkBroken, Text: "243.0.0.5:80/TCP is not in the kernel", Fix: "wait"},
				}}
			},
			fails: "broken at map on node n2: 243.0.0.5:80/TCP is not in the kernel; wait",
		},
		"an agent that does not answer": {
			change: func(w *cluster) { delete(w.answers, "a-1:9470/explain") },
			fails:  "broken at agent on node n1: pod a-1 does not answer on port 9470",
		},
		"no such node": {nodes: []string{"n9"}, fails: `no agent runs on node "n9"; agents run on n1, n2`},
		"an older installation": {
			change: func(w *cluster) { remove[*corev1.ServiceAccount](w) },
			fails:  "ServiceAccount isthmus-system/isthmus-observer does not exist; upgrade Isthmus",
		},
		"beside another implementation": {
			change: func(w *cluster) {
				remove[*v1alpha1.Member](w)
				change(w, func(e *mcsv1beta1.ServiceExport) { e.Status.Conditions = e.Status.Conditions[:1] })
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := imported()
			if c.change != nil {
				c.change(&w)
			}
			x, err := w.collector(t).explain(t.Context(), serviceRef{key: client.ObjectKey{Namespace: "demo", Name: "hello"}}, c.nodes)
			if err == nil {
				err = x.err()
				var out bytes.Buffer
				if err := x.writeText(&out); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(c.text, out.String()); c.text != "" && diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				var again chain
				if text, err := json.Marshal(x); err != nil || json.Unmarshal(text, &again) != nil || again.OK != x.OK {
					t.Errorf("as JSON: %s, %v", text, err)
				}
			}
			switch {
			case c.fails == "" && err != nil:
				t.Errorf("fails: %v", err)
			case c.fails != "" && (err == nil || !strings.Contains(err.Error(), c.fails)):
				t.Errorf("fails with %v, want %q", err, c.fails)
			}
		})
	}
}

// The test covers all forms of a reference to a Service.
func TestParseService(t *testing.T) {
	hello := serviceRef{key: client.ObjectKey{Namespace: "demo", Name: "hello"}}
	for text, want := range map[string]serviceRef{
		"hello.demo": hello, "demo/hello": hello, "hello.demo.svc.clusterset.local": hello, "hello.demo.svc.clusterset.local.": hello,
		"b.eu.hello.demo.svc.clusterset.local": hello, "243.0.0.5": {vip: netip.MustParseAddr("243.0.0.5")},
		"::ffff:243.0.0.5": {vip: netip.MustParseAddr("243.0.0.5")}, "fd00::5": {vip: netip.MustParseAddr("fd00::5")},
	} {
		if have, err := parseService(text); err != nil || have != want {
			t.Errorf("%s: %+v, %v, want %+v", text, have, err, want)
		}
	}
	for _, text := range []string{"", "hello", "a.hello.demo", "Hello.demo", "demo/", "hello.demo.svc.cluster.local", "svc.clusterset.local"} {
		if have, err := parseService(text); err == nil {
			t.Errorf("%q is %+v", text, have)
		}
	}
	w := imported()
	if key, err := w.collector(t).ofAddress(t.Context(), netip.MustParseAddr("243.0.0.5")); err != nil || key != hello.key {
		t.Errorf("the Service of the address is %s, %v", key, err)
	}
	if _, err := w.collector(t).ofAddress(t.Context(), netip.MustParseAddr("243.0.0.6")); err == nil {
		t.Error("an unknown address resolves to a Service")
	}
}

// events are what an agent sends.
func events(t *testing.T, all ...status.Event) *bytes.Buffer {
	t.Helper()
	out := bytes.NewBufferString("\n") // the first sign of life
	for _, e := range all {
		if err := json.NewEncoder(out).Encode(e); err != nil {
			t.Fatal(err)
		}
		out.WriteString("\n")
	}
	return out
}

// The command prints events of all nodes until the limit, and names a node that ends or cannot be observed.
func TestObserve(t *testing.T) {
	at := time.Date(2026, 11, 22, 10, 11, 12, 345e6, time.Local)
	vip := netip.MustParseAddrPort("243.0.0.5:80")
	chosen := status.Event{
		Time: at, Node: "n1", Verdict: "chosen", Path: "socket", Protocol: "TCP", Service: "demo/hello", VIP: vip,
		Backend: netip.MustParseAddrPort("10.2.0.1:8080"), Cluster: "b", PID: 42, Command: "curl",
	}
	refused := status.Event{
		Time: at, Node: "n2", Verdict: "refused", Reason: "no_frontend", Path: "packet", Protocol: "UDP", VIP: vip,
		Client: netip.MustParseAddrPort("10.9.0.1:4000"), Lost: 7,
	}
	for name, c := range map[string]struct {
		answers map[string]any
		w       watch
		out     string
		says    string
		fails   string
	}{
		"until the limit": {
			answers: map[string]any{"a-1:9470/observe": events(t, chosen, chosen, chosen)}, w: watch{last: 2, nodes: []string{"n1"}},
			out: strings.Repeat("10:11:12.345 n1 demo/hello curl[42] 243.0.0.5:80/TCP -> 10.2.0.1:8080 of b (socket)\n", 2),
		},
		"lost ones, and those of no Service": {
			answers: map[string]any{"a-2:19470/observe": events(t, refused)}, w: watch{last: 1, nodes: []string{"n2"}},
			out: "n2: 7 events lost, because there were too many; see --sample\n10:11:12.345 n2 - 10.9.0.1:4000 243.0.0.5:80/UDP refused: no_frontend (packet)\n",
		},
		"one node of two": {
			answers: map[string]any{"a-1:9470/observe": events(t, chosen)}, w: watch{},
			out:   "10:11:12.345 n1 demo/hello curl[42] 243.0.0.5:80/TCP -> 10.2.0.1:8080 of b (socket)\n",
			says:  "node n2: pod a-2 does not answer on port 19470",
			fails: "no node can be observed",
		},
		"a fault of the agent": {
			answers: map[string]any{"a-1:9470/observe": events(t, status.Event{Error: "no ring buffer"})}, w: watch{nodes: []string{"n1"}},
			says: "node n1: pod a-1: no ring buffer", fails: "no node can be observed: pod a-1: no ring buffer",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := imported()
			maps.Copy(w.answers, c.answers)
			col := w.collector(t)
			var out, says bytes.Buffer
			err := col.observe(t.Context(), col.pods, c.w, &out, &says)
			if diff := cmp.Diff(c.out, out.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if !strings.Contains(says.String(), c.says) {
				t.Errorf("says %q, want %q", says.String(), c.says)
			}
			switch {
			case c.fails == "" && err != nil:
				t.Errorf("fails: %v", err)
			case c.fails != "" && (err == nil || !strings.Contains(err.Error(), c.fails)):
				t.Errorf("fails with %v, want %q", err, c.fails)
			}
		})
	}
}

// An interrupted or timed out observation is no error.
func TestObserveEnds(t *testing.T) {
	w := imported()
	quiet, writer := io.Pipe()
	defer writer.Close()
	w.answers["a-1:9470/observe"] = quiet
	col := w.collector(t)
	ctx, cancel := context.WithCancel(t.Context())
	context.AfterFunc(ctx, func() { quiet.CloseWithError(ctx.Err()) }) // as the library does with a real body
	done := make(chan error)
	go func() { done <- col.observe(ctx, col.pods, watch{nodes: []string{"n1"}}, io.Discard, io.Discard) }()
	if _, err := writer.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("interrupted: %v", err)
	}
}

func TestShow(t *testing.T) {
	w := imported()
	since := metav1.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	leader := w.answers["c-1:9471"].(status.Controller)
	leader.Members = []status.Member{{ID: "b", State: status.MemberStale, Since: since.Time, Held: 3}}
	w.answers["c-1:9471"] = leader
	agent := w.answers["a-1:9470"].(status.Agent)
	agent.Dataplane.Drained, agent.Dataplane.Differences, agent.Dataplane.Refusals = []string{"b"}, 2, map[string]uint64{"no_backend": 4, "no_frontend": 1}
	w.answers["a-1:9470"] = agent
	delete(w.answers, "a-2:19470")
	w.answers["a-1:9470/show/drops"] = tables.Drops{{Service: "demo/hello", Reason: "no_backend", Count: 4, Meaning: "no backend is ready"}}
	w.answers["a-2:19470/show/drops"] = tables.Drops{}
	w.answers["a-1:9470/show/hooks"] = tables.Hooks{}
	c := w.collector(t)
	for name, tc := range map[string]struct {
		read  func() (tables.Table, error)
		want  string
		fails string
	}{
		"services": {func() (tables.Table, error) { return c.showServices(t.Context(), "") }, `
SERVICE TYPE IPS PORTS CLUSTERS READY EXPORTED
demo/hello ClusterSetIP 243.0.0.5 80/TCP a,b 2/3 yes`, ""},
		"services of another namespace": {func() (tables.Table, error) { return c.showServices(t.Context(), "prod") }, `
no Service is imported`, ""},
		"backends": {func() (tables.Table, error) { return c.showBackends(t.Context(), "demo") }, `
SERVICE ADDRESS PORTS CLUSTER NODE ZONE STATE
demo/hello 10.1.0.1 8080/TCP a n1 - ready
demo/hello 10.1.0.2 8080/TCP a - - not ready
demo/hello 10.2.0.1 8080/TCP b - - ready
demo/hello fd00::1 - b - - ready`, ""},
		"clusters": {func() (tables.Table, error) { return c.showClusters(t.Context()) }, `
CLUSTER STATE SINCE SERVICES READY HELD DRAINED-ON
a this one - 1 1/2 0 -
b stale 2026-11-22T10:00:00Z 1 1/1 3 n1`, ""},
		"nodes": {func() (tables.Table, error) { return c.showNodes(t.Context()) }, `
NODE READY HOOKS FRONTENDS BACKENDS DIFFERENCES REFUSED DRAINED VERSION WAITING
n1 yes 2/2 2 5 2 5 b v1 -
n2 no - - - - - - - pod a-2 does not answer on port 19470: the server is currently unable to handle the request (get pods https:a-2:19470)`, ""},
		"drops": {func() (tables.Table, error) { return c.showKernels(t.Context(), "drops", nil, 0) }, `
NODE SERVICE REASON COUNT MEANING
n1 demo/hello no_backend 4 no backend is ready`, ""},
		"hooks, of which one node knows": {
			func() (tables.Table, error) { return c.showKernels(t.Context(), "hooks", nil, 0) },
			"\nno BPF program of Isthmus is attached on this node", "node n2: pod a-2 does not answer",
		},
	} {
		t.Run(name, func(t *testing.T) {
			tab, err := tc.read()
			switch {
			case tc.fails == "" && err != nil:
				t.Fatal(err)
			case tc.fails != "" && (err == nil || !strings.Contains(err.Error(), tc.fails)):
				t.Errorf("fails with %v, want %q", err, tc.fails)
			}
			if diff := cmp.Diff(tc.want, "\n"+tablestest.Text(t, tab)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			var rows []map[string]any
			if text, err := json.Marshal(tab); err != nil || json.Unmarshal(text, &rows) != nil || rows == nil {
				t.Errorf("as JSON: %s, %v", text, err)
			}
		})
	}
}
