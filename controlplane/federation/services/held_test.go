package services

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
)

// While one cluster is not known, the addresses of a host name stay with their ports, except for those of another cluster that is dead.
func TestHeldHostname(t *testing.T) {
	http := clusterset.Port{Name: "http", Port: 80, Protocol: clusterset.TCP}
	at := func(cluster clusterset.ClusterID, addr string, ready bool) offers.Offer {
		g := offers.Group{Targets: []offers.Target{{Port: http, Number: 8080}}}
		g.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{addr}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}}
		return offers.Offer{Export: clusterset.Export{Cluster: cluster}, Groups: []offers.Group{g}}
	}
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
		v1alpha1.ExternalDNSPrefixes()[0] + v1alpha1.ExternalDNSTarget: "10.1.0.1,10.2.0.1,10.3.0.1", v1alpha1.AnnotationHostnamePorts: "80/TCP=8080",
	}}}
	for name, tc := range map[string]struct {
		away []offers.Offer
		want string
	}{
		"another one is there": {[]offers.Offer{at("a", "10.1.0.1", true), at("c", "10.3.0.1", true)}, "[10.1.0.1 10.2.0.1] 80/TCP=8080"},
		"no other is":          {[]offers.Offer{at("a", "10.1.0.1", false), at("c", "10.3.0.1", true)}, "[10.1.0.1 10.2.0.1] 80/TCP=8080"},
	} {
		s := &snapshot{held: true, away: tc.away, dropped: map[clusterset.ClusterID]bool{"c": true}}
		is := s.outside(svc, offers.Federated{Ports: []clusterset.Port{http}})
		if got := fmt.Sprint(is.addrs, " ", is.ports); got != tc.want {
			t.Errorf("%s: %s; want %s", name, got, tc.want)
		}
	}
}
