// Package slicesync makes the EndpointSlices of one Service in one cluster what they should be: it writes the wanted
// slices that are new or differ, then deletes the others. When nothing differs it writes nothing.
//
// For example, a Service has the slices web-east and web-west, and a third cluster joins: [Sync.Run] creates web-north
// and leaves the other two alone.
package slicesync

import (
	"context"
	"fmt"
	"iter"

	discoveryv1 "k8s.io/api/discovery/v1"
)

// Sync describes the existing and the wanted slices of one Service, and how to write them. S is an existing slice as
// the caller's cache holds it. All fields but Keep are required.
type Sync[S any] struct {
	Existing []S
	Wanted   iter.Seq[*discoveryv1.EndpointSlice] // read once, one slice at a time

	// Name returns the name of an existing slice, which pairs it with the wanted slice of that name.
	Name func(S) string
	// UpToDate reports whether an existing slice has the content of the wanted slice of its name.
	UpToDate func(existing S, wanted *discoveryv1.EndpointSlice) bool
	// Keep reports whether an existing slice stays although it is not wanted. Nil keeps none.
	Keep func(S) bool

	Create, Update func(context.Context, *discoveryv1.EndpointSlice) error
	// Delete deletes an existing slice. Deleting one that no longer exists succeeds.
	Delete func(context.Context, S) error
}

// Run writes the differences and reports whether it wrote any. It stops at the first error, and deletes only after it
// has written every wanted slice: a client that resolves the Service between two writes never finds fewer endpoints
// than before and after.
func (s Sync[S]) Run(ctx context.Context) (wrote bool, err error) {
	existing := make(map[string]S, len(s.Existing))
	for _, e := range s.Existing {
		existing[s.Name(e)] = e
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
			return wrote, fmt.Errorf("write endpoint slice %s/%s: %w", es.Namespace, es.Name, err)
		}
		wrote = true
	}
	for _, e := range s.Existing {
		if wanted[s.Name(e)] || s.Keep != nil && s.Keep(e) {
			continue
		}
		if err := s.Delete(ctx, e); err != nil {
			return wrote, fmt.Errorf("delete endpoint slice %s: %w", s.Name(e), err)
		}
		wrote = true
	}
	return wrote, nil
}
