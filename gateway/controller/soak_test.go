package controller

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// TestTwoClustersOfOneProject creates, changes and deletes Services of two clusters in one project at random, with
// controllers killed at random calls. In the end nothing is left, and neither cluster ever wrote to an object of the
// other.
func TestTwoClustersOfOneProject(t *testing.T) {
	cycles := 20
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		cycles = 200
	}
	random := rand.New(rand.NewPCG(7, uint64(cycles)))
	a, b := newTestbed(t), newTestbed(t)
	b.fake = a.fake
	wrote := [2]map[string]bool{{}, {}} // objects in Neutron
	for i, w := range []*testbed{a, b} {
		c, err := openstack.Connect(t.Context(), openstack.Config{
			Cloud: "test", File: w.fake.CloudsYAML(t), Cluster: []string{"cluster-a", "cluster-b"}[i],
			Wrap: func(to http.RoundTripper) http.RoundTripper { return noting{to, wrote[i]} },
		})
		w.noError(err)
		w.cloud = c
	}
	settings := testSettings()
	settings.AddressPairs = PairNone // both clusters use the same gateway ports
	other := settings
	other.Cluster = "cluster-b"
	kills := 0
	tenants := []struct {
		*testbed
		Settings
	}{{a, settings}, {b, other}}
	for range cycles {
		for _, x := range tenants {
			w := x.testbed
			k := &crasher{crashMode: crashMode{after: random.IntN(2) == 0}}
			w.startWith(x.Settings, k)
			w.noError(w.Sync(t.Context()))
			k.calls, k.at = 0, random.IntN(40)+1
			w.change(random)
			_ = w.converge()
			if k.dead {
				kills++
			}
		}
		for _, x := range tenants {
			x.startWith(x.Settings, nil)
			x.noError(x.Sync(t.Context()))
			x.noError(x.converge())
		}
		both(t, a, b)
	}
	for _, w := range []*testbed{a, b} {
		for _, n := range w.names() {
			w.remove(n.Name)
		}
		w.noError(w.converge())
	}
	if ports, fips := a.fake.Objects(); len(ports)+len(fips) > 0 {
		t.Errorf("after all Services went: ports %v, floating IPs %v", ports, fips)
	}
	for id := range wrote[0] {
		if wrote[1][id] {
			t.Errorf("both clusters wrote to %s", id)
		}
	}
	if kills < cycles/2 || len(wrote[0]) < cycles/2 || len(wrote[1]) < cycles/2 {
		t.Errorf("in %d cycles %d kills, and %d and %d objects of Neutron that the clusters wrote to", cycles, kills, len(wrote[0]), len(wrote[1]))
	}
	t.Logf("%d cycles, %d kills; the clusters wrote to %d and %d objects of Neutron", cycles, kills, len(wrote[0]), len(wrote[1]))
}

// noting records the ids of the Neutron objects that a client wrote to, or tried to.
type noting struct {
	to    http.RoundTripper
	wrote map[string]bool
}

// RoundTrip implements http.RoundTripper.
func (n noting) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := n.to.RoundTrip(r)
	if err != nil || r.Method == http.MethodGet {
		return resp, err
	}
	id := path.Base(r.URL.Path)
	if r.Method == http.MethodPost {
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return nil, err
		}
		_ = resp.Body.Close()
		resp.Body = io.NopCloser(bytes.NewReader(body))
		if resp.StatusCode != http.StatusCreated {
			return resp, nil // an error response
		}
		var made map[string]struct{ ID string }
		if err := json.Unmarshal(body, &made); err != nil {
			return nil, err
		}
		id = made[strings.TrimSuffix(id, "s")].ID
	}
	n.wrote[id] = true
	return resp, nil
}

// change creates, changes or deletes one or two Services at random.
func (w *testbed) change(random *rand.Rand) {
	w.t.Helper()
	for range random.IntN(3) + 1 {
		name := fmt.Sprintf("s%d", random.IntN(6))
		s := w.get(name)
		policy := []string{"none", "allocate"}[random.IntN(2)]
		switch {
		case s.Name == "":
			w.create(w.newService(name, annotation(service.AnnotationFloatingIP, policy), int32(80+random.IntN(2))))
		case s.DeletionTimestamp != nil:
		case random.IntN(3) == 0:
			w.remove(name)
		case random.IntN(2) == 0:
			w.edit(name, annotation(service.AnnotationFloatingIP, policy))
		default:
			w.edit(name, func(s *corev1.Service) { s.Spec.Ports[0].Port = int32(80 + random.IntN(2)) })
		}
	}
}

// both verifies that the two clusters have the objects of their Services and no others.
func both(t *testing.T, worlds ...*testbed) {
	t.Helper()
	used := map[string]bool{}
	for _, w := range worlds {
		for _, n := range w.names() {
			s := w.get(n.Name)
			id := s.Annotations[service.AnnotationPort]
			if id == "" || len(addresses(s)) == 0 {
				t.Fatalf("service %s has no address: %v", n, s.Annotations)
			}
			used[id] = true
		}
	}
	ports, _ := worlds[0].fake.Objects()
	for _, id := range ports {
		if !used[id] {
			t.Fatalf("port %s leaked", id)
		}
	}
	if len(ports) != len(used) {
		t.Fatalf("ports %v, used %v", ports, used)
	}
	all, err := worlds[0].cloud.AllFloatingIPs(t.Context())
	worlds[0].noError(err)
	for _, f := range all {
		if !used[f.Port] {
			t.Fatalf("floating IP %+v leaked", f)
		}
	}
}
