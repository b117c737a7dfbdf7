package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// applyBoth applies what manifest returns for each member.
func applyBoth(t *testing.T, manifest func(member string) string) {
	t.Helper()
	for _, m := range testbed.Members() {
		if err := bed.Apply(t.Context(), m, manifest(m)); err != nil {
			t.Fatal(err)
		}
	}
}

// fqdn is the name of a Service of the tests in the ClusterSet, with a port.
func fqdn(service string, port int) string {
	return fmt.Sprintf("%s.%s.svc.clusterset.local:%d", service, namespace, port)
}

// ports42 are those of the upstream suite's Service.
const ports42 = "{name: tcp, port: 42, targetPort: 8081}, {name: udp, port: 42, targetPort: 8081, protocol: UDP}"

// TestNotExported: a Service that both members have and neither exports has no name in the ClusterSet.
func TestNotExported(t *testing.T) {
	needBed(t)
	applyBoth(t, func(string) string { return behind("private", ports42) })
	for _, m := range testbed.Members() {
		r, err := clientIn(m).run(t.Context(), "--connections", "20", "--tcp", fqdn("private", 42))
		if err != nil {
			t.Fatal(err)
		}
		if r.Errors["lookup: no such host"] != 20 {
			t.Errorf("from %s: of 20 connections by name %d failed, so: %v", m, r.Failures, r.Errors)
		}
		conformance.Holds(t, "C14")
		out, err := bed.Kubectl(t.Context(), m, "get", "serviceimport", "private", "--namespace", namespace, "--ignore-not-found", "--output", "name")
		if err != nil || out != "" {
			t.Errorf("%s has %q: %v", m, out, err)
		}
	}
}

// answers waits until every connection from a pod of a member to a target is answered by pods of one cluster. protocol
// is the client's flag.
func answers(t *testing.T, member, cluster, protocol, target string) {
	t.Helper()
	err := testbed.Eventually(t.Context(), patience, func(ctx context.Context) error {
		r, err := clientIn(member).run(ctx, "--connections", "50", "--timeout", "2s", protocol, target)
		if err == nil && (r.Failures > 0 || !slices.Equal(r.clusters(), []string{cluster})) {
			err = fmt.Errorf("%v answer, %d of %d fail: %v", r.Backends, r.Failures, r.Connections, r.Errors)
		}
		return err
	})
	if err != nil {
		t.Errorf("from %s to %s, which is of %s: %v", member, target, cluster, err)
	}
}

// TestOnlyTheExporterAnswers: both members have the Service and one exports it. By its name, over TCP and UDP and from
// every cluster, its pods answer and nobody else's; so they do at its addresses of both families.
func TestOnlyTheExporterAnswers(t *testing.T) {
	needBed(t)
	t.Parallel()
	applyBoth(t, func(string) string { return behind("single", ports42) })
	publish(t, "single", "b")
	addrs, err := vipsOf(t.Context(), "single")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range testbed.Members() {
		for _, protocol := range []string{"--tcp", "--udp"} {
			answers(t, m, "b", protocol, fqdn("single", 42))
			for _, vip := range addrs {
				answers(t, m, "b", protocol, netip.AddrPortFrom(vip, 42).String())
			}
		}
	}
	conformance.Holds(t, "C24", "C25")
}

// TestPortsLeadToTheirClusters: where a says 42, b says 4242. Under one name the older export's number counts and leads
// to its own pods; under two names each number leads to the pods of who said so.
func TestPortsLeadToTheirClusters(t *testing.T) {
	needBed(t)
	t.Parallel()
	ports := map[string]map[string]string{
		"one-name":  {"a": "{name: tcp, port: 42, targetPort: 8081}", "b": "{name: tcp, port: 4242, targetPort: 8081}"},
		"two-names": {"a": "{name: tcp, port: 42, targetPort: 8081}", "b": "{name: tcp2, port: 4242, targetPort: 8081}"},
	}
	for service, of := range ports {
		applyBoth(t, func(m string) string { return behind(service, of[m]) })
		publish(t, service, "a", "b")
	}
	for _, m := range testbed.Members() {
		answers(t, m, "a", "--tcp", fqdn("one-name", 42))
		if err := refuses(t.Context(), clientIn(m), "--tcp", fqdn("one-name", 4242)); err != nil {
			t.Errorf("from %s: %v", m, err)
		}
		conformance.Holds(t, "C26")
		answers(t, m, "a", "--tcp", fqdn("two-names", 42))
		answers(t, m, "b", "--tcp", fqdn("two-names", 4242))
		conformance.Holds(t, "C27")
	}
}
