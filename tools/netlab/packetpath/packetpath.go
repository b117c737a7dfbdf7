// Package packetpath makes a network namespace a node that translates packets to VIPs.
package packetpath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

const (
	// patience is how long it may take until the programs are on the devices.
	patience = 30 * time.Second
	poll     = 20 * time.Millisecond
)

// Serve opens a datapath in ns, programs what in asks for, and returns when its programs are on all devices
// that cfg names; there must be one, and patterns will not do. The result is the caller's to close.
func Serve(ctx context.Context, ns *netlab.Namespace, cfg datapath.Config, in lb.Input) (d *datapath.Datapath, err error) {
	cfg.Packets = true
	if err := ns.Do(func() error {
		d, err = datapath.Open(ctx, cfg, slog.New(slog.DiscardHandler))
		return err
	}); err != nil {
		return nil, err
	}
	if err := serve(ctx, ns, d, cfg.Devices, in); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func serve(ctx context.Context, ns *netlab.Namespace, d *datapath.Datapath, devices []string, in lb.Input) error {
	have, err := d.Load(ctx)
	if err != nil {
		return err
	}
	plan, problems := lb.NewPlanner(have).Plan(in)
	// What only packets may use is fine here.
	problems = slices.DeleteFunc(problems, func(p lb.Problem) bool { return p.Reason == lb.UnsupportedProtocol })
	if len(problems) > 0 {
		return fmt.Errorf("cannot be served: %v", problems)
	}
	if err := d.Apply(ctx, plan); err != nil {
		return err
	}
	// Devices are looked at in the namespace of the thread that follows them.
	following, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- ns.Do(func() error { return d.Follow(following) }) }()
	err = await(ctx, ns, d, devices)
	stop()
	return errors.Join(err, <-ended)
}

// await waits until programs are on all devices.
func await(ctx context.Context, ns *netlab.Namespace, d *datapath.Datapath, devices []string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		served := map[string]bool{}
		if err := ns.Do(func() error { // where filters are asked for, too
			for _, h := range d.Hooks() {
				served[h.Device] = served[h.Device] || h.Attached
			}
			return nil
		}); err != nil {
			return err
		}
		if !slices.ContainsFunc(devices, func(name string) bool { return !served[name] }) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("programs are on %v and should be on %v: %w", served, devices, ctx.Err())
		case <-tick.C:
		}
	}
}
