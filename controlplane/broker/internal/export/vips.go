package export

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

var (
	heldIPs = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "isthmus_controller_clusterset_ips_held",
		Help: "ClusterSetIPs of this member's blocks that Services hold.",
	})
	exhausted = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "isthmus_controller_clusterset_ip_exhausted_total",
		Help: "ClusterSetIP allocations refused because a block of this member is full.",
	})
)

func init() { metrics.Registry.MustRegister(heldIPs, exhausted) }

// vips is the member's IPPool, safe for concurrent use. An address is free if no aggregate and no record on the broker names
// it, and no claim of this member is in progress.
type vips struct {
	mu       sync.Mutex
	pool     *clusterset.IPPool
	restored bool
	freed    map[clusterset.ServiceName]time.Time // when the last reference to a held address vanished
}

// restore reserves the addresses that held reports, once: before the first allocation, when the caches are complete. It
// calls clash for a Service with an address that another one holds.
func (v *vips) restore(held func(func(clusterset.ServiceName, []netip.Addr)), clash func(clusterset.ServiceName, error)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.restored {
		return
	}
	held(func(name clusterset.ServiceName, addrs []netip.Addr) {
		if err := v.pool.Reserve(name, addrs...); err != nil {
			clash(name, err)
		}
	})
	heldIPs.Set(float64(v.pool.Len()))
	v.restored = true
}

// allocate returns addresses for name in those of families for which the pool has a block, in the order of families. They
// are held until a later call of hold. A pool without blocks returns none and no error.
func (v *vips) allocate(name clusterset.ServiceName, families []clusterset.Family) ([]netip.Addr, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	blocks := v.pool.Families()
	if len(blocks) == 0 {
		return nil, nil
	}
	served := slices.DeleteFunc(slices.Clone(families), func(f clusterset.Family) bool { return !slices.Contains(blocks, f) })
	if len(served) == 0 {
		return nil, fmt.Errorf("allocate clusterset IP for %s: the service is %v, this cluster's blocks are %v", name, families, blocks)
	}
	addrs, err := v.pool.Allocate(name, served)
	if errors.Is(err, clusterset.ErrPoolExhausted) {
		exhausted.Inc()
	}
	heldIPs.Set(float64(v.pool.Len()))
	return addrs, err
}

// extend returns addrs, of any member's block, and one of the pool for each further family for which it has a free address; nil
// if there is none to add. Added addresses are held until a later call of hold; they are those that name holds already.
func (v *vips) extend(name clusterset.ServiceName, addrs []netip.Addr, families []clusterset.Family) []netip.Addr {
	v.mu.Lock()
	defer v.mu.Unlock()
	missing := unserved(families, addrs)
	missing = slices.DeleteFunc(missing, func(f clusterset.Family) bool { return !slices.Contains(v.pool.Families(), f) })
	if len(missing) == 0 || v.pool.Reserve(name, addrs...) != nil { // hold reports an address of another Service
		return nil
	}
	more, err := v.pool.Allocate(name, missing)
	if errors.Is(err, clusterset.ErrPoolExhausted) {
		exhausted.Inc()
	}
	heldIPs.Set(float64(v.pool.Len()))
	if err != nil {
		return nil
	}
	return slices.Concat(addrs, more)
}

// haveBlock reports whether the pool has a block of one of families.
func (v *vips) haveBlock(families []clusterset.Family) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.ContainsFunc(families, func(f clusterset.Family) bool { return slices.Contains(v.pool.Families(), f) })
}

// hold makes name hold exactly those of addrs, its addresses on the broker, that lie in the pool's blocks. It returns an
// error if one of them belongs to another Service.
func (v *vips) hold(name clusterset.ServiceName, addrs []netip.Addr) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	defer func() { heldIPs.Set(float64(v.pool.Len())) }()
	delete(v.freed, name)
	for _, a := range v.pool.Held(name) {
		if !slices.Contains(addrs, a) {
			v.pool.Release(name)
			break
		}
	}
	return v.pool.Reserve(name, addrs...)
}

// free releases the addresses of name if their quarantine is over: at until, or, if until is zero because no tombstone
// tells it, quarantine after the first call. It returns the remaining time.
func (v *vips) free(name clusterset.ServiceName, until, now time.Time, quarantine time.Duration) time.Duration {
	v.mu.Lock()
	defer v.mu.Unlock()
	if until.IsZero() {
		since, ok := v.freed[name]
		if !ok {
			since = now
			if v.freed == nil {
				v.freed = map[clusterset.ServiceName]time.Time{}
			}
			v.freed[name] = now
		}
		until = since.Add(quarantine)
	}
	if rest := until.Sub(now); rest > 0 {
		return rest
	}
	delete(v.freed, name)
	v.pool.Release(name)
	heldIPs.Set(float64(v.pool.Len()))
	return 0
}

// leading returns the addresses at the start of addrs that lie in the pool's blocks: those that this member may set in an
// aggregate without any.
func (v *vips) leading(addrs []netip.Addr) []netip.Addr {
	v.mu.Lock()
	defer v.mu.Unlock()
	if i := slices.IndexFunc(addrs, func(a netip.Addr) bool { return !v.pool.Contains(a) }); i >= 0 {
		return addrs[:i:i]
	}
	return addrs
}

// heldBy returns the addresses of name.
func (v *vips) heldBy(name clusterset.ServiceName) []netip.Addr {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.pool.Held(name))
}
