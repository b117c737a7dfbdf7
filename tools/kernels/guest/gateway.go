package main

import (
	"context"
	"log/slog"
	"net/netip"
	"strings"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/ebpf"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// gatewayVIPs are the VIPs of the gateway's balancer on the node, besides those of its packet path.
var gatewayVIPs = []netip.Addr{netip.MustParseAddr("243.0.0.9"), netip.MustParseAddr("fd24::9")}

// gatewayChecks returns the checks of a gateway's eBPF balancer on the node.
func gatewayChecks() []check {
	all := []check{{"gateway: balances on its devices", func(ctx context.Context, tb *testbed) error { return tb.balance(ctx) }}}
	for _, when := range []string{"", ", after a restart"} {
		if when != "" {
			all = append(all, check{"gateway: restarts", func(ctx context.Context, tb *testbed) error { return tb.balance(ctx) }})
		}
		for _, network := range []string{"tcp4", "tcp6", "udp4", "udp6"} {
			vip := gatewayVIPs[strings.Count(network, "6")]
			all = append(all, check{"gateway: " + network + when, outside(connects(network, vip))})
		}
	}
	return all
}

// balance makes the node a gateway, as a new process would.
func (tb *testbed) balance(ctx context.Context) error {
	if tb.gatewayBPFFS == "" {
		dir, err := tb.mountBPFFS()
		if err != nil {
			return err
		}
		tb.gatewayBPFFS = dir
		tb.undo = append(tb.undo, func() error { return tb.node.Do(func() error { return ebpf.Remove(dir) }) })
	}
	cfg := ebpf.Config{BPFFS: tb.gatewayBPFFS, Flows: 1024, Log: slog.New(slog.DiscardHandler)}
	state := desired.State{Cluster: "a", Group: "edge", Balancer: desired.EBPF}
	for i, l := range links {
		cfg.Devices = append(cfg.Devices, netlab.DeviceName(l.nodeIn), netlab.DeviceName(l.nodeOut))
		v := desired.VIP{Addr: gatewayVIPs[i], Announce: desired.ByVRRP, Return: desired.Routed}
		for _, protocol := range []string{"TCP", "UDP"} {
			v.Frontends = append(v.Frontends, desired.Frontend{
				Service: "shop/web", Protocol: protocol, Port: servedPort, Backends: []desired.Backend{{Addr: l.backend.Addr(), Port: backendPort, Weight: 1}},
			})
		}
		state.VIPs = append(state.VIPs, v)
	}
	return tb.node.Do(func() error {
		b, err := ebpf.Open(cfg)
		if err != nil {
			return err
		}
		if err := b.Apply(ctx, &state); err != nil {
			return err
		}
		return b.Close(ctx, false) // the programs stay in the kernel
	})
}
