package simulation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/bootstrap"
	"github.com/isthmus-net/isthmus/tools/apiserver"
	"github.com/isthmus-net/isthmus/tools/process"
)

// FederationConfig describes a federation to measure. It has real API servers in place of clusters, and a real
// isthmus-controller for each supervisor.
type FederationConfig struct {
	// Assets is a folder with kube-apiserver and etcd, Controller the program isthmus-controller.
	Assets, Controller string
	// Storage is the folder of etcd's files, which Close removes.
	Storage string
	// Members is the number of clusters, and Supervisors the number of supervisors among them.
	Members, Supervisors int
	// Services is the number of federated Services, each with a member Service in every member. Endpoints is the number of
	// endpoints of each member Service.
	Services, Endpoints int
	// ClusterSetIPs enables ClusterSetIPs. Policies is the number of replicated policies of each member.
	ClusterSetIPs bool
	Policies      int
	// Progress gets one line for each step.
	Progress io.Writer
}

// Federation is a formed federation in which everything is written. Its methods must not be called concurrently.
type Federation struct {
	set *ClusterSet
	cfg FederationConfig

	cost Cost

	mu   sync.Mutex
	seen map[netip.Addr]int // number of members that have a new address
}

// Cost is the cost of the first write of everything.
type Cost struct {
	Writes float64       // write requests to API servers, Leases excluded
	CPU    time.Duration // of the first supervisor
}

// NewFederation starts API servers, forms a federation of them, creates the Services of all members, and waits until
// everything is written. Its processes and files end with Close.
func NewFederation(ctx context.Context, cfg FederationConfig) (*Federation, error) {
	if cfg.Members < 2 || cfg.Members > 64 || cfg.Supervisors < 1 || cfg.Supervisors > cfg.Members || cfg.Services < 1 || cfg.Endpoints < 1 {
		return nil, fmt.Errorf("make a federation: %d members with %d supervisors, %d services and %d endpoints; it takes 2 to 64 members, and one at least of the others",
			cfg.Members, cfg.Supervisors, cfg.Services, cfg.Endpoints)
	}
	// The federation uses the members and Services of a ClusterSet.
	w := &ClusterSet{
		cfg: Config{
			Assets: cfg.Assets, Controller: cfg.Controller, Storage: cfg.Storage, Progress: cfg.Progress,
			Members: cfg.Members, Exports: cfg.Services, Endpoints: cfg.Endpoints,
		},
		began: time.Now(), tracker: newTracker(), federated: make([]*member, cfg.Members),
	}
	if room := 32 - pods.Bits() - w.cfg.blockBits(); bits.Len(uint(cfg.Members)) > room {
		return nil, fmt.Errorf("make a federation: addresses of %d members do not fit into %s", cfg.Members, pods)
	}
	lifetime, end := context.WithCancel(ctx)
	w.end = end
	w.life, w.lifetime = errgroup.WithContext(lifetime)
	f := &Federation{set: w, cfg: cfg, seen: map[netip.Addr]int{}}
	for _, step := range []func(context.Context) error{f.startServers, f.form, f.fill, f.write} {
		if err := step(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("make a federation: %w", err), f.Close())
		}
	}
	return f, nil
}

// Close ends every process of the federation and removes its files. Supervisors end first, because each holds connections
// to all API servers.
func (f *Federation) Close() error {
	var errs []error
	for _, m := range f.set.federated {
		if m != nil {
			errs = append(errs, m.stop())
		}
	}
	return errors.Join(append(errs, f.set.Close())...)
}

func (f *Federation) startServers(ctx context.Context) error {
	w := f.set
	dir, err := os.MkdirTemp(f.cfg.Storage, "isthmus-scale-")
	if err != nil {
		return err
	}
	w.dir = dir
	w.onClose(func() error { return os.RemoveAll(dir) })
	w.say("start %d API servers, with their data in %s", f.cfg.Members, f.cfg.Storage)
	starting, ctx := errgroup.WithContext(ctx)
	starting.SetLimit(runtime.NumCPU() + 1) // a start is CPU-bound
	for i := range w.federated {
		starting.Go(func() (err error) {
			id := simulatedID(i)
			w.federated[i], err = w.newMember(ctx, id, string(id))
			return err
		})
	}
	return starting.Wait()
}

// form forms the federation as isthmusctl does.
func (f *Federation) form(ctx context.Context) error {
	var clusters []bootstrap.Cluster
	for i, m := range f.set.federated {
		cfg := m.server.As(apiserver.Admin)
		clusters = append(clusters, bootstrap.Cluster{
			ID: m.id, Supervisor: i < f.cfg.Supervisors, Context: string(m.id), Client: m.client, Host: cfg.Host, CA: cfg.CAData,
		})
	}
	_, err := bootstrap.Form(ctx, bootstrap.Formation{ClusterSet: "scale", Namespace: v1alpha1.DefaultNamespace, Clusters: clusters})
	if err != nil || !f.cfg.ClusterSetIPs {
		return err
	}
	const vips = `{"spec":{"clusterSetIP":{"enabled":true,"ranges":["242.0.0.0/16"]}}}`
	for _, m := range f.set.federated { // children compare ClusterSetIPs with theirs
		federation := &federationv1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName}}
		if err := m.client.Patch(ctx, federation, client.RawPatch(types.MergePatchType, []byte(vips))); err != nil {
			return err
		}
	}
	return nil
}

// fill creates the Services and policies of every member.
func (f *Federation) fill(ctx context.Context) error {
	w := f.set
	var todo []func(context.Context) error
	for i, m := range w.federated {
		x := newExporter(m.id, w.podBlock(i))
		x.write = writeToMember(m.client)
		w.exporters = append(w.exporters, x)
		for _, name := range w.names(i) {
			if err := x.add(name, f.cfg.Endpoints); err != nil {
				return err
			}
			svc := service(name)
			svc.Annotations = map[string]string{federationv1alpha1.AnnotationGlobalService: name.Name}
			todo = append(todo, func(ctx context.Context) error { return m.client.Create(ctx, svc) })
		}
		for _, s := range x.slices {
			todo = append(todo, s.create)
		}
		for j := range f.cfg.Policies {
			policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace(j % namespaces), Name: fmt.Sprintf("policy-%d-of-%s", j, m.id),
				Annotations: map[string]string{federationv1alpha1.AnnotationPolicy: "true"},
			}}
			todo = append(todo, func(ctx context.Context) error { return m.client.Create(ctx, policy) })
		}
	}
	return w.inParallel(ctx, "objects written to members", todo)
}

// write lets supervisors write everything, and measures the cost.
func (f *Federation) write(ctx context.Context) error {
	before, err := f.writes(ctx)
	if err != nil {
		return err
	}
	if err := f.startSupervisors(ctx); err != nil {
		return err
	}
	if err := f.awaitWritten(ctx); err != nil {
		return err
	}
	controller := f.set.federated[0].controller
	if err := f.quiet(ctx, controller); err != nil {
		return err
	}
	after, err := f.writes(ctx)
	if err != nil {
		return err
	}
	used, err := controller.Usage()
	f.cost = Cost{Writes: after - before, CPU: used.CPU}
	return err
}

// Cost returns the cost of the first write of everything.
func (f *Federation) Cost() Cost { return f.cost }

func (f *Federation) startSupervisors(ctx context.Context) error {
	for _, m := range f.set.federated[:f.cfg.Supervisors] {
		if err := m.start(ctx, f.cfg.Controller, "--federation", "--federation-probes=false"); err != nil {
			return err
		}
	}
	return nil
}

// writtenTimeout suffices for 200,000 slices, which two CPUs write into real API servers at 150 per second.
const writtenTimeout = time.Hour

// awaitWritten waits until all members have all federated Services with the slices of all members.
func (f *Federation) awaitWritten(ctx context.Context) error {
	want, said := 0, time.Now()
	for _, x := range f.set.exporters {
		want += len(x.slices)
	}
	return f.set.await(ctx, writtenTimeout, time.Second, "not everything is written", func() (bool, error) {
		least := want
		for _, m := range f.set.federated {
			n, err := count(ctx, m)
			if err != nil {
				return false, err
			}
			least = min(least, n)
		}
		if least == want || time.Since(said) > 15*time.Second {
			said = time.Now()
			f.set.say("every member has %d of %d slices", least, want)
		}
		return least == want, nil
	})
}

// count returns the number of slices of federated Services in a member.
func count(ctx context.Context, m *member) (int, error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(discoveryv1.SchemeGroupVersion.WithKind("EndpointSliceList"))
	// Without a selector an API server returns the number of objects after a page. All slices of the namespace are ours.
	err := m.client.List(ctx, list, client.InNamespace(federationv1alpha1.DefaultSystemNamespace), client.Limit(1))
	n := len(list.Items)
	if list.RemainingItemCount != nil {
		n += int(*list.RemainingItemCount)
	}
	return n, err
}

// Churn changes endpoints of all members for a while, one at a time and perSecond times per second. It returns the
// latencies from the member's own watch event until all members have the change.
func (f *Federation) Churn(ctx context.Context, perSecond float64, duration time.Duration) (Propagation, error) {
	if err := f.observe(ctx); err != nil {
		return Propagation{}, err
	}
	return f.set.Churn(ctx, perSecond, duration)
}

// observe watches the source and the copies of changes, once.
func (f *Federation) observe(ctx context.Context) error {
	for _, m := range f.set.federated {
		if len(m.ends) > 0 {
			continue
		}
		err := f.set.follow(ctx, m, &discoveryv1.EndpointSliceList{}, func(at time.Time, _ watch.EventType, obj client.Object) {
			es, ok := obj.(*discoveryv1.EndpointSlice)
			switch {
			case !ok:
			case es.Labels[discoveryv1.LabelManagedBy] != federationv1alpha1.ManagedBy:
				eachAddress(es, func(a netip.Addr) { f.set.tracker.from(a, at) })
			case es.Labels[federationv1alpha1.MarkCluster] != "":
				eachAddress(es, func(a netip.Addr) { f.arrived(m.id, a, at) })
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// arrived records that a member has an address.
func (f *Federation) arrived(id clusterset.ClusterID, a netip.Addr, at time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, m := range f.set.federated {
		if m.id == id {
			f.seen[a] |= 1 << i
		}
	}
	if f.seen[a] == 1<<len(f.set.federated)-1 {
		f.set.tracker.to(a, at)
	}
}

// String describes the size.
func (f *Federation) String() string {
	text := fmt.Sprintf("%d members x %d services x %d endpoints", f.cfg.Members, f.cfg.Services, f.cfg.Endpoints)
	if f.cfg.ClusterSetIPs {
		text += " with ClusterSetIPs"
	}
	if f.cfg.Policies > 0 {
		text += fmt.Sprintf(" and %d policies of each", f.cfg.Policies)
	}
	return text
}

// Memory returns the peak memory of the first supervisor since its start, in bytes.
func (f *Federation) Memory() (int64, error) {
	u, err := f.set.federated[0].controller.Usage()
	return u.Peak, err
}

// Restart restarts the first supervisor and waits until it leads again and has reconciled everything.
func (f *Federation) Restart(ctx context.Context) error {
	m := f.set.federated[0]
	if err := m.stop(); err != nil {
		return err
	}
	f.set.say("start supervisor %s anew", m.id)
	if err := m.start(ctx, f.cfg.Controller, "--federation", "--federation-probes=false"); err != nil {
		return err
	}
	return f.quiet(ctx, m.controller)
}

// quiet waits until a process uses next to no CPU time.
func (f *Federation) quiet(ctx context.Context, p *process.Process) error {
	const window, idle = time.Second, 50 * time.Millisecond
	var before process.Usage
	looks := 0
	return f.set.await(ctx, importTimeout, window, "the supervisor does not come to rest", func() (bool, error) {
		now, err := p.Usage()
		took := now.CPU - before.CPU
		before = now
		looks++
		return looks > 3 && took < idle, err // work takes a moment to begin
	})
}

// Rest waits while nothing changes, and returns the number of write requests to the API servers, Leases excluded.
func (f *Federation) Rest(ctx context.Context, duration time.Duration) (writes float64, err error) {
	if err := f.quiet(ctx, f.set.federated[0].controller); err != nil {
		return 0, err
	}
	before, err := f.writes(ctx)
	if err != nil {
		return 0, err
	}
	select {
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-time.After(duration):
	}
	after, err := f.writes(ctx)
	return after - before, err
}

// writes returns the number of write requests to API servers, Leases excluded.
func (f *Federation) writes(ctx context.Context) (all float64, err error) {
	for _, m := range f.set.federated {
		requests, err := m.server.Requests(ctx)
		if err != nil {
			return 0, err
		}
		all += Writes(requests)
	}
	return all, nil
}
