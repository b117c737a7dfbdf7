// Package slicesync makes the EndpointSlices of one Service in one cluster what they should be: it writes the wanted
// slices that are new or differ, and deletes the others. When nothing differs it writes nothing.
//
// For example, a Service has the slices web-east and web-west, and a third cluster joins: [Sync.Run] creates web-north
// and leaves the other two alone.
package slicesync

import (
	"context"
	"errors"
	"fmt"
	"iter"

	discoveryv1 "k8s.io/api/discovery/v1"
)

// Sync describes the existing and the wanted slices of one Service, and how to write them. S is an existing slice as
// the caller's cache holds it. All fields but Keep and Withdrawn are required.
type Sync[S any] struct {
	Existing []S
	Wanted   iter.Seq[*discoveryv1.EndpointSlice] // read once, one slice at a time

	// Name returns the name of an existing slice, which pairs it with the wanted slice of that name.
	Name func(S) string
	// UpToDate reports whether an existing slice has the content of the wanted slice of its name.
	UpToDate func(existing S, wanted *discoveryv1.EndpointSlice) bool
	// Keep reports whether an existing slice stays although it is not wanted. Nil keeps none.
	Keep func(S) bool
	// Withdrawn reports whether no wanted slice can replace the endpoints of an existing slice, because its source offers
	// none. Nil withdraws none.
	Withdrawn func(S) bool

	Create, Update func(context.Context, *discoveryv1.EndpointSlice) error
	// Delete deletes an existing slice. Deleting one that no longer exists succeeds.
	Delete func(context.Context, S) error
}

// Run writes the differences and reports whether it wrote any. An error of one slice stops no other slice; Run returns all
// errors, joined.
//
// It deletes withdrawn slices first, so that no slow or refused write delays a removal. It deletes the other unwanted
// slices after the writes: a pod that moves from slice web-1 to slice web-2 of its cluster is in one of them at any time.
func (s Sync[S]) Run(ctx context.Context) (wrote bool, err error) {
	var faults faults
	existing, later := make(map[string]S, len(s.Existing)), make([]S, 0, len(s.Existing))
	for _, e := range s.Existing {
		if s.Withdrawn != nil && s.Withdrawn(e) {
			wrote = s.delete(ctx, e, &faults) || wrote
			continue
		}
		existing[s.Name(e)] = e
		later = append(later, e)
	}
	wanted := map[string]bool{}
	for es := range s.Wanted {
		wanted[es.Name] = true
		write := s.Create
		if e, ok := existing[es.Name]; ok {
			if s.UpToDate(e, es) {
				continue
			}
			write = s.Update
		}
		if err := write(ctx, es); err != nil {
			faults.add(fmt.Errorf("write endpoint slice %s/%s: %w", es.Namespace, es.Name, err))
			continue
		}
		wrote = true
	}
	for _, e := range later {
		if !wanted[s.Name(e)] {
			wrote = s.delete(ctx, e, &faults) || wrote
		}
	}
	return wrote, faults.join()
}

// delete deletes e unless it is kept, and reports whether it did.
func (s Sync[S]) delete(ctx context.Context, e S, faults *faults) bool {
	if s.Keep != nil && s.Keep(e) {
		return false
	}
	if err := s.Delete(ctx, e); err != nil {
		faults.add(fmt.Errorf("delete endpoint slice %s: %w", s.Name(e), err))
		return false
	}
	return true
}

// few is how many errors Run returns in full. A Service with a thousand refused slices must not fill the log.
const few = 5

// faults are the errors of a run.
type faults struct {
	first []error
	more  int
}

func (f *faults) add(err error) {
	if len(f.first) == few {
		f.more++
		return
	}
	f.first = append(f.first, err)
}

func (f *faults) join() error {
	if f.more > 0 {
		f.first = append(f.first, fmt.Errorf("and %d more slices", f.more))
	}
	return errors.Join(f.first...)
}
