package controller

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/service"
	"github.com/isthmus-net/isthmus/tools/hostile"
)

const seedVariable = "ISTHMUS_HOSTILE_SEED"

// bystanders are the names of Services beside those of a hostile tenant: two with addresses of a list, one with Neutron's.
var bystanders = []string{"bystander-0", "bystander-1", "bystander-2"}

// fuzz is a cluster with gateways in which a tenant writes hostile Services and EndpointSlices, and an administrator wrong
// GatewayNodes.
type fuzz struct {
	*testbed

	round int
	vips  map[string][]string // of the bystanders
	ports map[string]string   // their port annotations
	scene hostile.Scene
}

// Hostile objects of a tenant, and wrong GatewayNodes, do not change what other Services are served with: their endpoints follow
// each change, and they keep their addresses, whether or not the controller is restarted. Every gateway accepts its state.
//
// The test is the counterpart of e2e/bystanders for gateways; FuzzAdmit of package desired is that for the gateways' agents.
// [seedVariable] draws other objects than those of seed 1.
func TestHostileTenant(t *testing.T) {
	f := newFuzz(t)
	seed, total := uint64(1), 80
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		seed, total = rand.Uint64N(1_000_000), 3000
	}
	if text := os.Getenv(seedVariable); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		f.noError(err)
	}
	t.Logf("%s=%d", seedVariable, seed)
	g := hostile.Generator{Kinds: hostile.GatewayKinds(), Scene: f.scene, Seed: seed}
	applied, refused := 0, 0
	for number := 0; applied < total; {
		var batch []hostile.Object
		for range 8 {
			objects, err := g.Draw(number)
			f.noError(err)
			batch = append(batch, objects...)
			number++
		}
		n, harm := f.trial(batch)
		if harm != nil {
			t.Fatalf("hostile objects do harm: %v\n%s", harm, f.shrunk(batch))
		}
		applied, refused = applied+len(batch), refused+n
	}
	t.Logf("%d objects, %d refused by the API server", applied, refused)
}

func newFuzz(t *testing.T) *fuzz {
	t.Helper()
	f := &fuzz{testbed: newAPITestbed(t), vips: map[string][]string{}, ports: map[string]string{}}
	f.noError(f.Sync(t.Context()))
	for i, name := range bystanders {
		change := inList
		if i == 2 {
			change = annotation(service.AnnotationPool, "public")
		}
		s := f.newService(name, change, 80, 443)
		s.UID = ""
		f.create(s, f.endpointSlice(name, []int32{80, 443}, f.endpoint(i)))
	}
	f.noError(f.Refresh(t.Context()))
	f.noError(f.converge())
	f.scene = hostile.Scene{
		Tenants: []hostile.Place{{Cluster: "a", Namespace: f.ns}}, Member: "a", Others: []string{"b"}, Namespace: f.ns, Services: []string{"hostile-a", "hostile-b"},
		Pods:    map[string][]netip.Prefix{"a": {netip.MustParsePrefix("10.66.0.0/16")}},
		Foreign: []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("10.1.0.1")}, Now: time.Now().UTC(), MaxPorts: 100,
	}
	for _, name := range bystanders {
		s := f.get(name)
		f.vips[name], f.ports[name] = addresses(s), s.Annotations[service.AnnotationPort]
		for _, text := range f.vips[name] {
			f.scene.Foreign = append(f.scene.Foreign, netip.MustParseAddr(text))
		}
	}
	if err := f.harm(); err != nil {
		t.Fatalf("before any hostile object: %v", err)
	}
	return f
}

func (f *fuzz) endpoint(i int) string { return fmt.Sprintf("10.1.%d.%d", i, 1+f.round%250) }

// trial returns how many objects the API server refuses, and the harm that the others do.
func (f *fuzz) trial(objects []hostile.Object) (refused int, harm error) {
	f.t.Helper()
	var written []hostile.Object
	for _, o := range objects {
		var status apierrors.APIStatus
		switch err := f.api.Create(f.t.Context(), o.DeepCopy()); {
		case err == nil:
			written = append(written, o)
		case errors.As(err, &status):
			refused++
		default:
			f.t.Fatalf("write %s: %v", o, err)
		}
	}
	f.change()
	harm = f.settle(f.reconcile)
	if err := f.settle(func() { f.start(); _ = f.Sync(f.t.Context()) }); err != nil {
		harm = errors.Join(harm, fmt.Errorf("after a restart: %w", err))
	}
	for _, o := range written {
		f.remove(o)
	}
	f.change()
	if err := f.settle(f.reconcile); err != nil {
		harm = errors.Join(harm, fmt.Errorf("after the objects were removed: %w", err))
	}
	return refused, harm
}

// settle runs reconcile until nothing is wrong with the bystanders, three times at most.
func (f *fuzz) settle(reconcile func()) (harm error) {
	f.t.Helper()
	for range 3 {
		reconcile()
		if harm = f.harm(); harm == nil {
			return nil
		}
	}
	return harm
}

// reconcile handles all Services. Errors of hostile objects are none of the test, except where they stop the others.
func (f *fuzz) reconcile() {
	f.t.Helper()
	_ = f.Refresh(f.t.Context())
	for _, name := range f.names() {
		_ = f.Handle(f.t.Context(), name)
	}
	_ = f.Clean(f.t.Context())
}

// change replaces the endpoints of the bystanders.
func (f *fuzz) change() {
	f.t.Helper()
	f.round++
	for i, name := range bystanders {
		slice := f.endpointSlice(name, []int32{80, 443}, f.endpoint(i))
		patch, err := json.Marshal(map[string]any{"endpoints": slice.Endpoints})
		f.noError(err)
		f.noError(f.api.Patch(f.t.Context(), slice, client.RawPatch(types.MergePatchType, patch)))
	}
}

// harm returns what is wrong with the bystanders.
func (f *fuzz) harm() error {
	f.t.Helper()
	var errs []error
	for i, name := range bystanders {
		s := f.get(name)
		if !slices.Equal(addresses(s), f.vips[name]) || s.Annotations[service.AnnotationPort] != f.ports[name] {
			errs = append(errs, fmt.Errorf("%s has port %s with %v, before %s with %v", name, s.Annotations[service.AnnotationPort], addresses(s), f.ports[name], f.vips[name]))
		}
		if c := meta.FindStatusCondition(s.Status.Conditions, service.ConditionMapped); c == nil || c.Reason != service.ReasonMapped {
			errs = append(errs, fmt.Errorf("%s says %+v", name, c))
		}
		want := []string{}
		for _, family := range s.Spec.IPFamilies {
			for _, port := range []int{80, 443} {
				line := fmt.Sprintf("%d/TCP", port)
				if family == corev1.IPv4Protocol {
					line += fmt.Sprintf(" %s:%d", f.endpoint(i), port+8000)
				}
				want = append(want, line)
			}
		}
		for _, gateway := range []string{"gw1", "gw2"} {
			if have := f.at(gateway, name); !slices.Equal(have, want) {
				errs = append(errs, fmt.Errorf("gateway %s serves %s with %q, want %q", gateway, name, have, want))
			}
		}
	}
	for name, state := range f.gateways.states {
		if faults := state.Validate(); len(faults) > 0 {
			errs = append(errs, fmt.Errorf("gateway %s refuses its state: %w", name, faults))
		}
	}
	return errors.Join(errs...)
}

// at returns the ports of a Service at a gateway, with their backends.
func (f *fuzz) at(gateway, name string) (all []string) {
	for _, line := range f.servedAt(gateway, name) {
		_, rest, _ := strings.Cut(line, " ")
		all = append(all, rest)
	}
	return all
}

// remove deletes a hostile object, whatever finalizers it has.
func (f *fuzz) remove(o hostile.Object) {
	f.t.Helper()
	obj := o.DeepCopy()
	f.noError(client.IgnoreNotFound(f.api.Delete(f.t.Context(), obj)))
	if len(o.GetFinalizers()) > 0 && !slices.Contains(o.GetFinalizers(), service.Finalizer) {
		f.noError(client.IgnoreNotFound(f.api.Patch(f.t.Context(), obj, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))))
	}
}

// shrunk describes the smallest part of objects that still does harm.
func (f *fuzz) shrunk(objects []hostile.Object) string {
	small, harm := hostile.Smallest(f.t.Context(), time.Minute, objects, func(some []hostile.Object) error {
		_, harm := f.trial(some)
		return harm
	})
	return fmt.Sprintf("%v\n%s", harm, hostile.Describe(small))
}
