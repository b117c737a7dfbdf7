package controller

import (
	"os"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/service"
)

// TestKilledAtEveryCall kills the controller after each of its calls took effect, which is before the next one, and then
// lets a new controller recover. In other runs only one call fails, and the same controller continues. Nothing leaks,
// every Service has what it asks for, and a Service that asks for nothing else keeps its address. The full run also kills
// at reads of the API server and lets all calls fail.
func TestKilledAtEveryCall(t *testing.T) {
	full := os.Getenv("ISTHMUS_FULL_LENGTH") != ""
	ways, steps := []crashMode{{after: true}, {fails: true, reads: true}}, []int{1, 4}
	if full {
		ways, steps = append(ways, crashMode{reads: true}), []int{1, 1, 1}
	}
	annotate := func(name, value string) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Annotations[name] = value }
	}
	add := func(port int32) func(*corev1.Service) {
		return func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "more", Port: port, Protocol: corev1.ProtocolTCP})
		}
	}
	for name, tc := range map[string]struct {
		before, change func(*testbed)
		moves          []string // Services whose addresses may change
		calls          int      // minimum number of calls of the change
	}{
		"MapService": {
			func(*testbed) {},
			func(w *testbed) { w.create(w.newService("new", nil, 80)) }, nil, 16,
		},
		"MapService, to a port of another Service": {
			func(w *testbed) { w.create(w.newService("old", nil, 80)) },
			func(w *testbed) { w.create(w.newService("new", annotate(service.AnnotationExternalIPs, "true"), 443)) }, nil, 10,
		},
		"MapService, dual stack, a retained floating IP": {
			func(w *testbed) { w.create(w.newService("old", nil, 80)) },
			func(w *testbed) {
				w.create(w.newService("new", func(s *corev1.Service) {
					s.Annotations[service.AnnotationFloatingIPAfterwards] = "retain"
					s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = new(corev1.IPFamilyPolicyRequireDualStack), []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
				}, 80))
			}, nil, 20,
		},
		"RemapService, away from a shared port": {
			func(w *testbed) {
				w.create(w.newService("a", nil, 80))
				w.noError(w.converge())
				w.create(w.newService("b", nil, 443))
			},
			func(w *testbed) { w.edit("a", add(443)) },
			[]string{"a"},
			21,
		},
		"RemapService, to no floating IP": {
			func(w *testbed) { w.create(w.newService("a", nil, 80)) },
			func(w *testbed) { w.edit("a", annotate(service.AnnotationFloatingIP, "none")) },
			[]string{"a"},
			4,
		},
		"RemapService, to another pool": {
			func(w *testbed) { w.create(w.newService("a", nil, 80), w.newService("b", nil, 443)) },
			func(w *testbed) { w.edit("a", annotate(service.AnnotationPool, "list")) },
			[]string{"a"},
			17,
		},
		"RemapService, to a failover IP": {
			func(w *testbed) { w.create(w.newService("a", nil, 80), w.newService("b", nil, 443)) },
			func(w *testbed) { w.edit("a", annotate(service.AnnotationPool, "moving")) },
			[]string{"a"},
			17,
		},
		"UnmapService, of a failover IP": {
			func(w *testbed) { w.create(w.newService("a", annotate(service.AnnotationPool, "moving"), 80)) },
			func(w *testbed) { w.remove("a") }, nil, 8,
		},
		"UnmapService, deleted": {
			func(w *testbed) {
				w.create(w.newService("a", annotate(service.AnnotationExternalIPs, "true"), 80), w.newService("b", nil, 80))
			},
			func(w *testbed) { w.remove("a") }, nil, 17,
		},
		"UnmapService, of a shared port": {
			func(w *testbed) {
				w.create(w.newService("a", nil, 80))
				w.noError(w.converge())
				w.create(w.newService("b", nil, 443))
			},
			func(w *testbed) { w.remove("a") }, nil, 11,
		},
		"UnmapService, not managed by choice": {
			func(w *testbed) { w.create(w.newService("a", annotate(service.AnnotationExternalIPs, "true"), 80)) },
			func(w *testbed) { w.edit("a", annotate(service.AnnotationManaged, "false")) },
			[]string{"a"},
			15,
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := failoverTestbed(t)
			for i, way := range ways {
				kills := 0
				for at := 1; ; at += steps[i] {
					k := &crasher{crashMode: way}
					w.startWith(failoverSettings(), k)
					w.noError(w.Sync(t.Context()))
					tc.before(w)
					w.noError(w.converge())
					reached := map[string][]string{}
					for _, n := range w.names() {
						if s := w.get(n.Name); !slices.Contains(tc.moves, n.Name) {
							reached[n.Name] = addresses(s)
						}
					}
					k.calls, k.at = 0, at
					tc.change(w)
					_ = w.converge()
					k.at = 0
					for _, n := range w.names() { // events before the crash count too
						if s := w.get(n.Name); !slices.Contains(tc.moves, n.Name) && len(addresses(s)) > 0 {
							reached[n.Name] = addresses(s)
						}
					}
					if !way.fails {
						w.startWith(failoverSettings(), nil)
						w.noError(w.Sync(t.Context()))
					}
					w.noError(w.converge())
					w.checkInvariants()
					for name, want := range reached {
						if s := w.get(name); s.Name != "" && !slices.Equal(addresses(s), want) {
							t.Errorf("service %s was reached at %v, now %v", name, want, addresses(s))
						}
					}
					if t.Failed() {
						t.Fatalf("hit at call %d, %+v", at, way)
					}
					w.empty()
					if !k.dead {
						break
					}
					kills++
				}
				if kills*steps[i] < tc.calls {
					t.Errorf("%d calls hit, every %d. of at least %d, %+v", kills, steps[i], tc.calls, way)
				}
				t.Logf("%d calls hit: the answer lost %v, the controller living on %v", kills, way.after, way.fails)
			}
		})
	}
}

// empty deletes all Services, and verifies that nothing is left of them.
func (w *testbed) empty() {
	w.t.Helper()
	for _, n := range w.names() {
		w.remove(n.Name)
	}
	w.noError(w.converge())
	ports, _ := w.fake.Objects()
	if len(ports) > 0 || len(w.names()) > 0 {
		w.t.Fatalf("left behind: ports %v, services %v", ports, w.names())
	}
}
