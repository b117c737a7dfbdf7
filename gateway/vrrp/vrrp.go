// Package vrrp makes a gateway a member of virtual routers, whose masters own the VIPs announced by VRRP. It takes the
// desired state, runs keepalived, and reports the VIPs that this gateway owns now and what is wrong.
//
// keepalived outlives the agent, so a restart of the agent moves nothing. A killed keepalived leaves its VIPs on the
// device while its peer takes them as well. The next agent, or the watch of this one, removes them first. The package
// fails open: when the agent dies, keepalived continues.
package vrrp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// Config holds the settings of a Router that are not part of the state.
type Config struct {
	// Dir is an absolute path of a folder that only keepalived's files are in, such as /run/isthmus/vrrp. It must outlive
	// the agent, but not a reboot.
	Dir string
	Log *slog.Logger
}

// Router is the announcer that takes part in virtual routers.
type Router struct {
	log       *slog.Logger
	process   keepalived
	addresses addressFile

	mu        sync.Mutex
	have      *role // nil: not a member
	stop      context.CancelFunc
	watchDone chan struct{} // closed when the watch has ended; nil: no watch
}

// New returns a router. A keepalived of an earlier process continues until the first Apply.
func New(c Config) (*Router, error) {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of keepalived: %w", err)
	}
	process := keepalived{dir: c.Dir}
	return &Router{log: c.Log, process: process, addresses: addressFile(process.file("addresses.json"))}, nil
}

// Name implements agent.Component.
func (r *Router) Name() string { return desired.ComponentVRRP }

// Apply makes keepalived run as s says, or not at all. Withdrawn VIPs are gone when it returns. After an error, which may
// be desired.Faults, nothing has changed.
func (r *Router) Apply(ctx context.Context, s *desired.State) error {
	want := newRole(s)
	r.mu.Lock()
	defer r.mu.Unlock()
	if want == nil {
		return r.withdraw(ctx)
	}
	if err := r.check(ctx, want); err != nil {
		return err
	}
	before, err := os.ReadFile(r.process.config())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read keepalived's configuration: %w", err)
	}
	ran := r.process.runs()
	if err := r.converge(ctx, want, before); err != nil {
		return errors.Join(err, r.restore(context.WithoutCancel(ctx), before, ran))
	}
	r.have = want
	r.watch(ctx)
	return nil
}

// check validates a role before anything changes.
func (r *Router) check(ctx context.Context, want *role) error {
	var faults desired.Faults
	fault := func(field, format string, args ...any) {
		faults = append(faults, desired.Fault{Component: desired.ComponentVRRP, Field: field, Message: fmt.Sprintf(format, args...)})
	}
	device, err := net.InterfaceByName(want.config.Interface)
	if err != nil {
		fault("vrrp.interface", "this machine has no device %s", want.config.Interface)
		return faults
	}
	if have, err := presentOn(device.Name, []netip.Addr{want.config.Source}); err != nil || len(have) == 0 {
		fault("vrrp.source", "%s is not an address of %s", want.config.Source, device.Name)
		return faults
	}
	tried := r.process.file("try.conf")
	if err := os.WriteFile(tried, want.render(), 0o600); err != nil {
		return fmt.Errorf("write keepalived's configuration: %w", err)
	}
	defer os.Remove(tried)
	if err := check(ctx, tried); err != nil {
		fault("vrrp", "%v", err)
		return faults
	}
	return nil
}

// converge makes keepalived run as want says. before is its current configuration.
func (r *Router) converge(ctx context.Context, want *role, before []byte) error {
	config := want.render()
	runs := r.process.runs()
	if runs && bytes.Equal(config, before) {
		return nil
	}
	if !runs {
		if err := r.cleanup(ctx); err != nil {
			return err
		}
	}
	old, err := r.addresses.read()
	if err != nil {
		return err
	}
	if err := r.addresses.add(want.addresses()); err != nil {
		return err
	}
	if err := writeFile(r.process.config(), config); err != nil {
		return fmt.Errorf("write keepalived's configuration: %w", err)
	}
	if !runs {
		return r.process.start(ctx)
	}
	if err := r.process.reload(); err != nil {
		return err
	}
	if err := r.awaitGone(ctx, old, want.addresses()); err != nil {
		return err
	}
	return r.addresses.write(want.addresses())
}

// awaitGone waits until devices have no address of old that is not in want.
func (r *Router) awaitGone(ctx context.Context, old, want map[string][]netip.Addr) error {
	return waitFor(ctx, func() error {
		for device, addrs := range old {
			gone := slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return slices.Contains(want[device], a) })
			if len(gone) == 0 {
				continue
			}
			if have, err := presentOn(device, gone); err == nil && len(have) > 0 {
				return errTimeout
			}
		}
		return nil
	})
}

// restore puts the previous configuration back, and starts keepalived if it ran before.
func (r *Router) restore(ctx context.Context, before []byte, ran bool) error {
	if !ran {
		return r.cleanup(ctx)
	}
	if err := writeFile(r.process.config(), before); err != nil {
		return fmt.Errorf("restore keepalived's configuration: %w", err)
	}
	if r.process.runs() {
		return r.process.reload()
	}
	return r.process.start(ctx)
}

// withdraw hands the VIPs over, stops keepalived and removes its addresses.
func (r *Router) withdraw(ctx context.Context) error {
	r.unwatch()
	if err := r.handOver(ctx); err != nil {
		r.log.Warn("no peer took the VIPs; withdrawing them", "err", err)
	}
	if err := r.cleanup(ctx); err != nil {
		return err
	}
	if err := os.Remove(r.process.config()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	r.have = nil
	return nil
}

// handOverTimeout is shorter than the controller's request timeout. Four intervals of more than a second exceed it.
const handOverTimeout = 4500 * time.Millisecond

// handOver lets a peer take the VIPs while this gateway still has them. A master that stops announces it, but its backup
// still waits for the skew time of up to one interval (RFC 9568, 6.4.2), during which no gateway has the VIPs. A master
// that first lowers its priority to the minimum is preempted by a backup, and stops after that.
func (r *Router) handOver(ctx context.Context) error {
	if r.have == nil || len(r.have.config.Peers) == 0 || !r.process.runs() {
		return nil
	}
	gone := func() error {
		have, err := presentOn(r.have.config.Interface, r.have.vips())
		if err == nil && len(have) > 0 {
			err = errTimeout
		}
		return err
	}
	if err := gone(); !errors.Is(err, errTimeout) {
		return err // a backup has nothing to hand over
	}
	if err := writeFile(r.process.config(), r.have.least().render()); err != nil {
		return fmt.Errorf("write keepalived's configuration: %w", err)
	}
	if err := r.process.reload(); err != nil {
		return err
	}
	// The backup notices at the next advertisement, and takes over after discarding three. A reload takes time as well.
	interval := time.Duration(r.have.config.IntervalMillis) * time.Millisecond
	ctx, cancel := context.WithTimeout(ctx, min(5*interval+time.Second, handOverTimeout))
	defer cancel()
	return waitFor(ctx, gone)
}

// cleanup stops keepalived and removes the addresses that it left on devices.
func (r *Router) cleanup(ctx context.Context) error {
	if err := r.process.stop(ctx); err != nil {
		return err
	}
	all, err := r.addresses.read()
	if err != nil {
		return err
	}
	for device, addrs := range all {
		if err := removeFrom(device, addrs); err != nil {
			return err
		}
	}
	return r.addresses.write(nil)
}

// Cleanup stops the keepalived of a folder, if it runs, and removes the addresses that it left on devices. Call it when a
// gateway is removed for good. It succeeds if there is none.
func Cleanup(ctx context.Context, dir string) error {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil // it never ran
	}
	process := keepalived{dir: dir}
	r := &Router{process: process, addresses: addressFile(process.file("addresses.json"))}
	return r.cleanup(ctx)
}

// watchInterval is how often the watch checks keepalived.
const watchInterval = 50 * time.Millisecond

// watch starts the watch, unless it runs.
func (r *Router) watch(ctx context.Context) {
	if r.watchDone != nil {
		return
	}
	ctx, r.stop = context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	r.watchDone = done
	go func() {
		defer close(done)
		tick := time.NewTicker(watchInterval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if r.mu.TryLock() { // Apply or Close has it
				if err := r.restart(ctx); err != nil && ctx.Err() == nil {
					r.log.Error("restart keepalived", "err", err)
				}
				r.mu.Unlock()
			}
		}
	}()
}

// unwatch ends the watch. The caller holds r.mu.
func (r *Router) unwatch() {
	if r.watchDone == nil {
		return
	}
	r.stop()
	<-r.watchDone
	r.watchDone = nil
}

// restart removes the addresses of a keepalived that died, and starts another one.
func (r *Router) restart(ctx context.Context) error {
	if r.have == nil || r.process.runs() {
		return nil
	}
	if r.process.pid(parentFile) != 0 {
		return nil // its parent restarts the child, which takes the VIPs over
	}
	r.log.Warn("keepalived died; starting another one")
	if err := r.cleanup(ctx); err != nil {
		return err
	}
	if err := r.addresses.add(r.have.addresses()); err != nil {
		return err
	}
	return r.process.start(ctx)
}

// Close ends the router. Without drain, keepalived continues and its VIPs stay. With drain, peers take the VIPs first.
func (r *Router) Close(ctx context.Context, drain bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if drain {
		return r.withdraw(ctx)
	}
	r.unwatch()
	return nil
}

// Announced returns the VIPs that this gateway owns now, sorted: those of the virtual routers whose master it is.
func (r *Router) Announced() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.have == nil {
		return nil
	}
	have, err := presentOn(r.have.config.Interface, r.have.vips())
	if err != nil {
		r.log.Debug("read VIPs", "err", err)
		return nil
	}
	slices.SortFunc(have, netip.Addr.Compare)
	return have
}

// Drift reports whether keepalived runs, its configuration is as written, and the device has all VIPs of a virtual router or none.
func (r *Router) Drift(context.Context) ([]desired.Fault, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.have == nil {
		return nil, nil
	}
	var faults []desired.Fault
	fault := func(format string, args ...any) {
		faults = append(faults, desired.Fault{Component: desired.ComponentVRRP, Message: fmt.Sprintf(format, args...)})
	}
	if !r.process.runs() {
		fault("keepalived does not run")
	}
	if config, err := os.ReadFile(r.process.config()); err != nil || !bytes.Equal(config, r.have.render()) {
		fault("%s was changed", r.process.config())
	}
	for _, is := range r.have.routers {
		have, err := presentOn(r.have.config.Interface, is.vips)
		if err != nil {
			fault("%v", err)
		}
		if len(have) > 0 && len(have) < len(is.vips) {
			fault("%s has %d of %d VIPs of virtual router %d", r.have.config.Interface, len(have), len(is.vips), is.RouterID)
		}
	}
	return faults, nil
}
