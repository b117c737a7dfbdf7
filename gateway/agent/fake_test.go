package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// machine is the machine of fake components. It records their calls in order. While an agent runs, tests change it by
// change.
type machine struct {
	mu    sync.Mutex
	calls []string
	// refuse holds a VIP that a component refuses, and stuck the components that always fail.
	refuse map[string]netip.Addr
	stuck  map[string]bool
	away   map[string]bool // components whose neighbours do not answer
	// noRoom holds the frontends of Services, as service@backend port, that a component has no room for.
	noRoom map[string][]string
	states map[string]string       // the frontends of a component, by its name
	is     map[string][]netip.Addr // VIPs of a component, by its name
}

func newMachine() *machine {
	return &machine{refuse: map[string]netip.Addr{}, stuck: map[string]bool{}, away: map[string]bool{}, is: map[string][]netip.Addr{}, noRoom: map[string][]string{}, states: map[string]string{}}
}

// change calls do while the agent is not using the machine.
func (m *machine) change(do func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	do()
}

// config returns the configuration of an agent with fake components.
func (m *machine) config() Config {
	return Config{Balancer: m.component(desired.ComponentBalancer), Announcers: []Announcer{m.component(desired.ComponentBGP), m.component(desired.ComponentVRRP)}}
}

func (m *machine) component(name string) fake { return fake{name, m, new([]netip.Addr)} }

// fake is a component of a machine.
type fake struct {
	name    string
	m       *machine
	applied *[]netip.Addr
}

func (f fake) Name() string { return f.name }

func (f fake) Apply(ctx context.Context, s *desired.State) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	var vips []netip.Addr
	for _, v := range s.VIPs {
		vips = append(vips, v.Addr)
	}
	switch no := f.m.refuse[f.name]; {
	case f.m.stuck[f.name]:
		return errors.New("is stuck")
	case no.IsValid() && slices.Contains(vips, no):
		return desired.Faults{{Component: f.name, Field: "vips", Services: []string{"shop/web"}, Message: "cannot have " + no.String()}}
	}
	text, faults := "", desired.Faults(nil)
	for _, v := range s.VIPs {
		for _, fe := range v.Frontends {
			is := fmt.Sprintf("%s@%d", fe.Service, fe.Backends[0].Port)
			text += " " + is
			if slices.Contains(f.m.noRoom[f.name], is) {
				faults = append(faults, desired.Fault{Component: f.name, Services: []string{fe.Service}, Message: "no room"})
			}
		}
	}
	if len(faults) > 0 {
		return faults
	}
	f.m.states[f.name] = text
	call := f.name
	for _, v := range vips {
		call += " " + v.String()
	}
	f.m.calls = append(f.m.calls, call)
	f.m.is[f.name], *f.applied = vips, vips
	return nil
}

func (f fake) Drift(context.Context) ([]desired.Fault, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.m.stuck[f.name] {
		return nil, errors.New("cannot look")
	}
	if f.m.away[f.name] {
		return []desired.Fault{{Component: f.name, Message: "a neighbour is away"}}, nil
	}
	if slices.Equal(f.m.is[f.name], *f.applied) {
		return nil, nil
	}
	return []desired.Fault{{Component: f.name, Message: "it was changed"}}, nil
}

func (f fake) Close(_ context.Context, drain bool) error {
	call := f.name + " stays"
	if drain {
		call = f.name + " drains"
	}
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	f.m.calls = append(f.m.calls, call)
	return nil
}

func (f fake) Announced() []netip.Addr {
	if f.name != desired.ComponentBGP {
		return nil
	}
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	return f.m.is[f.name]
}
