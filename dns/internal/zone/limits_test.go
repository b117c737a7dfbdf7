package zone

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// Exporters learn that a part of a Service cannot be named (N48) exactly when this zone leaves it out. Both sides have
// the rule, as the exporting member need not run this name server.
func TestExporterAndZoneAgreeOnNameLimits(t *testing.T) {
	t.Parallel()
	label := func(n int) string { return strings.Repeat("x", n) }
	for _, pods := range []bool{false, true} { // endpoints are named by their hostname, or by their pod
		for host := 49; host <= 53; host++ { // 51 characters fit, 52 do not
			t.Run(fmt.Sprintf("a host of %d characters, by its pod %v", host, pods), func(t *testing.T) {
				t.Parallel()
				const cluster = clusterset.ClusterID("cluster")
				name := clusterset.ServiceName{Namespace: label(63), Name: label(63)}
				long := clusterset.ClusterID(string(cluster) + label(45))
				s := slice(long, "10.0.0.1")
				e := discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}}
				if pods {
					s.Endpoints[0].Pod = label(host)
					e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Name: label(host)}
				} else {
					s.Endpoints[0].Hostname = label(host)
					e.Hostname = new(label(host))
				}
				reported := mcs.Unnamed(clusterset.Export{Cluster: long, Service: name}, []*discoveryv1.EndpointSlice{{Endpoints: []discoveryv1.Endpoint{e}}})
				compare(t, reported, headless(name.Namespace, name.Name, s))
			})
		}
	}
	conformance.Holds(t, "N48")
	for port := 61; port <= 64; port++ {
		t.Run(fmt.Sprintf("a port of %d characters", port), func(t *testing.T) {
			t.Parallel()
			s := vip("demo", "ports", "243.0.0.1")
			s.Ports = []clusterset.Port{{Name: label(port), Protocol: clusterset.TCP, Port: 80}}
			compare(t, mcs.Unnamed(clusterset.Export{Cluster: "a", Service: s.Service, Ports: s.Ports}, nil), s)
		})
	}
}

// compare compares what is reported to an exporter with what the zone leaves out.
func compare(t *testing.T, reported []string, s clusterset.Service) {
	t.Helper()
	b := new(Builder)
	b.Build(&clusterset.Snapshot{Services: []clusterset.Service{s}}, kep, 1)
	if left := b.Problems(); len(reported) != len(left) {
		t.Errorf("reported to the exporter: %q, the zone leaves out %v", reported, left)
	}
}
