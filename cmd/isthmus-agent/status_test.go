package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/controlplane/view"
)

// The status lists the capabilities that the kernel lacks and the findings about the node, these with their fix.
func TestStatusListsMissingCapabilities(t *testing.T) {
	s := agentStatus(Config{}, view.Status{}, agent.Status{
		Missing:  []string{"TCX: filters"},
		Findings: []datapath.Finding{{Name: "ip_forward", Message: "net.ipv4.ip_forward is 0", Fix: "sysctl -w net.ipv4.ip_forward=1"}},
	}, &nameserver{})
	want := []string{"TCX: filters", "net.ipv4.ip_forward is 0; sysctl -w net.ipv4.ip_forward=1"}
	if diff := cmp.Diff(want, s.MissingCapabilities); diff != "" {
		t.Errorf("missing (-want +have):\n%s", diff)
	}
}
