// Package reconcile is the seam between the frame of a federation, which reaches members and elects a leader for each,
// and what leaders do there: federated Services, policies. In go a Part's watches; out comes one call of Sync for
// each thing that may have changed, for each member that this process leads.
//
// What a Part keeps to: a silent member is never an empty one, so what was read of it last counts on; of a member
// that was never read nothing is known, so nothing of it is removed; and what has the right content is left alone,
// whatever epoch it was written in.
package reconcile

import (
	"context"
	"errors"

	"k8s.io/apimachinery/pkg/labels"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

var (
	// ErrNotLeader is of a write into a member whose Lease this process does not surely hold any more.
	ErrNotLeader = errors.New("this process does not lead the member")
	// ErrUnread is of a read of a member that was never read completely. What is there is not known.
	ErrUnread = errors.New("the member has not been read yet")
	// ErrKindMissing is of a read or write of an optional kind that the member does not have.
	ErrKindMissing = errors.New("the member does not have the kind")
)

// Part is one thing that leaders do. What it needs of the Federation's spec its constructor gets; another one is made
// when that changes. All methods may be called by several goroutines at a time.
type Part interface {
	// Name is a short word for logs and metrics.
	Name() string
	// Watches are the kinds that matter, each once. They are the same at every call.
	Watches() []Watch
	// Sync brings one thing in one led member in line with what all members say. It is called after any change,
	// coalesced, again with backoff after an error, and for every key when leadership was won or a member came or
	// went; never for one key and one member twice at a time. all is sorted by id and contains into. ctx ends when
	// leadership does.
	Sync(ctx context.Context, key Key, into Leader, all []Member) error
}

// Runner is a Part that has something to do beside Sync, such as to wait for something that is no Watch.
type Runner interface {
	// Run goes on until ctx ends, where nothing is led too. It asks by sync to look at a key again, in all led
	// members.
	Run(ctx context.Context, sync func(Key)) error
}

// Guarded is a Part that does not believe everything that vanishes.
type Guarded interface {
	// Holds returns what is taken for there although it vanished.
	Holds() []withdrawal.Hold
	// Release believes all that is held of a member.
	Release(of clusterset.ClusterID)
}

// Attentive is a Part that tells in members whether another one answers.
type Attentive interface {
	// Attends does nothing. All that a member has to do with is looked at again, in all led members, when it goes
	// silent and when it is back.
	Attends()
}

// Key names one thing that a Part keeps in line in all members: a federated Service, a policy. Its fields mean what
// the Part likes.
type Key struct{ Kind, Namespace, Name string }

// Watch is one kind whose changes matter to a Part.
type Watch struct {
	// Object is typed, unstructured.Unstructured or metav1.PartialObjectMetadata; the latter two with their kind
	// set. Members are read for objects of the same Go type.
	Object client.Object
	// Namespace, if not empty, is the only one in which objects are asked for, so that rights there suffice.
	Namespace string
	// Selector says which objects are asked for; nil is all.
	Selector labels.Selector
	// Keep, if not nil, says which of those are kept in memory; it sees them before Trim.
	Keep func(client.Object) bool
	// Trim, if not nil, takes away what nobody reads, before an object is kept. Managed fields go in any case.
	Trim toolscache.TransformFunc
	// Pack, if not nil, returns a form of a trimmed object that takes less memory, or nil for one that has none.
	Pack func(client.Object) Packed
	// IndexLabel, if not empty, is a label. List is fast, however many objects there are, when it is asked for one
	// value of it (client.MatchingLabels), as it is for one namespace.
	IndexLabel string
	// Keys returns what has to be looked at when o came, changed (called with the old and the new one) or went. It
	// may read from, which has the change, but perhaps not yet what else changed with it.
	Keys func(from Member, o client.Object) []Key
	// Local, if not nil, reports whether o matters in its own member alone: in others its keys are not looked at.
	Local func(o client.Object) bool
	// Counted, if not nil, reports whether o is one of the things that the Part made, as the status counts them.
	Counted func(o client.Object) bool
	// Optional says that the kind may be missing in a member: reads then return ErrKindMissing.
	Optional bool
	// Alone says that the Part can do without the kind for everything else. A member that denies leaders the right to it
	// counts as read; reads of this kind then fail with ErrUnread.
	Alone bool
}

// Local asks a Member's List for what its Watch calls Local alone (true), or for all but that (false). What is not asked for
// is not unpacked.
type Local bool

// ApplyToList is part of client.ListOption.
func (Local) ApplyToList(*client.ListOptions) {}

// Packed is an object in a form that takes little memory. One that has a method Local() bool says by it what the Watch's Local
// would say, without being unpacked.
type Packed interface {
	// Unpack returns the object as it was trimmed. It is the caller's.
	Unpack() client.Object
}

// Member is a member cluster as this supervisor sees it. Reads come from memory that was complete once; while the
// member's API server is silent they are what was seen last, and Reachable is false. Before that they fail with
// ErrUnread. Get and List know the Part's own Watches only; what they return is the caller's. List knows
// InNamespace, MatchingLabels, MatchingLabelsSelector and Local.
type Member interface {
	ID() clusterset.ClusterID
	client.Reader
	// Read reports whether the member was read completely once: reads do not fail with ErrUnread, but for those of a
	// Watch that is Alone.
	Read() bool
	// Reachable reports whether the member's API server answers now, and is that of the member.
	Reachable() bool
	// Supervisor reports whether the member claims to be a supervisor.
	Supervisor() bool
}

// Leader writes into the one member that this process leads. Every write carries the epoch, so that the member
// refuses those of a leader that was; each fails with ErrNotLeader from the moment on that the Lease is not surely
// held. Writes add the annotation of the epoch to the object that they are given, which must not be compared:
// content that is right is left alone whatever its epoch.
type Leader interface {
	Member
	// Epoch is how often the member's leader has changed.
	Epoch() int64
	// Create creates obj. The error is AlreadyExists when anything of that name is there, which may be somebody's own.
	Create(ctx context.Context, obj client.Object) error
	// Own makes an object that belongs to the federation as a whole, whatever stands under its name, be as obj, by
	// server-side apply; it creates it where it is not. What others put on it goes, apart from the labels and
	// annotations that keep names.
	Own(ctx context.Context, obj client.Object, keep ...string) error
	// Replace puts obj in the place of the object that was read, the whole of it: fields that others added go too,
	// which Own leaves. The resourceVersion of obj is a precondition, and a difference is a conflict.
	Replace(ctx context.Context, obj client.Object) error
	// OwnStatus makes the status of an existing object be that of obj, whose resourceVersion must be the current one.
	OwnStatus(ctx context.Context, obj client.Object) error
	// Annotate sets annotations of an object that may be anybody's; one with the value "" is taken away. It does not
	// create: an object that went meanwhile is no error.
	Annotate(ctx context.Context, obj client.Object, annotations map[string]string) error
	// Delete deletes obj if it still is what was read: its uid and resourceVersion are preconditions, and a
	// difference is a conflict. One that went meanwhile is no error.
	Delete(ctx context.Context, obj client.Object) error
	// Event tells those who look at o that something happened, once: only when something did.
	Event(o client.Object, eventtype, reason, note string)
}
