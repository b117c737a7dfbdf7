package mcs

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// Names up to the limits of DNS are not reported; with one more character they are, once.
func TestUnnamed(t *testing.T) {
	t.Parallel()
	label := func(n int) string { return strings.Repeat("x", n) }
	e := clusterset.Export{Cluster: clusterset.ClusterID(label(31) + "." + label(30)), Service: clusterset.ServiceName{Namespace: label(62), Name: label(63)}}
	const free = 253 - (1 + 62 + 1 + 63 + 1 + 62 + len(".svc.clusterset.local"))
	endpoint := func(host, pod, address string) discoveryv1.Endpoint {
		e := discoveryv1.Endpoint{Addresses: []string{address}}
		if host != "" {
			e.Hostname = &host
		}
		if pod != "" {
			e.TargetRef = &corev1.ObjectReference{Kind: kindPod, Name: pod}
		}
		return e
	}
	for name, tc := range map[string]struct {
		endpoint discoveryv1.Endpoint
		port     string
		want     int
	}{
		"a hostname that fits":                {endpoint(label(free), "", "10.0.0.1"), "", 0},
		"a hostname that does not":            {endpoint(label(free+1), "", "10.0.0.1"), "", 1},
		"an address that fits":                {endpoint("", "", "fd00:1111:2222:3333:4444:5555:6666:7777"), "", 0},
		"a pod that does not":                 {endpoint("", label(free+1), "10.0.0.1"), "", 1},
		"a pod with a hostname that fits":     {endpoint("h", label(free+1), "10.0.0.1"), "", 0},
		"a pod whose name is no label anyhow": {endpoint("", label(64), "10.0.0.1"), "", 0},
		"a port that fits":                    {endpoint("h", "", "10.0.0.1"), label(62), 0},
		"a port that does not":                {endpoint("h", "", "10.0.0.1"), label(63), 1},
	} {
		e := e
		e.Ports = []clusterset.Port{{Name: tc.port}}
		slice := &discoveryv1.EndpointSlice{Endpoints: []discoveryv1.Endpoint{tc.endpoint}}
		unnamed := Unnamed(e, []*discoveryv1.EndpointSlice{slice, slice})
		if len(unnamed) != tc.want {
			t.Errorf("%s: %q", name, unnamed)
		}
		if c := ExportedWithout(nil, Shortcomings{Unnamed: unnamed}); c.Status != metav1.ConditionTrue || (c.Reason == string(ReasonNamesTooLong)) != (tc.want > 0) {
			t.Errorf("%s: %+v", name, c)
		}
	}
	conformance.Holds(t, "N48")
	refused := []error{errors.New("10.0.0.9 is nobody's")}
	if c := ExportedWithout(nil, Shortcomings{Refused: refused, Unnamed: []string{"port p"}}); c.Reason != string(ReasonEndpointsRefused) || !strings.Contains(c.Message, "port p") || !strings.Contains(c.Message, "10.0.0.9") {
		t.Errorf("with both: %+v", c)
	}
}
