package datapath

import (
	"os"
	"slices"

	"github.com/isthmus-net/isthmus/bpf/datapath/internal/conntrack"
)

// missingFeatures lists the features that the node lacks, each with the consequence. noClose and noFind are the errors of
// loading the iterators that close and that find sockets.
func missingFeatures(withPackets bool, noClose, noFind error) []string {
	var found []string
	if err := haveTCX(); withPackets && err != nil {
		found = append(found, "TCX (Linux 6.6 or newer): the packet path uses clsact filters")
	}
	switch {
	case noFind != nil:
		found = append(found, "BPF iterators over sockets: sockets of removed UDP backends stay open until their programs close them")
	case noClose != nil:
		found = append(found, "bpf_sock_destroy (Linux 6.5 or newer): sockets of removed UDP backends are closed over netlink")
	}
	if !canEnterNamespaces() {
		found = append(found, "capability SYS_ADMIN: sockets of removed UDP backends are closed only in the agent's network namespace; others stay open until their programs close them")
	}
	if conntrack.Supported() != nil {
		found = append(found, "connection tracking over netlink: masquerading of traffic to other clusters is not detected")
	}
	if _, err := os.Stat("/proc/sys/net/mptcp/enabled"); err != nil {
		found = append(found, "MPTCP: programs that ask for it get TCP")
	}
	return found
}

// Missing returns the features that the kernel or the capabilities of the process lack, one sentence each with the
// consequence. Open detects them, and they do not change.
func (d *Datapath) Missing() []string { return slices.Clone(d.missing) }
