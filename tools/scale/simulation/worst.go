package simulation

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/apiserver"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/scrape"
)

const (
	// flooders is how many requests the hostile member has in flight.
	flooders = 16
	// settleTimeout is how long the quota controller may take to delete what is beyond twice the quota.
	settleTimeout = 5 * time.Minute
)

// quotaControllerUser is the user that the quota controller has on the broker.
const quotaControllerUser = "system:serviceaccount:" + v1alpha1.DefaultBrokerNamespace + ":" + v1alpha1.QuotaController

// Flood is what a hostile member achieves.
type Flood struct {
	Created, Refused int64
	// End and Settled are how much the broker's etcd grew, without old revisions: at the end of the flood, and after the quota
	// controller came to rest.
	End, Settled int64
	// Objects is how many of its objects are left.
	Objects int64
	// Imported is how much the importer's etcd grew, and Memory the resident memory of its controller, at its peak.
	Imported, Memory int64
}

// SetQuotas sets the quotas of the ClusterSet.
func (w *ClusterSet) SetQuotas(ctx context.Context, q v1alpha1.Quotas) error {
	config := &v1alpha1.ClusterSetConfig{}
	key := client.ObjectKey{Namespace: v1alpha1.DefaultBrokerNamespace, Name: v1alpha1.ClusterSetConfigName}
	if err := w.admin.Get(ctx, key, config); err != nil {
		return err
	}
	config.Spec.Quotas = &q
	return w.admin.Update(ctx, config)
}

// StartQuotaController starts the broker's quota controller, and waits until it has counted all objects. The returned function
// ends it.
func (w *ClusterSet) StartQuotaController(ctx context.Context) (stop func() error, err error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("find a free port: %w", err)
	}
	m := &member{dir: filepath.Join(w.dir, "broker"), listen: listener.Addr().String()}
	path := m.path("quota.kubeconfig")
	if err := errors.Join(listener.Close(), w.broker.WriteKubeconfig(path, quotaControllerUser, w.broker.Address(), v1alpha1.DefaultBrokerNamespace)); err != nil {
		return nil, err
	}
	p, err := process.Start(w.cfg.Controller, m.path("quota-controller.log"),
		"--quota-controller", "--namespace="+v1alpha1.DefaultBrokerNamespace, "--kubeconfig="+path, "--listen="+m.listen, "--insecure-http")
	if err != nil {
		return nil, err
	}
	metric := "isthmus_controller_stored_limit" // published by the leader alone
	err = w.await(ctx, time.Minute, look, "the quota controller does not count", func() (bool, error) {
		samples, err := scrape.Get(ctx, plain, "http://"+m.listen+"/metrics", metric)
		return err == nil && scrape.Sum(samples, metric) > 0, nil
	})
	if err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p.Stop, nil
}

// footprint is what a ClusterSet takes.
type footprint struct{ broker, importer, memory int64 }

// footprint returns the bytes that the etcds of the broker and the importer use, and the controller's resident memory: now, or
// the peak since its last reset.
func (w *ClusterSet) footprint(ctx context.Context, peak bool) (f footprint, err error) {
	if f.broker, err = w.stored(ctx, w.broker); err != nil {
		return f, err
	}
	if f.importer, err = w.stored(ctx, w.a.server); err != nil {
		return f, err
	}
	usage, err := w.a.controller.Usage()
	if f.memory = usage.RSS; peak {
		f.memory = usage.Peak
	}
	return f, err
}

// Flood lets the first simulated member send its worst for a while: Services with large records, full slices and no address,
// tombstones, and aggregates of Services without an exporter. Afterwards everything that it wrote is deleted.
func (w *ClusterSet) Flood(ctx context.Context, d time.Duration, bounded bool) (Flood, error) {
	id := simulatedID(0)
	c, err := newClient(w.broker.As(accountOf(id)))
	if err != nil {
		return Flood{}, err
	}
	// Importers take only Services of namespaces that they have.
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: hostileNamespace}}
	if err := w.a.client.Create(ctx, namespace); err != nil && !apierrors.IsAlreadyExists(err) {
		return Flood{}, err
	}
	before, err := w.footprint(ctx, false)
	if err := errors.Join(err, w.a.controller.ResetPeak()); err != nil {
		return Flood{}, err
	}
	w.say("member %s sends its worst for %s, bounded: %v", id, d, bounded)
	hostile := hostileMember{id, w.podBlock(slices.Index(w.ids(), id))}
	f, err := hostile.flood(ctx, c, d)
	if err != nil {
		return f, err
	}
	end, err := w.stored(ctx, w.broker)
	if err != nil {
		return f, err
	}
	f.End = end - before.broker
	if f.Objects, err = w.settle(ctx, bounded); err != nil {
		return f, err
	}
	settled, err := w.footprint(ctx, true)
	if err != nil {
		return f, err
	}
	f.Settled, f.Imported, f.Memory = settled.broker-before.broker, settled.importer-before.importer, settled.memory-before.memory
	return f, w.clean(ctx)
}

// hostileMember is a member that sends its worst.
type hostileMember struct {
	id   clusterset.ClusterID
	pods netip.Prefix
}

func (h hostileMember) flood(ctx context.Context, c client.Client, d time.Duration) (Flood, error) {
	var group errgroup.Group
	var created, refused, next atomic.Int64
	until := time.Now().Add(d)
	for range flooders {
		group.Go(func() error {
			for ctx.Err() == nil && time.Now().Before(until) {
				err := c.Create(ctx, h.worst(int(next.Add(1))))
				switch {
				case err == nil:
					created.Add(1)
				case strings.Contains(err.Error(), "QuotaExceeded"):
					refused.Add(1)
				default:
					return fmt.Errorf("the hostile member: %w", err)
				}
			}
			return nil
		})
	}
	err := group.Wait()
	return Flood{Created: created.Load(), Refused: refused.Load()}, errors.Join(err, ctx.Err())
}

// hostileNamespace is the namespace of all hostile objects.
const hostileNamespace = "hostile"

// kinds is how many kinds of objects worst makes, one after the other.
const kinds = 5

// worst returns the n-th object of h.
func (h hostileMember) worst(n int) client.Object {
	name := clusterset.ServiceName{Namespace: hostileNamespace, Name: fmt.Sprintf("worst-%d", n/kinds)}
	switch n % kinds {
	case 0:
		return h.aggregate(name, h.id)
	case 1:
		return h.slice(name)
	case 2:
		return h.record(name)
	case 3:
		name.Name = "withdrawn-" + name.Name
		r := h.record(name)
		r.Spec.WithdrawnAt = new(metav1.Now())
		return r
	default:
		name.Name = "orphan-" + name.Name
		return h.aggregate(name)
	}
}

// aggregate returns an aggregate of a headless Service, which needs no address.
func (h hostileMember) aggregate(name clusterset.ServiceName, clusters ...clusterset.ClusterID) client.Object {
	si := mcs.Aggregate(clusterset.Aggregate{Service: name, Type: clusterset.Headless, Clusters: clusters})
	si.Namespace = v1alpha1.DefaultBrokerNamespace
	metav1.SetMetaDataAnnotation(&si.ObjectMeta, v1alpha1.AnnotationCreatedBy, string(h.id))
	return si
}

// slice returns a slice with endpoints that the other members believe.
func (h hostileMember) slice(name clusterset.ServiceName) client.Object {
	source := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, Labels: map[string]string{discoveryv1.LabelServiceName: name.Name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(80))}},
	}
	for host := range 250 {
		source.Endpoints = append(source.Endpoints, discoveryv1.Endpoint{Addresses: []string{nth(h.pods.Addr(), host+1).String()}, NodeName: new(strings.Repeat("n", 63))})
	}
	es := mcs.BrokerSlice(source, h.id)
	es.Namespace = v1alpha1.DefaultBrokerNamespace
	return es
}

// record returns a record as large as the broker accepts.
func (h hostileMember) record(name clusterset.ServiceName) *v1alpha1.ExportRecord {
	r := mcs.ExportRecord(clusterset.Export{
		Cluster: h.id, Service: name, ExportedAt: joined, Type: clusterset.Headless, Families: []clusterset.Family{clusterset.IPv4},
		Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}}, Annotations: map[string]string{"example.org/note": strings.Repeat("x", 60_000)},
	})
	r.Namespace = v1alpha1.DefaultBrokerNamespace
	return r
}

// settle returns the number of hostile objects, with a quota controller after it has deleted nothing for five seconds.
func (w *ClusterSet) settle(ctx context.Context, bounded bool) (int64, error) {
	count := func() (n int64, err error) {
		for _, list := range hostileLists() {
			if err := w.admin.List(ctx, list, hostileObjects()...); err != nil {
				return 0, err
			}
			n += int64(len(list.(*metav1.PartialObjectMetadataList).Items)) //nolint:forcetypeassert // hostileLists says so
		}
		return n, nil
	}
	if !bounded {
		return count()
	}
	return w.atRest(ctx, settleTimeout, 5*time.Second, 0, "the quota controller does not come to rest", count)
}

// atRest returns what read returns, once that has stayed within tolerance for a while.
func (w *ClusterSet) atRest(ctx context.Context, atMost, while time.Duration, tolerance int64, what string, read func() (int64, error)) (int64, error) {
	last, since := -tolerance-1, time.Now()
	err := w.await(ctx, atMost, while/5, what, func() (bool, error) {
		n, err := read()
		if err != nil {
			return false, err
		}
		if n < last-tolerance || n > last+tolerance {
			last, since = n, time.Now()
		}
		return time.Since(since) > while, nil
	})
	return last, err
}

func hostileObjects() []client.ListOption {
	return []client.ListOption{client.InNamespace(v1alpha1.DefaultBrokerNamespace), client.MatchingLabels{v1alpha1.LabelServiceNamespace: hostileNamespace}}
}

// hostileLists returns an empty list of each kind that a member writes.
func hostileLists() []client.ObjectList {
	var all []client.ObjectList
	for _, gvk := range []struct{ version, kind string }{
		{v1alpha1.GroupVersion.String(), "ExportRecordList"},
		{discoveryv1.SchemeGroupVersion.String(), "EndpointSliceList"},
		{v1beta1.SchemeGroupVersion.String(), "ServiceImportList"},
	} {
		all = append(all, &metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: gvk.version, Kind: gvk.kind}})
	}
	return all
}

// clean deletes all hostile objects.
func (w *ClusterSet) clean(ctx context.Context) error {
	for _, obj := range []client.Object{&v1alpha1.ExportRecord{}, &discoveryv1.EndpointSlice{}, &v1beta1.ServiceImport{}} {
		err := w.admin.DeleteAllOf(ctx, obj, client.InNamespace(v1alpha1.DefaultBrokerNamespace), client.MatchingLabels{v1alpha1.LabelServiceNamespace: hostileNamespace})
		if err != nil {
			return fmt.Errorf("delete what the hostile member wrote: %w", err)
		}
	}
	return nil
}

// stored returns the bytes that the etcd of a server uses, after it has dropped all old revisions. It waits until the number stays
// almost the same: etcd gives the room of what was dropped back with its later commits, and Leases are renewed all the time.
func (w *ClusterSet) stored(ctx context.Context, s *apiserver.Server) (int64, error) {
	return w.atRest(ctx, time.Minute, time.Second, 64<<10, "the size of an etcd does not come to rest", func() (int64, error) { return compacted(ctx, s) })
}

// compacted lets the etcd of a server drop all old revisions, and returns the bytes that it uses.
func compacted(ctx context.Context, s *apiserver.Server) (int64, error) {
	var at struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}
	if err := s.Etcd(ctx, "range", map[string]any{"key": "AA==", "limit": 1}, &at); err != nil {
		return 0, err
	}
	err := s.Etcd(ctx, "compaction", map[string]any{"revision": at.Header.Revision, "physical": true}, nil)
	if err != nil && !strings.Contains(err.Error(), "has been compacted") { // nothing was written since the last one
		return 0, err
	}
	const inUse = "etcd_mvcc_db_total_size_in_use_in_bytes"
	samples, err := scrape.Get(ctx, plain, s.EtcdURL()+"/metrics", inUse)
	if err != nil {
		return 0, err
	}
	return int64(scrape.Sum(samples, inUse)), nil
}
