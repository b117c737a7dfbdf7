// Package packetpath turns a network namespace into a node that translates packets to VIPs.
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
	// timeout bounds the wait until the programs are attached.
	timeout = 30 * time.Second
	poll    = 20 * time.Millisecond
)

// Serve opens a datapath in ns, applies in, and returns when its programs are attached to all devices that cfg names.
// There must be at least one, and patterns are not supported. The caller closes the result.
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
	// Frontends that only packets can use are fine here.
	problems = slices.DeleteFunc(problems, func(p lb.Problem) bool { return p.Reason == lb.UnsupportedProtocol })
	if len(problems) > 0 {
		return fmt.Errorf("cannot be served: %v", problems)
	}
	if err := d.Apply(ctx, plan); err != nil {
		return err
	}
	// The watch of devices uses the namespace of its thread.
	following, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- ns.Do(func() error { return d.Follow(following) }) }()
	err = await(ctx, ns, d, devices)
	stop()
	return errors.Join(err, <-ended)
}

// await waits until the programs are attached to all devices.
func await(ctx context.Context, ns *netlab.Namespace, d *datapath.Datapath, devices []string) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		served := map[string]bool{}
		if err := ns.Do(func() error { // the namespace whose filters are listed
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
