package simulation

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// exporter holds the exports of one member as the member's own EndpointSlices.
type exporter struct {
	id     clusterset.ClusterID
	slices []*source
	// write creates an EndpointSlice of the member, or updates the given version, at the place where a change is observed
	// first. It returns the new version.
	write func(ctx context.Context, began time.Time, es *discoveryv1.EndpointSlice, version string) (string, error)
	// self means that a change starts with the call of write. Otherwise a watch observes its start.
	self bool

	mu    sync.Mutex // guards fresh
	fresh netip.Addr // the next unused address
	last  netip.Addr
}

// newExporter returns an exporter with the addresses of block.
func newExporter(id clusterset.ClusterID, block netip.Prefix) *exporter {
	first := block.Addr().Next() // the network's own address is unused
	return &exporter{id: id, fresh: first, last: nth(block.Addr(), 1<<(32-block.Bits())-2)}
}

// address returns an unused address.
func (x *exporter) address() (netip.Addr, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.fresh.Compare(x.last) > 0 {
		return netip.Addr{}, fmt.Errorf("member %s has no more addresses; use shorter runs", x.id)
	}
	a := x.fresh
	x.fresh = a.Next()
	return a, nil
}

// add gives x a Service with n endpoints, in the slices that the EndpointSlice controller would create.
func (x *exporter) add(name clusterset.ServiceName, n int) error {
	for part := 0; n > 0; part++ {
		s := &source{of: x, service: name, part: part}
		for range min(n, perSlice) {
			a, err := x.address()
			if err != nil {
				return err
			}
			s.addrs = append(s.addrs, a)
		}
		n -= len(s.addrs)
		x.slices = append(x.slices, s)
	}
	return nil
}

// source is one EndpointSlice of an exporter.
type source struct {
	of      *exporter
	service clusterset.ServiceName
	part    int

	mu      sync.Mutex // held during a write
	addrs   []netip.Addr
	next    int    // the endpoint that changes next
	version string // resource version; "" before its creation
}

// create creates the slice.
func (s *source) create(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	version, err := s.of.write(ctx, time.Now(), s.object(), "")
	s.version = version
	return err
}

// change replaces one endpoint by one with another address, as when a pod is replaced, and tells t about it.
func (s *source) change(ctx context.Context, t *tracker) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, err := s.of.address()
	if err != nil {
		return err
	}
	s.addrs[s.next] = a
	s.next = (s.next + 1) % len(s.addrs)
	t.begin(s, a)
	now := time.Now()
	if s.of.self {
		t.from(a, now)
	}
	s.version, err = s.of.write(ctx, now, s.object(), s.version)
	return err
}

// object returns the slice as the EndpointSlice controller writes it.
func (s *source) object() *discoveryv1.EndpointSlice {
	es := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.service.Namespace,
			Name:      fmt.Sprintf("%s-%05d", s.service.Name, s.part),
			Labels: map[string]string{
				discoveryv1.LabelServiceName: s.service.Name,
				discoveryv1.LabelManagedBy:   "endpointslice-controller.k8s.io",
			},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))}},
	}
	for i, a := range s.addrs {
		b := a.As4()
		es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{a.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			NodeName:   new(fmt.Sprintf("node-%02d", i%50)),
			Zone:       new(fmt.Sprintf("zone-%d", i%3)),
			TargetRef: &corev1.ObjectReference{
				Kind: "Pod", Namespace: s.service.Namespace,
				Name: fmt.Sprintf("%s-7d9c6b5f4-%02x%02x%02x", s.service.Name, b[1], b[2], b[3]),
				UID:  types.UID(fmt.Sprintf("6f0e9a52-7c1b-4d7e-9d7b-0000%08x", b)),
			},
		})
	}
	return es
}

// namespace returns the name of the i-th namespace.
func namespace(i int) string { return fmt.Sprintf("scale-%d", i) }

// names returns the Services that the x-th exporter exports.
func (w *ClusterSet) names(x int) []clusterset.ServiceName {
	var names []clusterset.ServiceName
	for i := range w.cfg.Exports {
		name := fmt.Sprintf("web-%05d", i)
		if w.cfg.Distinct {
			name += "-" + string(w.exporters[x].id)
		}
		names = append(names, clusterset.ServiceName{Namespace: namespace(i % namespaces), Name: name})
	}
	return names
}

// service and export return the objects that a user creates in a member to export a Service.
func service(name clusterset.ServiceName) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
		Spec: corev1.ServiceSpec{
			Type:       corev1.ServiceTypeClusterIP,
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(8080)}},
		},
	}
}

func export(name clusterset.ServiceName) *v1beta1.ServiceExport {
	return &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
}

// record returns the export record of member id for a Service with the ClusterSetIP ip.
func record(id clusterset.ClusterID, name clusterset.ServiceName, ip netip.Addr) (*v1alpha1.ExportRecord, error) {
	x := export(name)
	x.CreationTimestamp = metav1.NewTime(joined.Add(time.Hour))
	e, _, err := mcs.Export(service(name), x, id)
	if err != nil {
		return nil, err
	}
	e.IPs = []netip.Addr{ip}
	e.WantsIP, e.AgreedIP = mcs.WantsIP(x, e.Type, true), clusterset.Enabled
	r := mcs.ExportRecord(e)
	r.Namespace = v1alpha1.DefaultBrokerNamespace
	mcs.SetChangedAt(r, time.Now())
	return r, nil
}

// aggregate returns the broker's aggregate of a Service that the members ids export.
func aggregate(ids []clusterset.ClusterID, name clusterset.ServiceName, ip netip.Addr) *v1beta1.ServiceImport {
	si := mcs.Aggregate(clusterset.Aggregate{
		Service: name, Type: clusterset.ClusterSetIP, IPs: []netip.Addr{ip}, AllocatedBy: ids[0], UseIP: clusterset.Enabled, Clusters: ids,
	})
	si.Namespace = v1alpha1.DefaultBrokerNamespace
	return si
}

// writeToBroker returns the write function of a simulated member, which writes a real member's records with the credentials of
// c.
func writeToBroker(c client.Client, id clusterset.ClusterID) func(context.Context, time.Time, *discoveryv1.EndpointSlice, string) (string, error) {
	return func(ctx context.Context, began time.Time, es *discoveryv1.EndpointSlice, version string) (string, error) {
		said := mcs.BrokerSlice(es, id)
		said.Namespace = v1alpha1.DefaultBrokerNamespace
		mcs.SetChangedAt(said, began)
		return write(ctx, c, said, version)
	}
}

// writeToMember returns the write function of a real member.
func writeToMember(c client.Client) func(context.Context, time.Time, *discoveryv1.EndpointSlice, string) (string, error) {
	return func(ctx context.Context, _ time.Time, es *discoveryv1.EndpointSlice, version string) (string, error) {
		return write(ctx, c, es, version)
	}
}

// write creates es, or updates the given version, and returns the new version.
func write(ctx context.Context, c client.Client, es *discoveryv1.EndpointSlice, version string) (string, error) {
	do := func() error { return c.Create(ctx, es) }
	if version != "" {
		es.ResourceVersion = version
		do = func() error { return c.Update(ctx, es) }
	}
	if err := do(); err != nil {
		return version, fmt.Errorf("write endpoint slice %s: %w", client.ObjectKeyFromObject(es), err)
	}
	if es.ResourceVersion == "" {
		return version, errors.New("the API server gave an endpoint slice no version")
	}
	return es.ResourceVersion, nil
}
