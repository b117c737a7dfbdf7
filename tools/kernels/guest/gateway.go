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

// gatewayVIPs are those of a gateway's balancer, which the node has beside its packet path.
var gatewayVIPs = []netip.Addr{netip.MustParseAddr("243.0.0.9"), netip.MustParseAddr("fd24::9")}

// gatewayChecks are those of a gateway's eBPF balancer, in the node between.
func gatewayChecks() []check {
	all := []check{{"gateway: it balances on its devices", func(ctx context.Context, w *testbed) error { return w.balance(ctx) }}}
	for _, when := range []string{"", ", after a restart"} {
		if when != "" {
			all = append(all, check{"gateway: it starts anew", func(ctx context.Context, w *testbed) error { return w.balance(ctx) }})
		}
		for _, network := range []string{"tcp4", "tcp6", "udp4", "udp6"} {
			vip := gatewayVIPs[strings.Count(network, "6")]
			all = append(all, check{"gateway: " + network + when, outside(connects(network, vip))})
		}
	}
	return all
}

// balance makes the node a gateway, as a new process would.
func (w *testbed) balance(ctx context.Context) error {
	if w.gatewayBPFFS == "" {
		dir, err := w.mountBPFFS()
		if err != nil {
			return err
		}
		w.gatewayBPFFS = dir
		w.undo = append(w.undo, func() error { return w.node.Do(func() error { return ebpf.Remove(dir) }) })
	}
	cfg := ebpf.Config{BPFFS: w.gatewayBPFFS, Flows: 1024, Log: slog.New(slog.DiscardHandler)}
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
	return w.node.Do(func() error {
		b, err := ebpf.Open(cfg)
		if err != nil {
			return err
		}
		if err := b.Apply(ctx, &state); err != nil {
			return err
		}
		return b.Close(ctx, false) // it goes on in the kernel
	})
}
