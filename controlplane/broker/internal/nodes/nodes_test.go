package nodes

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func TestDerive(t *testing.T) {
	for name, tc := range map[string]struct {
		places []place
		want   map[string]string
	}{
		"none":                       {want: map[string]string{}},
		"one region":                 {places: []place{{"z1", "r"}, {"z2", "r"}}, want: map[string]string{"z1": "r", "z2": "r", "": "r"}},
		"two regions":                {places: []place{{"z1", "r1"}, {"z2", "r2"}}, want: map[string]string{"z1": "r1", "z2": "r2", "": ""}},
		"a zone in two regions":      {places: []place{{"z1", "r1"}, {"z1", "r2"}, {"z2", "r2"}}, want: map[string]string{"z1": "", "z2": "r2", "": ""}},
		"a zone in three regions":    {places: []place{{"z1", "r1"}, {"z1", "r2"}, {"z1", "r3"}}, want: map[string]string{"z1": "", "": ""}},
		"a region without zones":     {places: []place{{"", "r"}}, want: map[string]string{"": "r"}},
		"a zone without a region":    {places: []place{{"z1", ""}}, want: map[string]string{}},
		"a Node without its region":  {places: []place{{"z1", ""}, {"z1", "r"}}, want: map[string]string{"z1": "r", "": "r"}},
		"two regions, without zones": {places: []place{{"", "r1"}, {"", "r2"}}, want: map[string]string{"": ""}},
	} {
		t.Run(name, func(t *testing.T) {
			for range 5 {
				if diff := cmp.Diff(tc.want, derive(slices.Values(tc.places))); diff != "" {
					t.Errorf("(-want +have):\n%s", diff)
				}
				slices.Reverse(tc.places)
			}
		})
	}
}

func nodeIn(name, zone, region string, podCIDRs ...string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyZone: zone, corev1.LabelTopologyRegion: region}},
		Spec:       corev1.NodeSpec{PodCIDRs: podCIDRs},
	}
}

// newNodes returns Nodes without a server. They call changed when pod CIDRs change.
func newNodes(t *testing.T, changed func()) *Nodes {
	t.Helper()
	n, err := New(fake.NewClientBuilder().Build(), changed, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A change of a Node has the Services reconciled only if it changes the region of a zone, and once a controller has started.
func TestChanges(t *testing.T) {
	n := newNodes(t, func() {})
	notified := 0
	src := n.Source(func() []clusterset.ServiceName { notified++; return nil })
	fill := func(nodes ...any) {
		t.Helper()
		if err := n.cache.Replace(nodes, "1"); err != nil {
			t.Fatal(err)
		}
	}
	fill(nodeIn("n1", "z1", "r1"), nodeIn("n2", "z1", "r1"))
	if notified > 0 {
		t.Error("no controller uses the regions yet")
	}
	if err := src.(interface{ WaitForSync(context.Context) error }).WaitForSync(t.Context()); err != nil { //nolint:forcetypeassert // controllers require it
		t.Fatal(err)
	}
	steps := []struct {
		name     string
		change   func(any) error
		node     *corev1.Node
		notified int
		region   string // of z1
	}{
		{"another Node of the zone", n.cache.Add, nodeIn("n3", "z1", "r1"), 0, "r1"},
		{"one less", n.cache.Delete, nodeIn("n3", "z1", "r1"), 0, "r1"},
		{"another zone", n.cache.Add, nodeIn("n4", "z2", "r1"), 1, "r1"},
		{"a Node of the zone in another region", n.cache.Update, nodeIn("n2", "z1", "r2"), 1, ""},
		{"and back", n.cache.Update, nodeIn("n2", "z1", "r1"), 1, "r1"},
		{"a Node without labels", n.cache.Add, nodeIn("n5", "", ""), 0, "r1"},
		{"one is left", n.cache.Delete, nodeIn("n1", "z1", "r1"), 0, "r1"},
		{"the last one", n.cache.Delete, nodeIn("n2", "z1", "r1"), 1, ""},
	}
	for _, s := range steps {
		notified = 0
		if err := s.change(s.node); err != nil {
			t.Fatal(err)
		}
		if notified != s.notified || n.RegionOf("z1") != s.region {
			t.Errorf("%s: notified %d times, want %d; region %q, want %q", s.name, notified, s.notified, n.RegionOf("z1"), s.region)
		}
	}
}

// A controller starts without regions if the Nodes cannot be read. The Services are reconciled when they can.
func TestUnreadableNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNodes(t, func() {})
		notified := 0
		src := n.Source(func() []clusterset.ServiceName { notified++; return nil }).(interface{ WaitForSync(context.Context) error }) //nolint:forcetypeassert // controllers require it
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := src.WaitForSync(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("a controller that stops starts: %v", err)
		}
		began := time.Now()
		if err := src.WaitForSync(t.Context()); err != nil || time.Since(began) != readTimeout {
			t.Errorf("it starts after %s: %v", time.Since(began), err)
		}
		if err := n.cache.Replace([]any{client.Object(nodeIn("n1", "z1", "r1"))}, "1"); err != nil || notified != 1 || n.RegionOf("z1") != "r1" {
			t.Errorf("notified %d times, and z1 is in %q: %v", notified, n.RegionOf("z1"), err)
		}
	})
}

// The pod CIDRs are unknown until the Nodes have been read. Their changes are told, other changes of a Node are not.
func TestPodCIDRs(t *testing.T) {
	told := 0
	n := newNodes(t, func() { told++ })
	if all, known := n.PodCIDRs(); known {
		t.Errorf("%v are known before the Nodes have been read", all)
	}
	if err := n.cache.Replace([]any{nodeIn("n1", "z1", "r1", "10.1.0.0/24", "fd00:1::/64")}, "1"); err != nil {
		t.Fatal(err)
	}
	steps := []struct {
		name   string
		change func(any) error
		node   *corev1.Node
		told   int
		want   []string
	}{
		{"nothing", func(any) error { return nil }, nil, 0, []string{"10.1.0.0/24", "fd00:1::/64"}},
		{"another zone", n.cache.Update, nodeIn("n1", "z2", "r1", "10.1.0.0/24", "fd00:1::/64"), 0, []string{"10.1.0.0/24", "fd00:1::/64"}},
		{"a Node without any yet", n.cache.Add, nodeIn("n2", "z1", "r1"), 0, []string{"10.1.0.0/24", "fd00:1::/64"}},
		{"which gets one", n.cache.Update, nodeIn("n2", "z1", "r1", "10.1.1.0/24"), 1, []string{"10.1.0.0/24", "10.1.1.0/24", "fd00:1::/64"}},
		{"one is gone", n.cache.Delete, nodeIn("n1", "z2", "r1"), 1, []string{"10.1.1.0/24"}},
	}
	for _, s := range steps {
		told = 0
		if err := s.change(s.node); err != nil {
			t.Fatal(err)
		}
		all, known := n.PodCIDRs()
		var have []string
		for _, p := range all {
			have = append(have, p.String())
		}
		slices.Sort(have)
		if !known || told != s.told || !slices.Equal(have, s.want) {
			t.Errorf("%s: %v (known: %t), want %v; told %d times, want %d", s.name, have, known, s.want, told, s.told)
		}
	}
}
