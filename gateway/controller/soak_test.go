package controller

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/service"
)

// TestTwoClustersOfOneProject lets two clusters come, change and go at random in one project, with controllers that are killed
// at random calls: in the end nothing is left, and neither ever touched what is the other's.
func TestTwoClustersOfOneProject(t *testing.T) {
	cycles := 20
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		cycles = 200
	}
	random := rand.New(rand.NewPCG(7, uint64(cycles)))
	a, b := newWorld(t), newWorld(t)
	b.fake, b.cloud = a.fake, nil
	b.cloud = b.connect("cluster-b")
	settings := testSettings()
	settings.AddressPairs = PairNone // the two have the same gateways' ports
	other := settings
	other.Cluster = "cluster-b"
	kills := 0
	for range cycles {
		for w, s := range map[*world]Settings{a: settings, b: other} {
			k := &killer{way: way{after: random.IntN(2) == 0}}
			w.startWith(s, k)
			w.noError(w.Sync(t.Context()))
			k.calls, k.at = 0, random.IntN(40)+1
			w.change(random)
			_ = w.settle()
			if k.dead {
				kills++
			}
		}
		for w, s := range map[*world]Settings{a: settings, b: other} {
			w.startWith(s, nil)
			w.noError(w.Sync(t.Context()))
			w.noError(w.settle())
		}
		both(t, a, b)
	}
	for _, w := range []*world{a, b} {
		for _, n := range w.names() {
			w.remove(n.Name)
		}
		w.noError(w.settle())
	}
	if ports, fips := a.fake.Objects(); len(ports)+len(fips) > 0 {
		t.Errorf("after all Services went: ports %v, floating IPs %v", ports, fips)
	}
	t.Logf("%d cycles, %d kills", cycles, kills)
}

// change adds, changes or removes a Service or two at random.
func (w *world) change(random *rand.Rand) {
	w.t.Helper()
	for range random.IntN(3) + 1 {
		name := fmt.Sprintf("s%d", random.IntN(6))
		s := w.get(name)
		policy := []string{"none", "allocate"}[random.IntN(2)]
		switch {
		case s.Name == "":
			w.create(w.balanced(name, annotation(service.AnnotationFloatingIP, policy), int32(80+random.IntN(2))))
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

// both holds that the two clusters have what their Services have, and nothing else is there.
func both(t *testing.T, worlds ...*world) {
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
