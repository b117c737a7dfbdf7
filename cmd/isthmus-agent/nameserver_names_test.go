package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	wire "github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/controlplane/view"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// stateful is a headless Service with a StatefulSet's pods in cluster a and a Deployment's pod in cluster b. The last pod in
// a is published although it is not serving.
const stateful = `apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceImport
metadata: {namespace: demo, name: pods}
spec:
  type: Headless
  ports: [{name: web, port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  namespace: demo
  name: a-1
  labels: {multicluster.kubernetes.io/service-name: pods, multicluster.kubernetes.io/source-cluster: a}
addressType: IPv4
ports: [{name: web, port: 8080, protocol: TCP}]
endpoints:
- {addresses: [10.101.0.1], hostname: web-0, conditions: {ready: true}}
- {addresses: [10.101.0.2], hostname: web-1, conditions: {ready: false, serving: false}}
- {addresses: [10.101.0.3], hostname: web-2, conditions: {ready: true, serving: false}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  namespace: demo
  name: b-1
  labels: {multicluster.kubernetes.io/service-name: pods, multicluster.kubernetes.io/source-cluster: b}
addressType: IPv4
ports: [{name: web, port: 8080, protocol: TCP}]
endpoints:
- {addresses: [10.102.0.1], targetRef: {kind: Pod, name: web-5d9f-x2c}}
`

// Manifests lead to these answers: hostnames of a StatefulSet, addresses with dashes and names of pods, for ready endpoints
// and for those published before they are ready.
func TestHeadlessNames(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "manifests.yaml"), []byte(stateful), 0o600); err != nil {
		t.Fatal(err)
	}
	n, at := startNameserver(t)
	source, err := view.NewFolder(view.Config{Sinks: map[string]view.Sink{"dns": n}, Log: slog.New(slog.DiscardHandler)}, dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- source.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	await(t, func() error {
		if s, _ := n.dnsStatus(); !s.Synced {
			return errors.New("no snapshot yet")
		}
		return nil
	})
	const svc = "pods.demo.svc.clusterset.local."
	for name, want := range map[string][]string{
		svc:                     {"10.101.0.1", "10.101.0.3", "10.102.0.1"},
		"web-0.a." + svc:        {"10.101.0.1"},
		"web-1.a." + svc:        nil, // not ready
		"web-2.a." + svc:        {"10.101.0.3"},
		"10-102-0-1.b." + svc:   {"10.102.0.1"},
		"web-5d9f-x2c.b." + svc: {"10.102.0.1"},
		"10-101-0-1.a." + svc:   nil, // it has a hostname
	} {
		resp, _, err := new(wire.Client).ExchangeContext(t.Context(), new(wire.Msg).SetQuestion(name, wire.TypeA), at)
		if err != nil {
			t.Fatal(err)
		}
		var have []string
		for _, rr := range resp.Answer {
			have = append(have, netip.MustParseAddr(wire.Field(rr, 1)).String())
		}
		slices.Sort(have)
		if !slices.Equal(have, want) || (resp.Rcode == wire.RcodeNameError) != (want == nil) {
			t.Errorf("%s: have %s %v, want %v", name, wire.RcodeToString[resp.Rcode], have, want)
		}
	}
	conformance.Holds(t, "N42", "N43", "L61")
}
