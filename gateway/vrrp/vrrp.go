// Package vrrp gives a gateway its part in a virtual router, whose master has all VIPs that are announced so: the desired
// state goes in, keepalived does it, and which VIPs this gateway has now, and what is wrong, come out.
//
// keepalived outlives its agent: a restart moves nothing. When keepalived is killed it cannot take the VIPs away, and its
// peer takes them, too; so whoever starts next, or watches, removes them first. It fails open: an agent that dies leaves a
// keepalived that goes on.
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

// Config is what a Router is besides the state that it applies.
type Config struct {
	// Dir is a folder for its files alone, absolute, which must outlive the agent but not the machine: /run/isthmus/vrrp.
	Dir string
	Log *slog.Logger
}

// Router is the part of a gateway that takes part in a virtual router.
type Router struct {
	log       *slog.Logger
	process   keepalived
	addresses addressFile

	mu        sync.Mutex
	have      *role // nil: none
	stop      context.CancelFunc
	watchDone chan struct{} // closed when watch is over; nil: nobody watches
}

// New returns a router. What an earlier process left goes on until the first Apply.
func New(c Config) (*Router, error) {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of keepalived: %w", err)
	}
	process := keepalived{dir: c.Dir}
	return &Router{log: c.Log, process: process, addresses: addressFile(process.file("addresses.json"))}, nil
}

// Name is desired.PartVRRP.
func (r *Router) Name() string { return desired.ComponentVRRP }

// Apply makes keepalived run as s says, or not at all. VIPs that are withdrawn are gone when it returns. On an error,
// which may be desired.Faults, all is as it was.
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

// check finds what is wrong with a role before anything changes.
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
		fault("vrrp.source", "%s is no address of %s", want.config.Source, device.Name)
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

// take makes keepalived run as want says; before is the configuration that it has.
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

// awaitGone waits until devices have nothing of old that is not in want.
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

// restore puts the configuration back that there was, and runs it if it ran.
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

// leave hands the VIPs over, stops keepalived, and takes its addresses away.
func (r *Router) withdraw(ctx context.Context) error {
	r.unwatch()
	if err := r.handOver(ctx); err != nil {
		r.log.Warn("no peer took the VIPs; they are withdrawn", "err", err)
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

// longestHandOver is less than the controller waits for an answer. Four intervals of more than a second do not fit in it.
const handOverTimeout = 4500 * time.Millisecond

// handOver lets a peer take the VIPs while this gateway still has them. A master that just ends says so, and its backup waits for
// up to an interval before it takes them (RFC 9568, 6.4.2, skew time), when nobody has them. One whose priority is the least is
// replaced by a backup first, and ends after that.
func (r *Router) handOver(ctx context.Context) error {
	if r.have == nil || len(r.have.config.Peers) == 0 || !r.process.runs() {
		return nil
	}
	gone := func() error {
		have, err := presentOn(r.have.config.Interface, r.have.vips)
		if err == nil && len(have) > 0 {
			err = errTimeout
		}
		return err
	}
	if err := gone(); !errors.Is(err, errTimeout) {
		return err // a backup has nothing to hand over
	}
	least := *r.have
	least.config.Priority = 1
	if err := writeFile(r.process.config(), least.render()); err != nil {
		return fmt.Errorf("write keepalived's configuration: %w", err)
	}
	if err := r.process.reload(); err != nil {
		return err
	}
	// The backup hears of it by the next advertisement, and takes over when it has discarded three; a reload takes a while.
	interval := time.Duration(r.have.config.IntervalMillis) * time.Millisecond
	ctx, cancel := context.WithTimeout(ctx, min(5*interval+time.Second, handOverTimeout))
	defer cancel()
	return waitFor(ctx, gone)
}

// sweep stops what runs of keepalived and removes the addresses that it left on devices.
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

// Sweep stops the keepalived of a folder, if it runs, and removes the addresses that it left on devices: for whoever
// ends a gateway for good.
func Cleanup(ctx context.Context, dir string) error {
	process := keepalived{dir: dir}
	r := &Router{process: process, addresses: addressFile(process.file("addresses.json"))}
	return r.cleanup(ctx)
}

// look is how often the watch looks after keepalived.
const watchInterval = 50 * time.Millisecond

// watch starts to look after keepalived, unless somebody does.
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
			if r.mu.TryLock() { // whoever has it is mending
				if err := r.restart(ctx); err != nil && ctx.Err() == nil {
					r.log.Error("mend keepalived", "err", err)
				}
				r.mu.Unlock()
			}
		}
	}()
}

// unwatch ends the watch, with r.mu held.
func (r *Router) unwatch() {
	if r.watchDone == nil {
		return
	}
	r.stop()
	<-r.watchDone
	r.watchDone = nil
}

// mend removes what a keepalived that died left, and starts another one.
func (r *Router) restart(ctx context.Context) error {
	if r.have == nil || r.process.runs() {
		return nil
	}
	if r.process.pid(parentFile) != 0 {
		return nil // it starts its child anew, which takes the VIPs over
	}
	r.log.Warn("keepalived died; another one is started")
	if err := r.cleanup(ctx); err != nil {
		return err
	}
	if err := r.addresses.add(r.have.addresses()); err != nil {
		return err
	}
	return r.process.start(ctx)
}

// Close ends the router. Without drain keepalived goes on, and its VIPs stay; with drain its peers are told, and take them.
func (r *Router) Close(ctx context.Context, drain bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if drain {
		return r.withdraw(ctx)
	}
	r.unwatch()
	return nil
}

// Announced returns the VIPs that this gateway has now, sorted: all when it is the master, none when it is a backup.
func (r *Router) Announced() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.have == nil {
		return nil
	}
	have, err := presentOn(r.have.config.Interface, r.have.vips)
	if err != nil {
		r.log.Debug("read VIPs", "err", err)
		return nil
	}
	slices.SortFunc(have, netip.Addr.Compare)
	return have
}

// Drift tells what is not as it was applied: keepalived does not run, its configuration is another one, or it has some of
// the VIPs and not others.
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
		fault("%s is not as it was written", r.process.config())
	}
	have, err := presentOn(r.have.config.Interface, r.have.vips)
	if err != nil {
		fault("%v", err)
	}
	if len(have) > 0 && len(have) < len(r.have.vips) {
		fault("%s has %d of %d VIPs", r.have.config.Interface, len(have), len(r.have.vips))
	}
	return faults, nil
}
