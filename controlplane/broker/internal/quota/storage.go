package quota

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// Kinds that only the quota controller of the broker counts. Readers ignore these objects, or these parts of them.
const (
	StorageBytes Kind = "storageBytes"
	Tombstones   Kind = "tombstones"
	Aggregates   Kind = "aggregates"
)

// StorageFactor times its quota is the most that the quota controller leaves of a member's objects on the broker.
const StorageFactor = 2

// StorageKinds lists the kinds that the quota controller counts, in the order in which people read them.
func StorageKinds() []Kind {
	return []Kind{Services, Ports, Slices, Endpoints, MetadataBytes, StorageBytes, Tombstones, Aggregates}
}

// Stored is what a member has on the broker, admitted or not, or the limits. Of Amounts it ignores PortsPerService, which is
// about one object.
type Stored struct {
	Amounts

	StorageBytes int // the size of the objects
	Tombstones   int
	Aggregates   int // aggregates that the member created and beside which no record stands
}

// StorageLimits returns the limits that a ClusterSetConfig sets. A member may have as many aggregates as services: every
// aggregate is created before its record.
func StorageLimits(q *v1alpha1.Quotas) Stored {
	limits := Stored{Amounts: Limits(q), StorageBytes: 256 << 20}
	limits.Tombstones, limits.Aggregates = MaxTombstones(limits.Amounts), limits.Services
	if q != nil && q.StorageBytes > 0 {
		limits.StorageBytes = int(q.StorageBytes)
	}
	return limits
}

// MaxTombstones returns how many tombstones a member may have: as many as services, because all may be withdrawn at once.
func MaxTombstones(limits Amounts) int { return limits.Services }

// Get returns the amount of one kind.
func (s Stored) Get(k Kind) int {
	switch k {
	case StorageBytes:
		return s.StorageBytes
	case Tombstones:
		return s.Tombstones
	case Aggregates:
		return s.Aggregates
	case Services, Ports, PortsPerService, Slices, Endpoints, MetadataBytes:
	}
	return s.Amounts.Get(k)
}

// Plus returns s with o added.
func (s Stored) Plus(o Stored) Stored {
	return Stored{s.Amounts.Plus(o.Amounts), s.StorageBytes + o.StorageBytes, s.Tombstones + o.Tombstones, s.Aggregates + o.Aggregates}
}

// Minus returns s with o removed.
func (s Stored) Minus(o Stored) Stored {
	return Stored{s.Amounts.Minus(o.Amounts), s.StorageBytes - o.StorageBytes, s.Tombstones - o.Tombstones, s.Aggregates - o.Aggregates}
}

// Over returns the kinds of which s is more than factor times the limit.
func (s Stored) Over(limits Stored, factor int) []Kind {
	return slices.DeleteFunc(StorageKinds(), func(k Kind) bool { return s.Get(k) <= factor*limits.Get(k) })
}

// refusalMark begins the reason of the admission policy "quotas" of the broker.
const refusalMark = "QuotaExceeded: "

// Refusal is an error of the broker, which refused a new object of this member because the member has too many.
type Refusal struct {
	Reason string // of the broker; it names the quota and the remedy
	// Unpublished means that the export is not on the broker. Otherwise only some of its EndpointSlices are not.
	Unpublished bool

	err error
}

// Error returns the whole error.
func (r *Refusal) Error() string { return r.err.Error() }

// Unwrap returns the error of the broker.
func (r *Refusal) Unwrap() error { return r.err }

// WithRefusal returns err, an error of the broker, as a Refusal if it is one.
func WithRefusal(err error, unpublished bool) error {
	if err == nil {
		return nil
	}
	_, reason, found := strings.Cut(err.Error(), refusalMark)
	if !found {
		return err
	}
	reason, _, _ = strings.Cut(reason, "\n") // of several refusals
	return &Refusal{Reason: reason, Unpublished: unpublished, err: err}
}

// Class tells apart the objects of a member on the broker.
type Class int

// The classes, in the order in which they get what is left of a limit that they share.
const (
	RecordClass Class = iota
	SliceClass
	TombstoneClass
	AggregateClass
	classes
)

// Object is one object of a member on the broker.
type Object struct {
	Class    Class
	Name     string
	Created  time.Time // by the broker
	Uses     Stored
	Admitted bool // readers use it: it is never in excess
}

// Excess returns the indexes of the objects that a member has beyond StorageFactor times its quota, youngest first. All admitted
// objects stay. Of the others of a class those stay that are older than the first that does not fit any more: it is the order of
// [Judge], so that the remaining objects are those that readers would admit next, and a restart decides alike.
func Excess(limits Stored, objects []Object) []int {
	var total Stored
	var rest [classes][]int
	for i, o := range objects {
		if o.Admitted {
			total = total.Plus(o.Uses)
			continue
		}
		rest[o.Class] = append(rest[o.Class], i)
	}
	olderFirst := func(a, b int) int {
		return cmp.Or(objects[a].Created.Compare(objects[b].Created), strings.Compare(objects[a].Name, objects[b].Name))
	}
	var excess []int
	for _, class := range rest {
		slices.SortFunc(class, olderFirst)
		for n, i := range class {
			uses := objects[i].Uses
			with := total.Plus(uses)
			if slices.ContainsFunc(with.Over(limits, StorageFactor), func(k Kind) bool { return uses.Get(k) > 0 }) {
				excess = append(excess, class[n:]...)
				break
			}
			total = with
		}
	}
	slices.SortFunc(excess, func(a, b int) int { return olderFirst(b, a) })
	return excess
}
