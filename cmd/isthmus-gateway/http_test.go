package main

import (
	"log/slog"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Packets sent by XDP are counted only with an eBPF balancer.
func TestXDPIsCounted(t *testing.T) {
	netlab.Privileged(t)
	for _, kind := range []desired.Balancer{desired.EBPF, desired.NFTables} {
		cfg := defaults()
		cfg.Balancer, cfg.BPFFS = string(kind), netlab.BPFFS(t)
		b, err := newBalancer(*cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		registry := prometheus.NewRegistry()
		registry.MustRegister(metricsOf(b)...)
		found, err := registry.Gather()
		if err != nil || len(found) != 0 != (kind == desired.EBPF) {
			t.Errorf("%s: metrics %v, %v", kind, found, err)
		}
		for _, m := range found {
			if m.GetName() != "isthmus_gateway_xdp_packets_total" || m.GetMetric()[0].GetCounter().GetValue() != 0 {
				t.Errorf("%s: %s", kind, m)
			}
		}
		if err := b.Close(t.Context(), false); err != nil {
			t.Error(err)
		}
	}
}
