package hostile

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// scene is a ClusterSet of the members east and west, in which crook is hostile.
func scene() Scene {
	return Scene{
		Tenants: []Place{{"east", "mischief"}, {"west", "shop"}}, System: "system", Member: "crook", Broker: "broker", Others: []string{"east", "west"},
		Namespace: "shop", Services: []string{"bystander-0", "bystander-1"}, Exported: []string{"elder-0"}, Next: "newcomer-1",
		Pods: map[string][]netip.Prefix{
			"crook": {netip.MustParsePrefix("10.66.0.0/16")}, "east": {netip.MustParsePrefix("10.101.0.0/16")}, "west": {netip.MustParsePrefix("10.119.0.0/16")},
		},
		Block: netip.MustParsePrefix("243.66.0.0/16"), Foreign: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), MaxPorts: 100,
	}
}

// A seed draws the same objects again, and every Kind is drawn.
func TestDrawIsRepeatable(t *testing.T) {
	t.Parallel()
	g := Generator{Kinds: slices.Concat(Kinds(), FederationKinds(), GatewayKinds()), Scene: scene(), Seed: 7}
	drawn := map[string]int{}
	for number := range 2000 {
		once, err := g.Draw(number)
		if err != nil {
			t.Fatal(err)
		}
		again, err := g.Draw(number)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(once, again); diff != "" {
			t.Fatalf("number %d differs (-once +again):\n%s", number, diff)
		}
		for _, o := range once {
			drawn[string(o.Actor)+" "+o.GetKind()]++
			if (o.Actor == Member) != (o.Cluster == "") {
				t.Errorf("%s: a %s writes in cluster %q", o, o.Actor, o.Cluster)
			}
			if _, err := json.Marshal(o.Object); err != nil {
				t.Errorf("%s: %v", o, err)
			}
		}
	}
	for _, want := range []string{
		"tenant Service", "tenant ServiceExport", "tenant ServiceImport", "tenant EndpointSlice",
		"member ExportRecord", "member EndpointSlice", "member ServiceImport", "member Lease",
		"child Service", "child ServiceImport", "child EndpointSlice", "child GatewayNode",
	} {
		if drawn[want] < 20 {
			t.Errorf("%s: drawn %d times; all: %v", want, drawn[want], drawn)
		}
	}
}

// Another component adds a kind as one entry.
func TestAnotherKind(t *testing.T) {
	t.Parallel()
	secret := Kind{Name: "Secret", Actor: Tenant, Draw: func(s *Source) []client.Object {
		return []client.Object{&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name()}}}
	}}
	objects, err := Generator{Kinds: []Kind{secret}, Scene: scene(), Seed: 1}.Draw(0)
	if err != nil || len(objects) != 1 || objects[0].GetKind() != "Secret" || objects[0].Cluster == "" {
		t.Errorf("drawn %v, %v", objects, err)
	}
}

// object returns one with the fields in text, a JSON object.
func object(t *testing.T, name, text string) Object {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := json.Unmarshal(fmt.Appendf(nil, `{"kind": "X", "metadata": {"name": %q}, "spec": %s}`, name, text), &u.Object); err != nil {
		t.Fatal(err)
	}
	return Object{Unstructured: u}
}

// A failure that needs one field of one object among ten, and another object, shrinks to these.
func TestShrink(t *testing.T) {
	t.Parallel()
	var objects []Object
	for i := range 10 {
		objects = append(objects, object(t, fmt.Sprintf("o%d", i), `{"labels": {"my key": "v", "ok": "v"}, "ports": [1, 2, 65536, 4], "note": "`+strings.Repeat("x", 100)+`"}`))
	}
	tries := 0
	fails := func(try []Object) bool {
		tries++
		var third, seventh bool
		for _, o := range try {
			labels, _, _ := unstructured.NestedMap(o.Object, "spec", "labels")
			ports, _, _ := unstructured.NestedSlice(o.Object, "spec", "ports")
			_, bad := labels["my key"]
			for _, p := range ports {
				third = third || o.GetName() == "o3" && bad && p == 65536.0
			}
			seventh = seventh || o.GetName() == "o7"
		}
		return third && seventh
	}
	have := Shrink(objects, fails)
	want := []Object{object(t, "o3", `{"labels": {"my key": "v"}, "ports": [65536]}`), object(t, "o7", `{}`)}
	delete(want[1].Object, "spec")
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("shrunk (-want +have):\n%s", diff)
	}
	if tries > 150 {
		t.Errorf("%d tries", tries)
	}
	if len(objects) != 10 || objects[3].Object["spec"].(map[string]any)["note"] == nil {
		t.Error("the input changed")
	}
}
