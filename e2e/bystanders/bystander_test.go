package bystanders

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/await"
)

// exporters are the members that export the bystanders; east is the older one. Every member imports them.
var exporters = []string{"east", "north"}

// bystander is a Service whose endpoints change in each round.
type bystander struct {
	name string
	// elder says that a hostile tenant exported the Service first. Its type and ports are the tenant's choice, so only the
	// endpoints in the importers' EndpointSlices are checked.
	elder  bool
	vips   []netip.Addr
	slices map[string]*discoveryv1.EndpointSlice // by exporter
}

const (
	seniors = 8 // bystanders that east exported first
	elders  = 2 // bystanders that a tenant of west exported first
)

func elderName(i int) string { return fmt.Sprintf("elder-%d", i) }

// addBystanders creates the bystanders, and the Services with which a hostile tenant came first.
func (w *testbed) addBystanders() {
	w.t.Helper()
	west := w.cluster("west")
	for i := range elders {
		svc, export := service(elderName(i)), serviceExport(elderName(i))
		w.create(west.tenant, svc, export)
		w.originals[keyOf("west", export)], w.originals[keyOf("west", svc)] = export, svc
		w.eventually(svc.Name+" is imported", func() error { _, err := w.imported(west, svc.Name); return err })
	}
	for i := range seniors {
		w.addBystander(fmt.Sprintf("bystander-%d", i), false)
	}
	for i := range elders {
		w.addBystander(elderName(i), true)
	}
	w.serveBystanders()
}

// addBystander creates a bystander, whose older exporter is east, or a tenant for an elder.
func (w *testbed) addBystander(name string, elder bool) {
	w.t.Helper()
	w.bystanders = append(w.bystanders, &bystander{name: name, elder: elder, slices: map[string]*discoveryv1.EndpointSlice{}})
	for _, id := range exporters { // one after the other: creation times have seconds, and the older export counts
		w.create(w.cluster(id), service(name), serviceExport(name))
		w.eventually(name+" is imported", func() error { _, err := w.imported(w.cluster("north"), name); return err })
	}
}

// serveBystanders gives the bystanders endpoints, and waits until agents serve them.
func (w *testbed) serveBystanders() {
	w.t.Helper()
	w.change()
	for _, b := range w.bystanders {
		si, err := w.imported(w.cluster("north"), b.name)
		w.noError(err)
		b.vips = nil
		for _, ip := range si.Spec.IPs {
			b.vips = append(b.vips, netip.MustParseAddr(ip))
		}
	}
	w.eventually("the agents serve the bystanders", func() error { return w.missing(w.wants()) })
}

func (w *testbed) cluster(id string) *cluster {
	return w.clusters[slices.IndexFunc(w.clusters, func(c *cluster) bool { return c.id == id })]
}

func service(name string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: name, Labels: map[string]string{"team": "bystanders"}},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}}},
	}
}

func serviceExport(name string) *v1beta1.ServiceExport {
	return &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: name}}
}

// imported returns a ServiceImport with an address.
func (w *testbed) imported(c *cluster, name string) (*v1beta1.ServiceImport, error) {
	si := &v1beta1.ServiceImport{}
	if err := c.mirror.Get(w.t.Context(), types.NamespacedName{Namespace: shop, Name: name}, si); err != nil {
		return nil, fmt.Errorf("in %s: %w", c.id, err)
	}
	if len(si.Spec.IPs) == 0 {
		return nil, fmt.Errorf("in %s, %s has no ClusterSetIP", c.id, name)
	}
	return si, nil
}

// change scales and replaces the endpoints of every bystander in both exporters, as the EndpointSlice controller would: two
// times of three in place, the third time by a new slice that replaces the old one.
func (w *testbed) change() {
	w.t.Helper()
	w.round++
	for i, b := range w.bystanders {
		for _, id := range exporters {
			w.changeIn(w.cluster(id), i, b)
		}
	}
	w.addNewcomer()
}

func (w *testbed) changeIn(c *cluster, i int, b *bystander) {
	w.t.Helper()
	ctx := w.t.Context()
	have := b.slices[c.id]
	want := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: shop, Name: fmt.Sprintf("%s-%d", b.name, w.round),
			Labels: map[string]string{discoveryv1.LabelServiceName: b.name, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(answerPort))}},
	}
	for n := range 1 + (w.round+i)%3 {
		want.Endpoints = append(want.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", numbers[c.id], i, 1+(3*w.round+n)%250)},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true)}, NodeName: new("node-1"), Zone: new("zone-1"),
		})
	}
	if have != nil && (w.round+i)%3 > 0 {
		want.ObjectMeta = have.ObjectMeta
		w.noError(c.Update(ctx, want))
	} else {
		w.noError(c.Create(ctx, want))
		if have != nil {
			w.noError(c.Delete(ctx, have))
		}
	}
	b.slices[c.id] = want
}

// newcomer is the name of the Service that east exports anew in each round.
func newcomer(round int) string { return fmt.Sprintf("newcomer-%d", round) }

// addNewcomer replaces the newcomer of the last round by another one: new Services must find a place, too.
func (w *testbed) addNewcomer() {
	w.t.Helper()
	c := w.cluster("east")
	for _, obj := range []client.Object{serviceExport(newcomer(w.round - 1)), service(newcomer(w.round - 1))} {
		w.noError(client.IgnoreNotFound(c.Delete(w.t.Context(), obj)))
	}
	w.create(c, service(newcomer(w.round)), serviceExport(newcomer(w.round)))
}

// want is a fact that must become true in one cluster.
type want struct {
	what  string
	check func() error
}

// wants returns the facts that must be true after the last change.
func (w *testbed) wants() []want {
	var all []want
	for _, c := range w.clusters {
		for _, b := range w.bystanders {
			all = append(all, want{fmt.Sprintf("%s in EndpointSlices of %s", b.name, c.id), func() error { return w.inSlices(c, b) }})
			if !b.elder {
				all = append(all, want{fmt.Sprintf("%s in the maps of %s", b.name, c.id), func() error { return w.inMaps(c, b) }})
			}
		}
		name := newcomer(w.round)
		all = append(all, want{fmt.Sprintf("%s in the maps of %s", name, c.id), func() error {
			si, err := w.imported(c, name)
			if err != nil {
				return err
			}
			_, ok, err := c.maps.Frontend(frontendOf(netip.MustParseAddr(si.Spec.IPs[0])))
			if err == nil && !ok {
				err = errors.New("no frontend")
			}
			return err
		}})
	}
	return all
}

func frontendOf(vip netip.Addr) lb.Address {
	return lb.Address{AddrPort: netip.AddrPortFrom(vip, 80), Protocol: clusterset.TCP}
}

// missing returns which of wants is not true, or nil.
func (w *testbed) missing(wants []want) error {
	for _, want := range wants {
		if err := want.check(); err != nil {
			return fmt.Errorf("%s: %w", want.what, err)
		}
	}
	return nil
}

// arrive waits until all of wants have been true, and returns how long that took since began. It gives up after limit.
func (w *testbed) arrive(began time.Time, wants []want, limit time.Duration) (time.Duration, error) {
	err := await.Poll(w.t.Context(), limit, func() (first error) {
		wants = slices.DeleteFunc(wants, func(want want) bool {
			err := want.check()
			if err != nil && first == nil {
				first = fmt.Errorf("%s: %w", want.what, err)
			}
			return err == nil
		})
		return first
	})
	return time.Since(began), err
}

// endpoints returns the addresses that exporter id serves b with, sorted.
func (b *bystander) endpoints(id string) []string {
	return addresses(b.slices[id])
}

func addresses(es *discoveryv1.EndpointSlice) []string {
	var all []string
	for _, e := range es.Endpoints {
		all = append(all, e.Addresses...)
	}
	return slices.Sorted(slices.Values(all))
}

// inSlices checks the imported EndpointSlices of b from each exporter.
func (w *testbed) inSlices(c *cluster, b *bystander) error {
	var list discoveryv1.EndpointSliceList
	err := c.mirror.List(w.t.Context(), &list, client.InNamespace(shop), client.MatchingLabels{v1beta1.LabelServiceName: b.name}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return err
	}
	have := map[string][]string{}
	for i := range list.Items {
		if es := &list.Items[i]; es.Labels[discoveryv1.LabelManagedBy] == managedBy {
			from := es.Labels[v1beta1.LabelSourceCluster]
			have[from] = append(have[from], addresses(es)...)
		}
	}
	for _, id := range exporters {
		if want := b.endpoints(id); !slices.Equal(want, slices.Sorted(slices.Values(have[id]))) {
			return fmt.Errorf("endpoints of %s are %v, want %v", id, have[id], want)
		}
	}
	return nil
}

// inMaps checks the slots of each frontend of b: they lead to exactly the endpoints of the exporters, each with a fair share,
// and perhaps to endpoints of other members.
func (w *testbed) inMaps(c *cluster, b *bystander) error {
	for _, vip := range b.vips {
		entry, ok, err := c.maps.Frontend(frontendOf(vip))
		switch {
		case err != nil:
			return err
		case !ok:
			return fmt.Errorf("no frontend %s", frontendOf(vip))
		case entry.Service != (clusterset.ServiceName{Namespace: shop, Name: b.name}):
			return fmt.Errorf("frontend %s belongs to %s", frontendOf(vip), entry.Service)
		}
		for _, id := range exporters {
			var have []string
			for _, be := range entry.Backends {
				if pods(id)[0].Contains(be.AddrPort.Addr()) {
					have = append(have, be.AddrPort.Addr().String())
				}
			}
			slices.Sort(have)
			if want := b.endpoints(id); !slices.Equal(want, slices.Compact(have)) {
				return fmt.Errorf("%s leads to %v of %s, want %v", frontendOf(vip), have, id, want)
			}
		}
		if err := fairShares(entry.Backends); err != nil {
			return fmt.Errorf("%s: %w", frontendOf(vip), err)
		}
	}
	return nil
}

// fairShares checks that each endpoint of an exporter has at least half as many of the slots as in an even distribution.
func fairShares(slots []lb.Address) error {
	counts := map[lb.Address]int{}
	for _, a := range slots {
		counts[a]++
	}
	for a, n := range counts {
		ours := slices.ContainsFunc(exporters, func(id string) bool { return pods(id)[0].Contains(a.AddrPort.Addr()) })
		if ours && 2*n*len(counts) < len(slots) {
			return fmt.Errorf("%s has %d of the %d slots that %d endpoints share", a, n, len(slots), len(counts))
		}
	}
	return nil
}

// measure changes the bystanders without hostile objects and returns how long the change took.
func (w *testbed) measure() time.Duration {
	w.t.Helper()
	w.change()
	took, err := w.arrive(time.Now(), w.wants(), patience)
	w.noError(err)
	return took
}

// measureBaseline measures a few changes without hostile objects.
func (w *testbed) measureBaseline() {
	w.t.Helper()
	w.baseline = 0
	for range 3 {
		w.baseline = max(w.baseline, w.measure())
	}
}

// allowed is how long a change may take beside hostile objects. The floor keeps a busy machine from failing the test.
func (w *testbed) allowed() time.Duration { return max(2*w.baseline, 2*time.Second) }

// pause waits for a moment, or until ctx ends.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
