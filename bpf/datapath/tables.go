package datapath

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// tables binds each table of package lb to the BPF map of its name. A new map needs one codec here.
var tables = []binding{
	bind(lb.Services, codec[lb.ServiceID, clusterset.ServiceName, uint32, bpf.Service]{
		key: toNumber[lb.ServiceID], value: encodeService, keyOf: fromNumber[lb.ServiceID], valueOf: decodeService,
	}),
	bind(lb.Clusters, codec[lb.ClusterIndex, clusterset.ClusterID, uint32, bpf.Cluster]{
		key: toNumber[lb.ClusterIndex], value: encodeCluster, keyOf: fromNumber[lb.ClusterIndex], valueOf: decodeCluster,
		array: true,
	}),
	bind(lb.Backends, codec[lb.BackendID, lb.Backend, uint32, bpf.Backend]{
		key: toNumber[lb.BackendID], value: encodeBackend, keyOf: fromNumber[lb.BackendID], valueOf: decodeBackend,
	}),
	bind(lb.Slots, codec[lb.Slot, lb.BackendID, bpf.SlotKey, uint32]{
		key: encodeSlot, value: toNumber[lb.BackendID], keyOf: decodeSlot, valueOf: fromNumber[lb.BackendID],
	}),
	bind(lb.Frontends, codec[lb.Address, lb.Frontend, bpf.FrontendKey, bpf.Frontend]{
		key: encodeFrontendKey, value: encodeFrontend, keyOf: decodeFrontendKey, valueOf: decodeFrontend,
	}),
	bind(lb.Ranges, codec[netip.Prefix, bool, bpf.RangeKey, uint32]{
		key: encodeRange, value: func(bool) uint32 { return 1 }, keyOf: decodeRange, valueOf: func(uint32) bool { return true },
		trie: true,
	}),
}

// codec translates between the key K and value V of a table and the bytes of its map.
type codec[K, V comparable, MapKey, MapValue any] struct {
	key     func(K) MapKey
	value   func(V) MapValue
	keyOf   func(MapKey) K
	valueOf func(MapValue) V

	array bool // an array has no holes: an index without an entry has the zero value
	trie  bool // a trie cannot be read in batches
}

// binding reads and writes the map of one table.
type binding interface {
	name() string
	load(ctx context.Context, r *Reader, into *lb.State) error
	audit(ctx context.Context, r *Reader, a *lb.Audit) error
	write(ctx context.Context, d *Datapath, p *lb.Plan, deletes bool) error
	setLimit(l *lb.Limits, max int)
}

// bindingOf returns the binding of a table. Every table has one, which a test asserts.
func bindingOf(name string) binding {
	return tables[slices.IndexFunc(tables, func(b binding) bool { return b.name() == name })]
}

func bind[K, V comparable, MapKey, MapValue any](t *lb.Table[K, V], c codec[K, V, MapKey, MapValue]) binding {
	return bound[K, V, MapKey, MapValue]{t, c}
}

// bound is a table with its codec.
type bound[K, V comparable, MapKey, MapValue any] struct {
	*lb.Table[K, V]
	codec[K, V, MapKey, MapValue]
}

func (b bound[K, V, MapKey, MapValue]) name() string { return b.Name }

func (b bound[K, V, MapKey, MapValue]) setLimit(l *lb.Limits, max int) { b.SetLimit(l, max) }

// each calls visit for every entry of the map, in no order.
func (b bound[K, V, MapKey, MapValue]) each(ctx context.Context, r *Reader, visit func(K, V)) error {
	read := dump[MapKey, MapValue]
	if b.trie {
		read = iterate[MapKey, MapValue]
	}
	var none V
	return read(ctx, r, b.Name, func(k MapKey, v MapValue) {
		if value := b.valueOf(v); !b.array || value != none {
			visit(b.keyOf(k), value)
		}
	})
}

func (b bound[K, V, MapKey, MapValue]) load(ctx context.Context, r *Reader, into *lb.State) error {
	entries := b.Entries(into)
	return b.each(ctx, r, func(k K, v V) { entries[k] = v })
}

func (b bound[K, V, MapKey, MapValue]) audit(ctx context.Context, r *Reader, a *lb.Audit) error {
	return b.each(ctx, r, func(k K, v V) { b.Audit(a, k, v) })
}

// write carries out one step of a Plan.
func (b bound[K, V, MapKey, MapValue]) write(ctx context.Context, d *Datapath, p *lb.Plan, deletes bool) error {
	changes := b.Changes(p)
	switch {
	case !deletes:
		return putAll(ctx, d, b.Name, changes.Put, func(e lb.Entry[K, V]) (MapKey, MapValue) { return b.key(e.Key), b.value(e.Value) })
	case b.array:
		var none MapValue
		return putAll(ctx, d, b.Name, changes.Delete, func(k K) (MapKey, MapValue) { return b.key(k), none })
	default:
		return remove(ctx, d, b.Name, changes.Delete, b.key)
	}
}

func toNumber[N ~uint16 | ~uint32](n N) uint32 { return uint32(n) }

func fromNumber[N ~uint16 | ~uint32](n uint32) N { return N(n) }

// Load returns the content of the maps.
func (r *Reader) Load(ctx context.Context) (lb.State, error) {
	s := lb.NewState()
	var errs []error
	for _, b := range tables {
		errs = append(errs, b.load(ctx, r, &s))
	}
	if err := errors.Join(errs...); err != nil {
		return lb.State{}, err
	}
	return s, nil
}

// Differences returns how many entries of the maps are not as want says, 0 while the agent is their only writer. It
// reads all maps and keeps nothing of them. want cannot be used again.
func (r *Reader) Differences(ctx context.Context, want *lb.Audit) (int, error) {
	var errs []error
	for _, b := range tables {
		errs = append(errs, b.audit(ctx, r, want))
	}
	return want.Differences(), errors.Join(errs...)
}

// write carries out the writes of p, step by step.
func (d *Datapath) write(ctx context.Context, p lb.Plan) error {
	for _, step := range lb.Steps() {
		if err := bindingOf(step.Table).write(ctx, d, &p, step.Deletes); err != nil {
			return err
		}
	}
	return d.deleteAffinities(ctx, p.StaleAffinities)
}

// Limits returns how many entries the maps have room for, as they were made.
func (d *Datapath) Limits() lb.Limits {
	var l lb.Limits
	for _, b := range tables {
		b.setLimit(&l, int(d.maps[b.name()].MaxEntries()))
	}
	return l
}
