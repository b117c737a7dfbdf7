package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// cloudPorts is a provider with what the worker knows of its ports. Only the worker uses it: calls get copies.
type cloudPorts struct {
	provider

	ports   map[string]port // by id: as read last, and changed since; before the first read those that Services record
	known   bool            // they were read at least once
	fresh   bool            // and no call since may have changed them without an answer
	changes int             // of ports by other calls than read
	// unclean are the Services that may have left objects, by UID, and cleanErr the error of the last attempt to delete
	// them.
	unclean  map[types.UID]types.NamespacedName
	cleanErr error
	due      bool // all unused objects are to be deleted, also those of former controllers
}

// answer is the result of CreateAndAssignPort for a Service.
type answer struct {
	name    types.NamespacedName
	request request
	from    string // id of the port that the Service was to keep, "" for a new one
	port    port
	err     error
}

// errWaiting means that a Service waits for calls to OpenStack. The worker handles it again when they end.
var errWaiting = errors.New("it waits for OpenStack")

// waitingNotice is how long a Service waits before its condition says so.
const waitingNotice = 2 * time.Second

func newCloudPorts(p provider) *cloudPorts {
	return &cloudPorts{provider: p, ports: map[string]port{}, unclean: map[types.UID]types.NamespacedName{}}
}

// sourceOf returns the source of a port that a Service records, nil for an address of a list or an unknown port.
func (w *worker) sourceOf(id string) *cloudPorts {
	for _, src := range w.sources {
		if _, ok := src.ports[id]; ok {
			return src
		}
	}
	return nil
}

// readPorts reads the ports of a source. Key is handled again when they are known.
func (w *worker) readPorts(src *cloudPorts, key types.NamespacedName) {
	changes := src.changes
	w.lanes.start(src.lane(), key, func(ctx context.Context) (func(), error) {
		all, err := src.read(ctx)
		if err != nil {
			return nil, err
		}
		return func() {
			if src.changes != changes {
				return // it may miss the change
			}
			is := map[string]port{}
			for _, p := range all {
				is[p.ID] = p
			}
			if !src.known || !reflect.DeepEqual(src.ports, is) {
				w.rebuildNeeded = true
			}
			src.ports, src.known, src.fresh = is, true, true
		}, nil
	})
}

// CreateAndAssignPort makes calls that give a Service a port with the floating IP that it wants: a new port, or p if that
// has an id. It returns errWaiting, or the error of the last attempt.
func (w *worker) CreateAndAssignPort(s *corev1.Service, src *cloudPorts, r request, p port, last answer) error {
	name, uid := nameOf(s), s.UID
	if last.err != nil && last.from == p.ID && reflect.DeepEqual(last.request, r) {
		return last.err
	}
	if !src.fresh {
		w.readPorts(src, name)
		return errWaiting
	}
	from, all := p.ID, maps.Clone(src.ports)
	w.lanes.start(src.lane(), name, func(ctx context.Context) (func(), error) {
		p, err := p, error(nil)
		if from == "" {
			p, err = src.create(ctx, r, all)
		}
		if err == nil {
			p, err = src.float(ctx, p, r)
		}
		return func() { w.provided(src, uid, answer{name, r, from, p, err}) }, failure(err)
	})
	return errWaiting
}

// provided stores the result of CreateAndAssignPort.
func (w *worker) provided(src *cloudPorts, uid types.UID, a answer) {
	w.answers[uid] = a
	user := errors.As(a.err, new(invalid))
	if a.err != nil && !user && !errors.Is(a.err, openstack.ErrQuota) {
		src.fresh = false // the call may have had an effect, or what is known is wrong
	}
	if a.from == "" && !user {
		src.unclean[uid] = a.name // until the Service records the port: it may ask for something else by then
	}
	if a.port.ID == "" {
		return
	}
	if a.from == "" {
		for _, vip := range a.port.VIPs {
			w.newVIPs[vip] = true
		}
	}
	w.replacePort(src, a.port)
}

// replacePort stores a changed port, and makes its Services report it.
func (w *worker) replacePort(src *cloudPorts, p port) {
	src.ports[p.ID] = p
	src.changes++
	for _, m := range w.sharers(p.ID, "") {
		if m.port.Floating != p.Floating { // the floating IP has changed
			m.port = p
			w.requeue(m.name)
		}
	}
}

// failure returns an error that is about the cloud, and nil for one about a request, which others need not wait for.
func failure(err error) error {
	if _, ok := errors.AsType[*openstack.Paused](err); ok {
		return err
	}
	if errors.As(err, new(invalid)) || errors.Is(err, errExhausted) {
		return nil
	}
	for _, refusal := range []error{openstack.ErrGone, openstack.ErrQuota, openstack.ErrStale, openstack.ErrTaken, openstack.ErrForbidden, openstack.ErrInvalid} {
		if errors.Is(err, refusal) {
			return nil
		}
	}
	return err
}

// recorded notes that a Service records a port, and whether it may have left another one.
func (w *worker) recorded(s *corev1.Service, had, has string) {
	w.waitsNoMore(nameOf(s))
	for _, src := range w.sources {
		delete(src.unclean, s.UID)
		for _, p := range src.ports {
			if madeFor(p.Purpose) == string(s.UID) && p.ID != has && !w.allocations.Used(p.ID) {
				src.unclean[s.UID] = nameOf(s)
			}
		}
	}
	if had != "" && had != has {
		w.leaves(s, had)
	}
}

// leaves notes that a Service no longer uses a port. An unknown one may be of any source.
func (w *worker) leaves(s *corev1.Service, id string) {
	if len(w.list.ports([]string{id})) > 0 {
		return
	}
	for _, src := range w.sources {
		if of := w.sourceOf(id); of == nil || of == src {
			src.unclean[s.UID] = nameOf(s)
		}
	}
}

// hasUnclean reports whether any Service may have left objects.
func (w *worker) hasUnclean() bool {
	return slices.ContainsFunc(w.sources, func(src *cloudPorts) bool { return len(src.unclean) > 0 })
}

// isUnclean reports whether a Service may have left objects.
func (w *worker) isUnclean(uid types.UID) bool {
	return slices.ContainsFunc(w.sources, func(src *cloudPorts) bool { _, ok := src.unclean[uid]; return ok })
}

// Clean deletes the objects that Services have left.
func (w *worker) Clean(ctx context.Context) error {
	w.cleanupQueued = w.hasUnclean()
	var errs []error
	for _, src := range w.sources {
		switch err := src.cleanErr; {
		case err != nil:
			src.cleanErr = nil
			errs = append(errs, err) // and again after a pause
		case src.due || len(src.unclean) > 0:
			errs = append(errs, w.cleanUnused(ctx, src))
		}
	}
	return errors.Join(errs...)
}

// CleanUnusedPorts deletes all objects in the cloud that no Service uses.
func (w *worker) CleanUnusedPorts(ctx context.Context) error {
	for _, src := range w.sources {
		src.due = true
	}
	return w.Clean(ctx)
}

// cleanUnused deletes the ports of a source that no Service uses, and the floating IPs without a port. First the gateways
// withdraw them, and their address pairs are removed.
func (w *worker) cleanUnused(ctx context.Context, src *cloudPorts) error {
	if w.unsent {
		if err := w.UpdateAgents(ctx); err != nil {
			return err
		}
	}
	if w.lanes.wait(lanePairs, cleanKey) || w.lanes.wait(src.lane()+"/", cleanKey) {
		return nil
	}
	if !src.fresh {
		w.readPorts(src, cleanKey)
		return nil
	}
	used, err := w.usedPorts(ctx)
	if err != nil {
		return err
	}
	for id, p := range src.ports { // Neutron would give its addresses to another port
		if !used[id] && len(w.mayServe(p.VIPs)) > 0 {
			used[id], w.withheld = true, true
		}
	}
	left := maps.Clone(src.unclean)
	started := w.lanes.start(src.lane(), cleanKey, func(ctx context.Context) (func(), error) {
		gone, err := src.clean(ctx, used)
		for _, what := range gone {
			w.log.Info("unused object deleted", "object", what)
		}
		return func() { w.cleaned(src, left, err) }, failure(err)
	})
	if started { // no Service may get a port that is being deleted
		maps.DeleteFunc(src.ports, func(id string, p port) bool {
			for _, vip := range p.VIPs {
				if !used[id] {
					delete(w.newVIPs, vip)
				}
			}
			return !used[id]
		})
	}
	return nil
}

// cleaned stores the result of cleanUnused.
func (w *worker) cleaned(src *cloudPorts, left map[types.UID]types.NamespacedName, err error) {
	if err != nil {
		src.fresh, src.cleanErr = false, err
		return
	}
	src.due = false
	for uid, name := range left {
		delete(src.unclean, uid)
		w.requeue(name)
	}
}

// usedPorts returns the ids of all ports that Services use. It reads the Services again: an error in the allocations must
// not delete the port of a Service.
func (w *worker) usedPorts(ctx context.Context) (map[string]bool, error) {
	var list corev1.ServiceList
	if err := w.live.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("list services: %w", err)
	}
	used := map[string]bool{}
	for i := range list.Items {
		if s := &list.Items[i]; managed(s) {
			used[s.Annotations[service.AnnotationPort]] = true
		}
	}
	for _, id := range w.held() {
		used[id] = true
	}
	for _, a := range w.answers { // the Service is about to record it
		used[a.port.ID] = true
	}
	return used, nil
}
