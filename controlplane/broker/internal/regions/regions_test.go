package regions

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

func node(name, zone, region string) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Name: name, Labels: map[string]string{corev1.LabelTopologyZone: zone, corev1.LabelTopologyRegion: region},
	}}
}

// A change of a Node has the Services reconciled only if it changes the region of a zone, and once a controller has started.
func TestChanges(t *testing.T) {
	r, err := New(fake.NewClientBuilder().Build(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	notified := 0
	src := r.Source(func() []clusterset.ServiceName { notified++; return nil })
	fill := func(nodes ...any) {
		t.Helper()
		if err := r.nodes.Replace(nodes, "1"); err != nil {
			t.Fatal(err)
		}
	}
	fill(node("n1", "z1", "r1"), node("n2", "z1", "r1"))
	if notified > 0 {
		t.Error("no controller uses the regions yet")
	}
	if err := src.(interface{ WaitForSync(context.Context) error }).WaitForSync(t.Context()); err != nil { //nolint:forcetypeassert // controllers require it
		t.Fatal(err)
	}
	steps := []struct {
		name     string
		change   func(any) error
		node     *metav1.PartialObjectMetadata
		notified int
		region   string // of z1
	}{
		{"another Node of the zone", r.nodes.Add, node("n3", "z1", "r1"), 0, "r1"},
		{"one less", r.nodes.Delete, node("n3", "z1", "r1"), 0, "r1"},
		{"another zone", r.nodes.Add, node("n4", "z2", "r1"), 1, "r1"},
		{"a Node of the zone in another region", r.nodes.Update, node("n2", "z1", "r2"), 1, ""},
		{"and back", r.nodes.Update, node("n2", "z1", "r1"), 1, "r1"},
		{"a Node without labels", r.nodes.Add, node("n5", "", ""), 0, "r1"},
		{"one is left", r.nodes.Delete, node("n1", "z1", "r1"), 0, "r1"},
		{"the last one", r.nodes.Delete, node("n2", "z1", "r1"), 1, ""},
	}
	for _, s := range steps {
		notified = 0
		if err := s.change(s.node); err != nil {
			t.Fatal(err)
		}
		if notified != s.notified || r.InZone("z1") != s.region {
			t.Errorf("%s: notified %d times, want %d; region %q, want %q", s.name, notified, s.notified, r.InZone("z1"), s.region)
		}
	}
}

// A controller starts without regions if the Nodes cannot be read. The Services are reconciled when they can.
func TestUnreadableNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, err := New(fake.NewClientBuilder().Build(), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		notified := 0
		src := r.Source(func() []clusterset.ServiceName { notified++; return nil }).(interface{ WaitForSync(context.Context) error }) //nolint:forcetypeassert // controllers require it
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := src.WaitForSync(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("a controller that stops starts: %v", err)
		}
		began := time.Now()
		if err := src.WaitForSync(t.Context()); err != nil || time.Since(began) != nodesTimeout {
			t.Errorf("it starts after %s: %v", time.Since(began), err)
		}
		if err := r.nodes.Replace([]any{client.Object(node("n1", "z1", "r1"))}, "1"); err != nil || notified != 1 || r.InZone("z1") != "r1" {
			t.Errorf("notified %d times, and z1 is in %q: %v", notified, r.InZone("z1"), err)
		}
	})
}
