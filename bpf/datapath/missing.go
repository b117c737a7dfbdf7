package datapath

import (
	"os"
	"slices"

	"github.com/isthmus-net/isthmus/bpf/datapath/internal/conntrack"
)

// lacks lists what the node does not have and what is done without it. noClose and noFind are the errors of loading the
// iterators that close and that find sockets.
func lacks(withPackets bool, noClose, noFind error) []string {
	var found []string
	if err := haveTCX(); withPackets && err != nil {
		found = append(found, "TCX (Linux 6.6 or newer): the packet path is made of clsact filters")
	}
	switch {
	case noFind != nil:
		found = append(found, "BPF iterators over sockets: sockets of removed UDP backends stay until their programs close them")
	case noClose != nil:
		found = append(found, "bpf_sock_destroy (Linux 6.5 or newer): sockets of removed UDP backends are closed over netlink")
	}
	if !mayEnter() {
		found = append(found, "capability SYS_ADMIN: sockets of removed UDP backends are closed in the agent's network namespace alone, others stay until their programs close them")
	}
	if conntrack.Supported() != nil {
		found = append(found, "connection tracking over netlink: a masquerade of traffic to other clusters is not noticed")
	}
	if _, err := os.Stat("/proc/sys/net/mptcp/enabled"); err != nil {
		found = append(found, "MPTCP: programs that ask for it get TCP")
	}
	return found
}

// Missing returns what the kernel, or the process's capabilities, do not give, one sentence each with what comes of
// it. It was found by Open and does not change.
func (d *Datapath) Missing() []string { return slices.Clone(d.missing) }
