package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Metrics and peers are for processes of the machine and for clients with a certificate of the gateway's authority. Probes are open.
func TestGatewayMetrics(t *testing.T) {
	own, foreign := newAuthority(t), newAuthority(t)
	g := &gateway{cfg: *defaults(), log: slog.New(slog.DiscardHandler)}
	g.certs = openCerts(t, own)
	clientOf := func(by *certs.Authority, life time.Duration) *tls.ConnectionState {
		t.Helper()
		pair, err := by.Issue("prometheus", time.Now(), life)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := certs.Parse(pair.Cert)
		if err != nil {
			t.Fatal(err)
		}
		return &tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}}
	}
	const found = http.StatusNotFound // the request has access, and there is nothing at its path
	for name, c := range map[string]struct {
		from   string
		client *tls.ConnectionState
		code   int
	}{
		"a process of the machine":             {"127.0.0.1:1", nil, found},
		"a process of the machine, over IPv6":  {"[::1]:1", nil, found},
		"a client of the authority":            {"192.0.2.1:1", clientOf(own, time.Hour), found},
		"no certificate":                       {"192.0.2.1:1", &tls.ConnectionState{}, http.StatusForbidden},
		"no TLS":                               {"192.0.2.1:1", nil, http.StatusForbidden},
		"no source":                            {"", nil, http.StatusForbidden},
		"a certificate of another authority":   {"192.0.2.1:1", clientOf(foreign, time.Hour), http.StatusForbidden},
		"a certificate that has ended":         {"192.0.2.1:1", clientOf(own, -time.Minute), http.StatusForbidden},
		"a name in place of a source address":  {"localhost:1", nil, http.StatusForbidden},
		"another machine with a local IPv4 ::": {"[2001:db8::127.0.0.1]:1", nil, http.StatusForbidden},
	} {
		server := g.httpServer(nil)
		for path, want := range map[string]int{"/nothing": c.code, "/healthz": http.StatusOK} {
			r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
			r.RemoteAddr, r.TLS = c.from, c.client
			w := httptest.NewRecorder()
			server.ServeHTTP(w, r)
			if w.Code != want {
				t.Errorf("%s: %s answers %d %s, want %d", name, path, w.Code, w.Body, want)
			}
		}
	}
}

func newAuthority(t *testing.T) *certs.Authority {
	t.Helper()
	a, err := certs.NewAuthority("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// openCerts returns a gateway's certificates, of an authority.
func openCerts(t *testing.T, by *certs.Authority) *certs.Source {
	t.Helper()
	dir := t.TempDir()
	f := certs.Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), CA: filepath.Join(dir, "ca.crt")}
	p, err := by.Issue("gw-1", time.Now(), time.Hour)
	if err := errors.Join(err, os.WriteFile(f.Cert, p.Cert, 0o600), os.WriteFile(f.Key, p.Key, 0o600), os.WriteFile(f.CA, by.Cert, 0o600)); err != nil {
		t.Fatal(err)
	}
	s, err := certs.Open(f, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Packets that are handed over are counted, with eBPF also those sent by XDP.
func TestPacketsAreCounted(t *testing.T) {
	netlab.Privileged(t)
	for _, kind := range []desired.Balancer{desired.EBPF, desired.NFTables} {
		cfg := defaults()
		cfg.Balancer, cfg.BPFFS, cfg.Flows = string(kind), netlab.BPFFS(t), 1024
		b, err := newBalancer(*cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		registry := prometheus.NewRegistry()
		registry.MustRegister(metricsOf(b)...)
		found, err := registry.Gather()
		names := []string{"isthmus_gateway_handed_over_packets_total"}
		if kind == desired.EBPF {
			names = append(names, "isthmus_gateway_xdp_packets_total")
		}
		if err != nil || len(found) != len(names) {
			t.Fatalf("%s: metrics %v, %v", kind, found, err)
		}
		for i, m := range found { // no packet was refused yet
			if m.GetName() != names[i] || m.GetMetric()[0].GetCounter().GetValue() != 0 {
				t.Errorf("%s: %s", kind, m)
			}
		}
		if err := b.Close(t.Context(), false); err != nil {
			t.Error(err)
		}
	}
}

// Connections, packets and bytes are counted by Service and protocol.
func TestConnectionsOfServices(t *testing.T) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(connections(func() (map[flows.CountKey]flows.Counts, error) {
		return map[flows.CountKey]flows.Counts{{Service: "shop/web", Protocol: "TCP"}: {Opened: 3, Active: 2, Traffic: flows.Traffic{
			ToBackends: flows.Sum{Packets: 5, Bytes: 600}, ToClients: flows.Sum{Packets: 7, Bytes: 8000},
		}}}, nil
	}))
	found, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]float64{}
	for _, family := range found {
		for _, m := range family.GetMetric() {
			name := family.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			have[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() // one of which it has
		}
	}
	want := map[string]float64{
		"isthmus_gateway_active_connections TCP shop/web":               2,
		"isthmus_gateway_connections_total TCP shop/web":                3,
		"isthmus_gateway_forwarded_packets_total TCP shop/web backends": 5,
		"isthmus_gateway_forwarded_packets_total TCP shop/web clients":  7,
		"isthmus_gateway_forwarded_bytes_total TCP shop/web backends":   600,
		"isthmus_gateway_forwarded_bytes_total TCP shop/web clients":    8000,
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("metrics (-want +have):\n%s", diff)
	}
	registry = prometheus.NewRegistry()
	registry.MustRegister(connections(func() (map[flows.CountKey]flows.Counts, error) { return nil, errors.New("no such map") }))
	if _, err := registry.Gather(); err == nil || !strings.Contains(err.Error(), "no such map") {
		t.Errorf("maps that cannot be read: %v", err)
	}
}

// Refused packets are counted by Service and reason.
func TestRefusedPackets(t *testing.T) {
	want := map[flows.Refusal]uint64{{Service: "shop/web", Reason: "no_flow"}: 2, {Reason: "new_flows"}: 1}
	registry := prometheus.NewRegistry()
	registry.MustRegister(refusals(func() (map[flows.Refusal]uint64, error) { return want, nil }))
	found, err := registry.Gather()
	if err != nil || len(found) != 1 || found[0].GetName() != "isthmus_gateway_refused_packets_total" {
		t.Fatalf("metrics %v, %v", found, err)
	}
	have := map[flows.Refusal]uint64{}
	for _, m := range found[0].GetMetric() {
		labels := map[string]string{}
		for _, l := range m.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		have[flows.Refusal{Service: labels["service"], Reason: labels["reason"]}] = uint64(m.GetCounter().GetValue())
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Error(diff)
	}
	registry = prometheus.NewRegistry()
	registry.MustRegister(refusals(func() (map[flows.Refusal]uint64, error) { return nil, errors.New("no such map") }))
	if _, err := registry.Gather(); err == nil || !strings.Contains(err.Error(), "no such map") {
		t.Errorf("maps that cannot be read: %v", err)
	}
}

// The metrics have the refusals of both listeners.
func TestRefusalsOfListeners(t *testing.T) {
	cfg := *defaults()
	cfg.Listen, cfg.HTTPListen = "127.0.0.1:0", "127.0.0.1:0"
	endpoint, status, err := listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer endpoint.Close()
	defer status.Close()
	registry := prometheus.NewRegistry()
	registry.MustRegister(endpoint, httpserver.Limit(status, httpserver.DefaultLimits))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "listener" {
					seen[f.GetName()+" "+l.GetValue()]++
				}
			}
		}
	}
	want := map[string]int{
		"isthmus_http_connections agent": 1, "isthmus_http_connections http": 1,
		"isthmus_http_refused_total agent": len(httpserver.Reasons()), "isthmus_http_refused_total http": len(httpserver.Reasons()),
	}
	if diff := cmp.Diff(want, seen); diff != "" {
		t.Errorf("metrics (-want +have):\n%s", diff)
	}
}
