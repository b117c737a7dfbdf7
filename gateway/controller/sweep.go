package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/service"
)

// Orphan is an object of this cluster in Neutron that no Service uses.
type Orphan struct {
	Kind  string       `json:"kind"` // port or floating IP
	ID    string       `json:"id"`
	Addrs []netip.Addr `json:"addresses"`
	// Purpose is what it was created for: a pool and the UID of a Service.
	Purpose string `json:"purpose,omitempty"`
	Deleted bool   `json:"deleted"`
}

// Sweep finds the objects of this cluster in Neutron that no Service uses, and deletes them unless dryRun is set. It may
// run beside a controller: it leaves objects alone that were created for an existing Service.
func Sweep(ctx context.Context, live client.Reader, cloud Cloud, dryRun bool) ([]Orphan, error) {
	// The cloud is read first: an object that a Service receives later is not in the list yet.
	ports, err := cloud.Ports(ctx)
	if err != nil {
		return nil, err
	}
	floating, err := cloud.FloatingIPs(ctx)
	if err != nil {
		return nil, err
	}
	var list corev1.ServiceList
	if err := live.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("list services: %w", err)
	}
	used, there := map[string]bool{}, map[string]bool{}
	for i := range list.Items {
		s := &list.Items[i]
		there[string(s.UID)] = true
		if managed(s) {
			used[s.Annotations[service.AnnotationPort]] = true
		}
	}
	var all []Orphan
	var errs []error
	leads := map[string]bool{"": true}
	found := func(o Orphan, remove func(context.Context, string) error) {
		if !dryRun {
			err := remove(ctx, o.ID)
			o.Deleted = err == nil
			errs = append(errs, err)
		}
		all = append(all, o)
	}
	for _, p := range ports {
		if used[p.ID] || there[madeFor(p.Purpose)] {
			continue
		}
		leads[p.ID] = true
		found(Orphan{Kind: "port", ID: p.ID, Addrs: p.Addrs, Purpose: p.Purpose}, cloud.DeletePort)
	}
	for _, f := range floating {
		if f.Purpose == "" && leads[f.Port] || f.Purpose != "" && !used[f.ID] && !there[madeFor(f.Purpose)] {
			found(Orphan{Kind: "floating IP", ID: f.ID, Addrs: []netip.Addr{f.Addr}, Purpose: f.Purpose}, cloud.DeleteFloatingIP)
		}
	}
	return all, errors.Join(errs...)
}

// madeFor returns the UID of the Service in a purpose, pool.uid or pool.uid.number.
func madeFor(purpose string) string {
	_, rest, _ := strings.Cut(purpose, ".")
	uid, _, _ := strings.Cut(rest, ".")
	return uid
}
