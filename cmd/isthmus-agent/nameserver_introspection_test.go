package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	wire "github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns"
)

// vip returns a snapshot with the Service hello.demo and its VIP.
func vip() *clusterset.Snapshot {
	return &clusterset.Snapshot{Services: []clusterset.Service{{Import: clusterset.Import{
		Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"}, Type: clusterset.ClusterSetIP,
		IPs: []netip.Addr{netip.MustParseAddr("243.0.0.1")}, Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}},
	}}}}
}

// The records are shown as a zone file or as JSON: to processes of the node, and to others only with a token.
func TestShowRecords(t *testing.T) {
	n, _ := startNameserver(t)
	if err := n.Sync(t.Context(), vip()); err != nil {
		t.Fatal(err)
	}
	access, err := newAccess(&rest.Config{Host: "https://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	h := httpserver.New(httpserver.Config{Access: access, Log: slog.New(slog.DiscardHandler)})
	(&introspection{names: n}).register(h.Handle)
	server := httptest.NewTLSServer(h)
	defer server.Close()
	listen := "--http-listen=" + strings.TrimPrefix(server.URL, "https://")
	show := func(args ...string) (string, error) {
		var out bytes.Buffer
		cmd := newCommand()
		cmd.SetOut(&out)
		cmd.SetErr(&bytes.Buffer{})
		cmd.SetArgs(append([]string{"show", "records", listen}, args...))
		err := cmd.ExecuteContext(t.Context())
		return out.String(), err
	}
	const line = "_http._tcp.hello.demo.svc.clusterset.local. 0 IN SRV 0 100 80 hello.demo.svc.clusterset.local.\n"
	if have, err := show("_tcp.hello.demo.svc.clusterset.local"); err != nil || have != line {
		t.Errorf("have %q, %v, want %q", have, err, line)
	}
	if have, err := show(); err != nil || !strings.Contains(have, line) || !strings.Contains(have, "dns-version.clusterset.local. 28800 IN TXT \"1.0.0\"\n") {
		t.Errorf("all records: %v\n%s", err, have)
	}
	text, err := show("-o", "json", "_tcp.hello.demo.svc.clusterset.local")
	var have status.Records
	if err != nil || json.Unmarshal([]byte(text), &have) != nil {
		t.Errorf("JSON: %v\n%s", err, text)
	}
	want := status.Records{{Name: "_http._tcp.hello.demo.svc.clusterset.local.", Type: "SRV", Data: "0 100 80 hello.demo.svc.clusterset.local."}}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("as JSON (-want +have):\n%s", diff)
	}
	if _, err := show("unknown.demo.svc.clusterset.local"); err == nil {
		t.Error("records of an unknown name")
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, status.RecordsPath, nil)
	r.RemoteAddr = "192.0.2.1:4242"
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if w.Code != http.StatusUnauthorized {
		t.Errorf("from another host without a token: %d", w.Code)
	}
}

// gathered returns the metrics of the name server by name and label values.
func gathered(t *testing.T, n *nameserver) map[string]float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(dnsMetrics{n.dnsStatus})
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "isthmus_agent_dns_")
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			all[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return all
}

func TestDNSMetrics(t *testing.T) {
	if have := gathered(t, newNameserver(dns.Config{}, nil, nil)); len(have) != 0 {
		t.Errorf("before there are sockets: %v", have)
	}
	n, at := startNameserver(t)
	if have := gathered(t, n); have["update_seconds"] != 0 || have["names"] != 0 {
		t.Errorf("before the first snapshot: %v", have)
	}
	if err := n.Sync(t.Context(), vip()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"hello", "unknown"} {
		q := new(wire.Msg).SetQuestion(name+".demo.svc.clusterset.local.", wire.TypeA)
		if _, _, err := new(wire.Client).ExchangeContext(t.Context(), q, at); err != nil {
			t.Fatal(err)
		}
	}
	have := gathered(t, n)
	for name, want := range map[string]float64{
		"answers_total fast NOERROR A": 1, "answers_total fast NXDOMAIN A": 1, "ignored_total": 0, "limited_total": 0,
		"refused_connections_total pods": 0, "refused_connections_total unread": 0, "acl_refused_total node refused": 0, "acl_refused_total external dropped": 0, "dropped_total": 0, "stale": 0, "zone_file_error": 0, "skipped": 0, "update_seconds": 1, "names": 9,
	} {
		if got, ok := have[name]; !ok || got != want {
			t.Errorf("%s: have %v, want %v, of %v", name, got, want, fmt.Sprint(have))
		}
	}
	if have["zone_timestamp_seconds"] == 0 {
		t.Error("no time of the last change")
	}
}
