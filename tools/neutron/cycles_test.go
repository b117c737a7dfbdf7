package neutron_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/controller"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/service"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/neutron"
)

// names is the maximum number of Services in a cluster. 4 Services with up to 2 address pairs each fit into the 10 pairs of a
// port, one of which is foreign.
const names = 4

// foreign is an address pair that another user has set at the gateways' ports.
var foreign = netip.MustParsePrefix("198.51.100.7/32")

// cycles creates, changes and deletes Services of two clusters in one project at random. The controllers are killed at random
// requests, and Neutron crashes once. After each cycle Neutron matches the Services, and neither cluster has written to an
// object of the other.
func cycles(t *testing.T, cloud *neutron.Cloud, ids neutron.IDs) {
	t.Helper()
	const count = 200
	a := newTenant(t, "cluster-a", &servers[0], cloud, ids, 0)
	b := newTenant(t, "cluster-b", &servers[1], cloud, ids, 1)
	both := func(do func(*tenant) error) {
		t.Helper()
		var group errgroup.Group
		for _, x := range []*tenant{a, b} {
			group.Go(func() error {
				if err := do(x); err != nil {
					return fmt.Errorf("%s: %w", x.id, err)
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	begin := time.Now()
	for i := range count {
		if i == count/2 {
			if err := errors.Join(a.change(t.Context()), b.change(t.Context()), cloud.Kill(t.Context(), neutron.Neutron)); err != nil {
				t.Fatal(err)
			}
			if err := cloud.Start(t.Context(), neutron.Neutron); err != nil {
				t.Fatal(err)
			}
		}
		both(func(x *tenant) error { return x.cycle(t.Context()) })
		if i%20 == 19 {
			t.Logf("%d cycles, %d kills, %.0f s", i+1, a.kills+b.kills, time.Since(begin).Seconds())
		}
	}
	both(func(x *tenant) error { return x.leave(t.Context()) })
	a.alive.stop()
	b.alive.stop()
	for _, x := range []*tenant{a, b} {
		for id := range x.wrote {
			other := a
			if x == a {
				other = b
			}
			if other.wrote[id] {
				t.Errorf("both clusters wrote to %s", id)
			}
		}
	}
	t.Logf("%d cycles in %.0f s: %d changes, %d kills at a request; clusters wrote to %d and %d objects of Neutron",
		count, time.Since(begin).Seconds(), a.changes+b.changes, a.kills+b.kills, len(a.wrote), len(b.wrote))
}

// tenant is a cluster with a controller, in a project that it shares with another tenant.
type tenant struct {
	id       string
	config   *rest.Config
	clouds   string
	settings controller.Settings
	api      client.Client
	cloud    *openstack.Client // for the test's own requests
	gateway  string            // its port in Neutron
	random   *rand.Rand
	alive    *life
	wrote    map[string]bool

	changes, kills int
}

func newTenant(t *testing.T, id string, server *apitest.Server, cloud *neutron.Cloud, ids neutron.IDs, gateway int) *tenant {
	t.Helper()
	kinds := runtime.NewScheme()
	x := &tenant{
		id: id, config: server.Config(t), clouds: cloud.CloudsYAML(), gateway: ids.Gateways[gateway].Port,
		cloud: connect(t, cloud, neutron.User, id), random: rand.New(rand.NewPCG(11, uint64(gateway))), wrote: map[string]bool{},
		settings: controller.Settings{
			Cluster: id, FloatingIPs: "allocate", AddressPairs: controller.PairPerVIP,
			Pools: []controller.Pool{{Name: "public", Announce: desired.ByNone, Return: desired.Masquerade, Neutron: &controller.NeutronPool{
				Network: ids.Network, IPv4Subnet: ids.Subnets[0], IPv6Subnet: ids.Subnets[1], FloatingNetwork: ids.External,
			}}},
		},
	}
	x.config.QPS = -1
	var err error
	x.api, err = client.New(x.config, client.Options{Scheme: kinds})
	node := &v1alpha1.GatewayNode{ObjectMeta: metav1.ObjectMeta{Name: "gw"}, Spec: v1alpha1.GatewayNodeSpec{URL: "https://127.0.0.1:1", NeutronPort: x.gateway}}
	if err := errors.Join(err, corev1.AddToScheme(kinds), coordinationv1.AddToScheme(kinds), v1alpha1.AddToScheme(kinds),
		x.cloud.SetAddressPairs(t.Context(), x.gateway, nil, []netip.Prefix{foreign}), x.api.Create(t.Context(), node), x.start(t.Context(), 0)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.alive.stop() }) // the last one
	return x
}

// life is one run of a controller.
type life struct {
	*wire
	cancel context.CancelFunc
	ended  chan struct{} // closed
}

// stop shuts the controller down, unless it was killed, and waits until it has ended. It ignores the controller's error.
func (l *life) stop() {
	l.cancel()
	<-l.ended
}

// start starts a controller without a cache, and kills it at its nth request, or never if n is 0. It deletes the predecessor's
// Lease, so that the controller does not wait for its expiry.
func (x *tenant) start(ctx context.Context, n int) error {
	l := &life{wire: newWire(x.wrote), ended: make(chan struct{})}
	l.dieAt(n, n%2 == 0)
	cloud, err := openstack.Connect(ctx, openstack.Config{Cloud: neutron.User, File: x.clouds, Cluster: x.id, Wrap: l.neutron})
	if err != nil {
		return err
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "isthmus-gateway-controller"}}
	if err := client.IgnoreNotFound(x.api.Delete(ctx, lease)); err != nil {
		return err
	}
	local := rest.CopyConfig(x.config)
	local.Wrap(l.kubernetes)
	is, err := controller.New(controller.Config{
		Settings: x.settings, Local: local, Namespace: metav1.NamespaceDefault, Cloud: cloud,
		TLS: func(string) *tls.Config { return new(tls.Config) }, Log: slog.New(slog.DiscardHandler),
	})
	ctx, l.cancel = context.WithCancel(ctx)
	x.alive = l
	go func() {
		select {
		case <-l.dead:
			l.cancel()
		case <-ctx.Done():
		}
	}()
	go func() {
		if err == nil { // otherwise it was killed during API discovery
			_ = is.Run(ctx)
		}
		close(l.ended)
	}()
	return nil
}

// cycle changes Services and kills the controller during the changes, and sometimes its successor too. Then it waits until
// Neutron matches the Services.
func (x *tenant) cycle(ctx context.Context) error {
	x.alive.dieAt(x.random.IntN(40)+1, x.random.IntN(2) == 0)
	if err := x.change(ctx); err != nil {
		return err
	}
	for {
		err := x.await(ctx)
		if !errors.Is(err, errDead) {
			x.alive.dieAt(0, false)
			return err
		}
		x.kills++
		x.alive.stop()
		n := 0
		if x.random.IntN(3) == 0 {
			n = x.random.IntN(60) + 1
		}
		if err := x.start(ctx, n); err != nil {
			return err
		}
	}
}

// leave deletes all Services, and checks that none of their objects is left.
func (x *tenant) leave(ctx context.Context) error {
	if err := x.api.DeleteAllOf(ctx, &corev1.Service{}, client.InNamespace(metav1.NamespaceDefault), client.MatchingLabels{"by": "test"}); err != nil {
		return err
	}
	if err := x.await(ctx); err != nil {
		return err
	}
	orphans, err := controller.Sweep(ctx, x.api, x.cloud, true)
	if err == nil && len(orphans) > 0 {
		err = fmt.Errorf("the sweeper finds %+v", orphans)
	}
	return err
}

// change creates, changes or deletes up to three Services.
func (x *tenant) change(ctx context.Context) error {
	for range x.random.IntN(3) + 1 {
		x.changes++
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: fmt.Sprintf("s%d", x.random.IntN(names))}}
		err := x.api.Get(ctx, client.ObjectKeyFromObject(s), s)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		is := s.DeepCopy()
		if err == nil && x.random.IntN(3) == 0 {
			if err := client.IgnoreNotFound(x.api.Delete(ctx, s)); err != nil {
				return err
			}
			continue
		}
		s.Labels = map[string]string{"by": "test"}
		if s.Annotations == nil {
			s.Annotations = map[string]string{}
		}
		s.Annotations[service.AnnotationFloatingIP] = []string{"none", "allocate"}[x.random.IntN(2)]
		s.Spec.Ports = []corev1.ServicePort{{Name: "p", Protocol: corev1.ProtocolTCP, Port: int32(80 + x.random.IntN(2))}}
		if err == nil {
			err = x.api.Patch(ctx, s, client.MergeFrom(is))
		} else {
			s.Spec.Type, s.Spec.LoadBalancerClass = corev1.ServiceTypeLoadBalancer, new(service.Class)
			s.Spec.IPFamilyPolicy = new([]corev1.IPFamilyPolicy{corev1.IPFamilyPolicySingleStack, corev1.IPFamilyPolicyRequireDualStack}[x.random.IntN(2)])
			err = x.api.Create(ctx, s)
		}
		if client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}

// await waits until the tenant is settled or the controller has been killed.
func (x *tenant) await(ctx context.Context) error {
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	giveUp := time.After(5 * time.Minute)
	for {
		err := x.settled(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-x.alive.dead:
			return errDead
		case <-giveUp:
			return fmt.Errorf("after five minutes %w", err)
		case <-again.C:
		}
	}
}

// settled returns the first difference between the Services, their status and the objects in Neutron.
func (x *tenant) settled(ctx context.Context) error {
	var list corev1.ServiceList
	if err := x.api.List(ctx, &list, client.MatchingLabels{"by": "test"}); err != nil {
		return err
	}
	used := map[string][]corev1.Service{}
	for _, s := range list.Items {
		switch in := s.Status.LoadBalancer.Ingress; {
		case s.DeletionTimestamp != nil:
			return fmt.Errorf("service %s is not deleted yet", s.Name)
		case len(in) != len(s.Spec.IPFamilies), len(in[0].Ports) != 1, in[0].Ports[0].Port != s.Spec.Ports[0].Port:
			return fmt.Errorf("service %s has the addresses %+v", s.Name, in)
		}
		id := s.Annotations[service.AnnotationPort]
		for _, o := range used[id] {
			if o.Spec.Ports[0].Port == s.Spec.Ports[0].Port {
				return fmt.Errorf("services %s and %s collide", o.Name, s.Name)
			}
		}
		used[id] = append(used[id], s)
	}
	return x.inNeutron(ctx, used)
}

// inNeutron returns the first difference between the objects in Neutron and used, the Services of each port.
func (x *tenant) inNeutron(ctx context.Context, used map[string][]corev1.Service) error {
	ports, err := x.cloud.Ports(ctx)
	floating, err2 := x.cloud.FloatingIPs(ctx)
	pairs, err3 := x.cloud.AddressPairs(ctx, x.gateway)
	if err := errors.Join(err, err2, err3); err != nil {
		return err
	}
	leads := map[string]netip.Addr{}
	for _, f := range floating {
		if len(used[f.Port]) == 0 {
			return fmt.Errorf("floating IP %+v has no owner", f)
		}
		leads[f.Port] = f.Addr
	}
	vips := map[netip.Prefix]bool{foreign: true}
	for _, p := range ports {
		if len(used[p.ID]) == 0 {
			return fmt.Errorf("port %+v has no owner", p)
		}
		for _, s := range used[p.ID] {
			var want []string
			for _, f := range s.Spec.IPFamilies {
				addr := p.Addrs[slices.IndexFunc(p.Addrs, func(a netip.Addr) bool { return a.Is4() == (f == corev1.IPv4Protocol) })]
				vips[netip.PrefixFrom(addr, addr.BitLen())] = true
				if f == corev1.IPv4Protocol && s.Annotations[service.AnnotationFloatingIP] == "allocate" {
					addr = leads[p.ID]
				}
				want = append(want, addr.String())
			}
			for i, in := range s.Status.LoadBalancer.Ingress {
				if in.IP != want[i] {
					return fmt.Errorf("service %s is reached at %s, in Neutron at %s", s.Name, in.IP, want[i])
				}
			}
		}
		delete(used, p.ID)
	}
	if len(used) > 0 {
		return fmt.Errorf("services have ports that are not there: %v", slices.Sorted(maps.Keys(used)))
	}
	want := slices.SortedFunc(maps.Keys(vips), netip.Prefix.Compare)
	slices.SortFunc(pairs, netip.Prefix.Compare)
	if !slices.Equal(pairs, want) {
		return fmt.Errorf("the gateway's port lets %v pass, want %v", pairs, want)
	}
	return nil
}
