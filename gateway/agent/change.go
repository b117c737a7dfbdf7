package agent

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// applyTimeout is how long all parts together may need for one change, or to go back from one.
const applyTimeout = 30 * time.Second

// errStuck is part of an error when parts could not go back to what they were.
var errStuck = errors.New("the gateway could not go back either; it goes on trying")

// change makes all parts as want says. On an error, which is desired.Faults, they are as have says, unless it is errStuck
// as well. Nobody's going away stops it half way.
//
// Packets are never led to a gateway that does not balance them: the balancer learns of a VIP before neighbours do, and
// forgets it after them.
func change(ctx context.Context, parts []Part, have, want *desired.State) error {
	done, err := forward(ctx, parts, have, want)
	if err == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), applyTimeout)
	defer cancel()
	slices.Reverse(done) // announcers, then balancers
	for _, p := range done {
		if back := p.Apply(ctx, have); back != nil {
			err = errors.Join(err, errStuck, faultsOf(p, back))
		}
	}
	return err
}

// forward goes from have to want, and returns the parts that are not as have says any more.
func forward(ctx context.Context, parts []Part, have, want *desired.State) (done []Part, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), applyTimeout)
	defer cancel()
	balancers, announcers := split(parts)
	between, leaves := union(have, want)
	for _, p := range balancers {
		if err := p.Apply(ctx, between); err != nil {
			return done, faultsOf(p, err)
		}
		done = append(done, p)
	}
	for _, p := range announcers {
		if err := p.Apply(ctx, want); err != nil {
			return done, faultsOf(p, err)
		}
		done = append(done, p)
	}
	if !leaves {
		return done, nil
	}
	for _, p := range balancers {
		if err := p.Apply(ctx, want); err != nil {
			return done, faultsOf(p, err)
		}
	}
	return done, nil
}

// split returns the parts that balance and those that announce.
func split(parts []Part) (balancers, announcers []Part) {
	for _, p := range parts {
		if p.Name() == desired.PartBalancer {
			balancers = append(balancers, p)
		} else {
			announcers = append(announcers, p)
		}
	}
	return balancers, announcers
}

// union returns want with the VIPs besides that only have has, and whether there are any.
func union(have, want *desired.State) (both *desired.State, leaves bool) {
	stays := map[string]bool{}
	for i := range want.VIPs {
		stays[want.VIPs[i].Addr.String()] = true
	}
	between := *want
	between.VIPs = slices.Clone(want.VIPs)
	for i := range have.VIPs {
		if !stays[have.VIPs[i].Addr.String()] {
			between.VIPs = append(between.VIPs, have.VIPs[i])
		}
	}
	if len(between.VIPs) == len(want.VIPs) {
		return want, false
	}
	slices.SortFunc(between.VIPs, func(a, b desired.VIP) int { return a.Addr.Compare(b.Addr) })
	return &between, true
}

// nothing is the state of a gateway that was told nothing yet by the controller of s.
func nothing(s *desired.State) *desired.State {
	return &desired.State{Cluster: s.Cluster, Group: s.Group, Balancer: s.Balancer}
}

// faultsOf returns what a part says as its faults.
func faultsOf(p Part, err error) desired.Faults {
	if faults, ok := errors.AsType[desired.Faults](err); ok {
		return faults
	}
	return desired.Faults{{Part: p.Name(), Message: err.Error()}}
}

// allFaults returns every fault in err.
func allFaults(err error) desired.Faults {
	switch err := err.(type) { //nolint:errorlint // it walks the tree of errors itself
	case desired.Faults:
		return err
	case interface{ Unwrap() []error }:
		var all desired.Faults
		for _, e := range err.Unwrap() {
			all = append(all, allFaults(e)...)
		}
		return all
	}
	if inner := errors.Unwrap(err); inner != nil {
		return allFaults(inner)
	}
	return nil
}
