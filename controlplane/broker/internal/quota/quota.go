// Package quota decides which objects of one member the other members use.
//
// For example, the quota is 10,000 Services, and member "east" exports 10,001. The youngest export waits: no member imports
// it, and its ServiceExport says so. The other 10,000 Services, and those of all other members, are untouched. When east
// unexports a Service, the waiting one is imported.
//
// Every member judges for itself, and all arrive at the same result: [Judge] depends only on the objects and the times at
// which the broker created them, which no member can choose. A restart changes nothing.
package quota

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// Kind names one limit, as in the ClusterSetConfig.
type Kind string

// The kinds.
const (
	Services        Kind = "services"
	Ports           Kind = "ports"
	PortsPerService Kind = "portsPerService"
	Slices          Kind = "slices"
	Endpoints       Kind = "endpoints"
	MetadataBytes   Kind = "metadataBytes"
)

// Kinds lists all kinds, in the order in which people read them.
func Kinds() []Kind {
	return []Kind{Services, Ports, PortsPerService, Slices, Endpoints, MetadataBytes}
}

// Amounts are a number for each kind: a usage or the limits.
type Amounts struct {
	Services, Ports, PortsPerService, Slices, Endpoints, MetadataBytes int
}

// Get returns the amount of one kind.
func (a Amounts) Get(k Kind) int {
	switch k {
	case Services:
		return a.Services
	case Ports:
		return a.Ports
	case PortsPerService:
		return a.PortsPerService
	case Slices:
		return a.Slices
	case Endpoints:
		return a.Endpoints
	case MetadataBytes:
		return a.MetadataBytes
	case StorageBytes, Tombstones, Aggregates: // see Stored
	}
	return 0
}

// Defaults are the limits of a ClusterSet that sets none.
func Defaults() Amounts {
	return Amounts{Services: 10_000, Ports: 20_000, PortsPerService: 1000, Slices: 20_000, Endpoints: 200_000, MetadataBytes: 32 << 20}
}

// Limits returns the limits that a ClusterSetConfig sets; those that it does not set have their defaults.
func Limits(q *v1alpha1.Quotas) Amounts {
	limits := Defaults()
	if q == nil {
		return limits
	}
	for _, f := range []struct {
		limit *int
		set   int64
	}{
		{&limits.Services, q.Services},
		{&limits.Ports, q.Ports},
		{&limits.PortsPerService, q.PortsPerService},
		{&limits.Slices, q.Slices},
		{&limits.Endpoints, q.Endpoints},
		{&limits.MetadataBytes, q.MetadataBytes},
	} {
		if f.set > 0 {
			*f.limit = int(f.set)
		}
	}
	return limits
}

// ChangesPerMinute returns how many changes of a member's objects the other members handle in a minute, and at once. It is no
// amount: beyond it nothing is refused, and changes wait.
func ChangesPerMinute(q *v1alpha1.Quotas) int {
	if q == nil || q.ChangesPerMinute == 0 {
		return 20_000
	}
	return int(q.ChangesPerMinute)
}

// Plus returns a with b added; PortsPerService is the larger of the two.
func (a Amounts) Plus(b Amounts) Amounts {
	return Amounts{
		Services: a.Services + b.Services, Ports: a.Ports + b.Ports, PortsPerService: max(a.PortsPerService, b.PortsPerService),
		Slices: a.Slices + b.Slices, Endpoints: a.Endpoints + b.Endpoints, MetadataBytes: a.MetadataBytes + b.MetadataBytes,
	}
}

// Minus returns a with b removed; PortsPerService stays.
func (a Amounts) Minus(b Amounts) Amounts {
	return Amounts{
		Services: a.Services - b.Services, Ports: a.Ports - b.Ports, PortsPerService: a.PortsPerService,
		Slices: a.Slices - b.Slices, Endpoints: a.Endpoints - b.Endpoints, MetadataBytes: a.MetadataBytes - b.MetadataBytes,
	}
}

// Exceeds returns the first kind of which a is more than factor times the limit; "" without one.
func (a Amounts) Exceeds(limits Amounts, factor int) Kind {
	for _, k := range Kinds() {
		if a.Get(k) > factor*limits.Get(k) {
			return k
		}
	}
	return ""
}

// Overrun is a quota that is used up, in the words of the member that exceeds it.
type Overrun struct {
	Kind        Kind
	Used, Limit int
}

// Error names the quota and the remedy.
func (o *Overrun) Error() string {
	if o.Kind == PortsPerService {
		return fmt.Sprintf("it has %d ports of at most %d that the ClusterSet allows a service; divide it into several services, or raise spec.quotas.%s of the ClusterSetConfig on the broker",
			o.Used, o.Limit, o.Kind)
	}
	return fmt.Sprintf("this cluster uses %d of its quota of %d %s, and this is one of its youngest; unexport other services, or raise spec.quotas.%s of the ClusterSetConfig on the broker",
		o.Used, o.Limit, o.Kind, o.Kind)
}

// Record describes a valid export record for its quota.
type Record struct {
	Service clusterset.ServiceName
	Created time.Time // by the broker
	Ports   int
	Bytes   int // of the labels and annotations of its import
	Labels  int // bytes of the labels that each of its imported slices has
}

// RecordOf describes the record of an export that the broker created at a time.
func RecordOf(e clusterset.Export, created time.Time) Record {
	return Record{
		Service: e.Service, Created: created, Ports: len(e.Ports),
		Bytes: bytesOf(e.Labels) + bytesOf(e.Annotations), Labels: bytesOf(e.ServiceLabels),
	}
}

// bytesOf returns the size of labels or annotations.
func bytesOf(m map[string]string) int {
	n := 0
	for k, v := range m {
		n += len(k) + len(v)
	}
	return n
}

// Amounts returns what a record uses.
func (r Record) Amounts() Amounts {
	return Amounts{Services: 1, Ports: r.Ports, PortsPerService: r.Ports, MetadataBytes: r.Bytes}
}

// Slice describes an EndpointSlice on the broker for its quota.
type Slice struct {
	Name      string
	Service   clusterset.ServiceName
	Created   time.Time // by the broker
	Endpoints int
	Bytes     int // of its ports, regions and hints
}

// SliceOf describes a slice.
func SliceOf(p *mcs.Packed) Slice {
	return Slice{Name: p.Name, Service: p.Service, Created: p.Created, Endpoints: p.Len(), Bytes: p.Bytes()}
}

// Amounts returns what a slice uses by itself.
func (s Slice) Amounts() Amounts {
	return Amounts{Slices: 1, Endpoints: s.Endpoints, MetadataBytes: s.Bytes}
}

// Verdict tells which objects of a member are admitted.
type Verdict struct {
	Records map[clusterset.ServiceName]struct{} // the admitted records
	Slices  map[string]struct{}                 // the admitted slices, by name
	Used    Amounts                             // by the admitted objects
	Waiting map[Kind]int                        // the waiting objects, by the limit that they wait for

	// RecordLimit and SliceLimit are the exhausted limits for which records and slices wait; "" while none does.
	RecordLimit, SliceLimit Kind
}

// Judge returns which objects of a member are admitted: the oldest ones up to the first that exceeds a limit. That one and
// all younger ones wait, so that a shrinking or vanishing object never evicts another. A record with too many ports of its
// own waits alone. The slices of a waiting or missing record do not count, and are not admitted. Objects of the same age
// are ordered by name.
func Judge(limits Amounts, records []Record, all []Slice) Verdict {
	v := Verdict{Records: map[clusterset.ServiceName]struct{}{}, Slices: map[string]struct{}{}, Waiting: map[Kind]int{}}
	records = slices.SortedFunc(slices.Values(records), func(a, b Record) int {
		return cmp.Or(a.Created.Compare(b.Created), a.Service.Compare(b.Service))
	})
	labels := map[clusterset.ServiceName]int{}
	for _, r := range records {
		if r.Ports > limits.PortsPerService {
			v.Waiting[PortsPerService]++
			continue
		}
		if v.RecordLimit == "" {
			v.RecordLimit = v.Used.Plus(r.Amounts()).Exceeds(limits, 1)
		}
		if v.RecordLimit != "" {
			v.Waiting[v.RecordLimit]++
			continue
		}
		v.Used = v.Used.Plus(r.Amounts())
		v.Records[r.Service] = struct{}{}
		labels[r.Service] = r.Labels
	}
	all = slices.SortedFunc(slices.Values(all), func(a, b Slice) int {
		return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Name, b.Name))
	})
	for _, s := range all {
		if _, ok := v.Records[s.Service]; !ok {
			continue
		}
		uses := s.Amounts()
		uses.MetadataBytes += labels[s.Service]
		if v.SliceLimit == "" {
			v.SliceLimit = v.Used.Plus(uses).Exceeds(limits, 1)
		}
		if v.SliceLimit != "" {
			v.Waiting[v.SliceLimit]++
			continue
		}
		v.Used = v.Used.Plus(uses)
		v.Slices[s.Name] = struct{}{}
	}
	return v
}
