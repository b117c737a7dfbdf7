package agent

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// applyTimeout bounds one change of all components, and the way back from one.
const applyTimeout = 30 * time.Second

// errStuck marks an error after which components could not return to what they were.
var errStuck = errors.New("the gateway could not restore the previous state either; it keeps trying")

// change makes all components serve want, as far as it can; see settle. After an error, which is desired.Faults, they match
// have, unless the error is errStuck as well. The caller's cancellation does not stop it half way.
//
// The balancer learns of a VIP before neighbours do, and forgets it after them. Otherwise a router would send the packets
// of a new VIP to a gateway that refuses them.
func (c components) change(ctx context.Context, have, want *desired.State) (serves *desired.State, refused desired.Faults, err error) {
	return settle(want, have, func(s *desired.State) error {
		done, err := c.forward(ctx, have, s)
		if err == nil {
			return nil
		}
		slices.Reverse(done) // announcers, then the balancer
		if back := revert(ctx, done, have); back != nil {
			return errors.Join(err, errStuck, back)
		}
		return err
	})
}

// settle applies want, as far as it is valid and apply accepts it: Services that are not stay as they are in have, which may
// be nil, or are left out. serves is what was applied, and refused has a fault for each of these Services. Nothing is applied
// after an error, such as a fault that names no Service.
func settle(want, have *desired.State, apply func(*desired.State) error) (serves *desired.State, refused desired.Faults, err error) {
	admitted, refused := want.Admit(have)
	kept := map[string]bool{}
	for _, f := range refused {
		if len(f.Services) == 0 {
			return nil, nil, refused
		}
		kept[f.Services[0]] = true
	}
	for {
		err := apply(&admitted)
		if err == nil {
			return &admitted, refused, nil
		}
		stay, leave := desired.Faults(nil), desired.Faults(nil)
		for _, f := range allFaults(err).ByService() {
			switch name := f.Services[0]; {
			case !admitted.Has(name):
			case kept[name]: // apply refuses also what it has in have
				leave = append(leave, f)
			default:
				kept[name] = true
				stay, refused = append(stay, f), append(refused, f)
			}
		}
		if errors.Is(err, errStuck) || len(stay)+len(leave) == 0 {
			return nil, nil, err
		}
		admitted = admitted.Without(stay, have)
		admitted = admitted.Without(leave, nil)
	}
}

// revert makes components match have again.
func revert(ctx context.Context, all []Component, have *desired.State) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), applyTimeout)
	defer cancel()
	for _, c := range all {
		if back := c.Apply(ctx, have); back != nil {
			err = errors.Join(err, faultsOf(c, back))
		}
	}
	return err
}

// forward goes from have to want, and returns the components that no longer match have.
func (c components) forward(ctx context.Context, have, want *desired.State) (done []Component, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), applyTimeout)
	defer cancel()
	between, removes := union(have, want)
	if err := c.balancer.Apply(ctx, between); err != nil {
		return nil, faultsOf(c.balancer, err)
	}
	done = append(done, c.balancer)
	for _, a := range c.announcers {
		if err := a.Apply(ctx, want); err != nil {
			return done, faultsOf(a, err)
		}
		done = append(done, a)
	}
	if !removes {
		return done, nil
	}
	if err := c.balancer.Apply(ctx, want); err != nil {
		return done, faultsOf(c.balancer, err)
	}
	return done, nil
}

// union returns want plus the VIPs that only have has, and reports whether there are any.
func union(have, want *desired.State) (both *desired.State, removes bool) {
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

// empty returns the state of a gateway before the first request of the controller that sent s.
func empty(s *desired.State) *desired.State {
	return &desired.State{Cluster: s.Cluster, Group: s.Group, Balancer: s.Balancer}
}

// faultsOf returns the faults in an error of a component, or the error as one fault.
func faultsOf(c Component, err error) desired.Faults {
	if faults, ok := errors.AsType[desired.Faults](err); ok {
		return faults
	}
	return desired.Faults{{Component: c.Name(), Message: err.Error()}}
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
