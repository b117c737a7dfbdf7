package hostile

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Source draws values for one object.
type Source struct {
	*rand.Rand
	Scene

	place  Place
	number int
}

// Pick returns one of choices.
func Pick[T any](s *Source, choices ...T) T { return choices[s.IntN(len(choices))] }

// oneIn reports true once in n draws.
func (s *Source) oneIn(n int) bool { return s.IntN(n) == 0 }

// fresh returns a name that no other draw of the seed has.
func (s *Source) fresh() string { return fmt.Sprintf("hostile-%d", s.number) }

// service returns the name of a Service: mostly that of a bystander.
func (s *Source) service() string {
	switch s.IntN(8) {
	case 0, 1, 2, 3:
		return Pick(s, s.Services...)
	case 4:
		return Pick(s, append(slices.Clone(s.Exported), s.fresh())...)
	case 5:
		return "h" + strings.Repeat("x", 62)
	default:
		return s.fresh()
	}
}

// Name returns a name that may be none.
func (s *Source) Name() string {
	return Pick(s, s.fresh(), s.fresh()+"."+s.Namespace, "Hostile", "9lives", "käse", strings.Repeat("a", 64), strings.Repeat("a", 254), "..", "a b", "-a", s.Member+"."+s.service())
}

// Address returns an address of a member's pods, of another owner, or one that no endpoint can have.
func (s *Source) Address(member string) string {
	if own := s.Pods[member]; len(own) > 0 && s.oneIn(3) {
		return s.within(Pick(s, own...)).String()
	}
	if len(s.Foreign) > 0 && s.oneIn(2) {
		return Pick(s, s.Foreign...).String()
	}
	return Pick(s, "127.0.0.1", "::1", "0.0.0.0", "::", "8.8.8.8", "169.254.169.254", "224.0.0.1", "255.255.255.255", "fe80::1", "ff02::1",
		"::ffff:10.96.0.1", "2001:DB8::10", "2001:db8:0:0::10", "010.1.2.3", "10.1.2.3 ", "10.1.2", "fd00::1%eth0", "", "localhost", "198.51.100.7")
}

// within returns an address of p.
func (s *Source) within(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits() / 8; i < len(b); i++ {
		b[i] = byte(s.Uint32())
	}
	b[len(b)-1] = byte(1 + s.IntN(200))
	a, _ := netip.AddrFromSlice(b) // as long as an address
	return a
}

// Port returns a port number, or one that is none.
func (s *Source) Port() int32 {
	return Pick(s, 80, 80, 443, 8080, int32(1+s.IntN(65535)), 65535, 0, -1, 65536, math.MaxInt32)
}

// Time returns a time long ago, about now, or in the future.
func (s *Source) Time() metav1.Time {
	return metav1.NewTime(Pick(s, time.Unix(0, 0), time.Unix(1, 0), s.Now.AddDate(-30, 0, 0), s.Now.Add(-time.Hour), s.Now.Add(-time.Second),
		s.Now, s.Now.Add(time.Hour), s.Now.AddDate(30, 0, 0), time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)).UTC())
}

// reserved are labels and annotations on which Isthmus, Kubernetes or another implementation acts.
var reserved = []string{
	"isthmus.dev/cluster", "isthmus.dev/service-name", "isthmus.dev/service-namespace", "isthmus.dev/changed-at", "isthmus.dev/release-hold",
	"isthmus.dev/prefer", "isthmus.dev/cluster-weights", "isthmus.dev/balancer", "app.kubernetes.io/managed-by",
	"lighthouse.submariner.io/use-clusterset-ip", "lighthouse.submariner.io/clusterset-ip-allocated-by",
	"multicluster.kubernetes.io/service-name", "multicluster.kubernetes.io/source-cluster",
	"kubernetes.io/service-name", "endpointslice.kubernetes.io/managed-by", "endpoints.kubernetes.io/managed-by", "service.kubernetes.io/headless",
}

// Key returns a key of labels: valid, reserved or invalid.
func (s *Source) Key() string {
	switch s.IntN(3) {
	case 0:
		return Pick(s, reserved...)
	case 1:
		return Pick(s, "note", "team", "example.org/note", fmt.Sprintf("key-%d", s.IntN(100)))
	default:
		return Pick(s, "my key", "", "/", "a/b/c", "-x", "käse", strings.Repeat("k", 64), strings.Repeat("d", 254)+"/k", "example.org/", "UPPER.example/x", "tab\tkey", "new\nline", "\u202e")
	}
}

// Value returns a value of labels, with the values that reserved keys have.
func (s *Source) Value() string {
	victim := Pick(s, s.Others...)
	return Pick(s, "", "true", "false", "shop", "my shop", "käse", "isthmus.dev", "endpointslice-controller.k8s.io", strings.Repeat("v", 63), strings.Repeat("v", 64),
		"line\nline", "\x00", "\u202e", victim, s.Member, Pick(s, s.Services...), s.Namespace,
		s.Member+"=1000,"+victim+"=0", victim+"=0", "maglev", "remote", "node,node", "9223372036854775807", "-1")
}

// Map returns a few labels or annotations, now and then of the given size in bytes.
func (s *Source) Map(large int) map[string]string {
	m := map[string]string{}
	for range 1 + s.IntN(3) {
		m[s.Key()] = s.Value()
	}
	if large > 0 && s.oneIn(4) {
		m["example.org/large"] = strings.Repeat("x", large)
	}
	return m
}

// Weights returns a cluster-weights annotation that takes the clients of the other members.
func (s *Source) Weights() map[string]string {
	weights := []string{s.Member + "=1000"}
	for _, o := range s.Others {
		weights = append(weights, o+"=0")
	}
	return map[string]string{"isthmus.dev/cluster-weights": strings.Join(weights, ",")}
}

// ports returns how many ports a Service has: mostly few.
func (s *Source) ports() int {
	most := s.MaxPorts
	if most == 0 {
		most = 33000
	}
	return min(most, Pick(s, 0, 1, 1, 2, 2, 3, 3, 20, 101, 1000, 33000))
}

// Metadata twists the metadata of an object.
func Metadata[T client.Object](s *Source, obj T) {
	switch s.IntN(6) {
	case 0:
		obj.SetLabels(merged(obj.GetLabels(), s.Map(0)))
	case 1:
		obj.SetAnnotations(merged(obj.GetAnnotations(), s.Map(255<<10)))
	case 2:
		obj.SetAnnotations(merged(obj.GetAnnotations(), s.Weights()))
	case 3:
		obj.SetLabels(merged(obj.GetLabels(), map[string]string{Pick(s, reserved...): s.Value()}))
	case 4:
		obj.SetFinalizers([]string{Pick(s, "example.org/keep", "foregroundDeletion", "kubernetes")})
	default:
		obj.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "v1", Kind: "Namespace", Name: s.Namespace, UID: "0", BlockOwnerDeletion: new(true)}})
	}
}

// merged returns base with more.
func merged(base, more map[string]string) map[string]string {
	m := map[string]string{}
	maps.Copy(m, base)
	maps.Copy(m, more)
	return m
}
