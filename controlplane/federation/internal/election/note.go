package election

import (
	"context"
	"sync"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationv1client "k8s.io/client-go/kubernetes/typed/coordination/v1"
)

// annotationNote on a Lease is a message from its holder to all other candidates.
const annotationNote = "federation.isthmus.dev/note"

// notes adds a note to each Lease that its holder writes, and remembers the note of each Lease that is read.
type notes struct {
	coordinationv1client.LeasesGetter

	say func() string // the note to write, "" for none

	mu   sync.Mutex
	said string
}

func (n *notes) Leases(namespace string) coordinationv1client.LeaseInterface {
	return &notedLeases{n.LeasesGetter.Leases(namespace), n}
}

// read remembers the note of a Lease.
func (n *notes) read(lease *coordinationv1.Lease, err error) (*coordinationv1.Lease, error) {
	if err == nil {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.said = lease.Annotations[annotationNote]
	}
	return lease, err
}

// noted returns the Lease with the note, or without one when it is given back.
func (n *notes) noted(lease *coordinationv1.Lease) *coordinationv1.Lease {
	text := ""
	if lease.Spec.HolderIdentity != nil && *lease.Spec.HolderIdentity != "" {
		text = n.say()
	}
	if lease.Annotations[annotationNote] == text {
		return lease
	}
	lease = lease.DeepCopy()
	delete(lease.Annotations, annotationNote)
	if text != "" {
		metav1.SetMetaDataAnnotation(&lease.ObjectMeta, annotationNote, text)
	}
	return lease
}

type notedLeases struct {
	coordinationv1client.LeaseInterface

	notes *notes
}

func (l *notedLeases) Get(ctx context.Context, name string, opts metav1.GetOptions) (*coordinationv1.Lease, error) {
	return l.notes.read(l.LeaseInterface.Get(ctx, name, opts))
}

func (l *notedLeases) Create(ctx context.Context, lease *coordinationv1.Lease, opts metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return l.notes.read(l.LeaseInterface.Create(ctx, l.notes.noted(lease), opts))
}

func (l *notedLeases) Update(ctx context.Context, lease *coordinationv1.Lease, opts metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	return l.notes.read(l.LeaseInterface.Update(ctx, l.notes.noted(lease), opts))
}
