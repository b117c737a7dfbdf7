package agent

import (
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/agent/evidence"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Config configures the agent of a node. The zero value takes the defaults.
type Config struct {
	// CgroupRoot is where the node's cgroup v2 hierarchy is mounted, or the folder that holds it as
	// "unified". Default /sys/fs/cgroup. In a container it is a mount of the host's folder.
	CgroupRoot string
	// BPFFS is the BPF filesystem in which programs and maps outlive the agent. Default /sys/fs/bpf.
	BPFFS string
	// Proc and Namespaces are where the node's processes and its named network namespaces are found, default /proc
	// and /run/netns. UDP sockets of removed backends are closed in these namespaces.
	Proc, Namespaces string
	// Packets enables the packet path, for clients whose sockets are not translated. It runs on Devices, names or
	// patterns such as "eth*", or on automatically selected ones if there are none, in the given Order among the
	// programs of others.
	Packets bool
	Devices []string
	Order   datapath.Order
	// FastPath lets flows between pods and uplinks bypass the node's routing and netfilter, in both directions, and with
	// them the policies that other programs enforce there.
	FastPath bool
	// CheckInterval is the average time between two checks of the maps against their intended content. Default a minute.
	CheckInterval time.Duration
	// Topology is the node's place in the ClusterSet, as far as it is known at the start; SetTopology updates it.
	Topology Topology
	// Report, if not nil, is called with what this node knows of each member's packets, once at the start and after each
	// change. It is called from a goroutine of Run and must not block. It owns the map.
	Report func(map[clusterset.ClusterID]evidence.State)
	// Refused, if not nil, is called when a VIP begins to be refused because of the ranges: they may have grown. It must not
	// block.
	Refused func()
}

// Topology is the node's place in the ClusterSet. Unknown fields are empty: then no endpoint is near.
type Topology struct {
	Node lb.Node
	// ZonesSpanClusters says that a zone's name means the same zone in all members.
	ZonesSpanClusters bool
	// RegionsSpanClusters says the same of regions.
	RegionsSpanClusters bool
	// Ranges are the CIDRs of all ClusterSetIPs. VIPs are served inside of them only, and their other addresses are refused.
	// Without any, the last known ones stay in force, which the kernel keeps; if there were none, the agent serves no VIP that
	// it does not serve already.
	Ranges []netip.Prefix
	// Own are the addresses that the cluster itself uses. No VIP is served there.
	Own []lb.Own
}

func (t Topology) equal(o Topology) bool {
	return t.Node == o.Node && t.ZonesSpanClusters == o.ZonesSpanClusters && t.RegionsSpanClusters == o.RegionsSpanClusters &&
		slices.Equal(t.Ranges, o.Ranges) && slices.Equal(t.Own, o.Own)
}

// Validate reports all faults of c at once, or nil.
func (c Config) Validate() error { return c.datapath().Validate() }

func (c Config) datapath() datapath.Config {
	return datapath.Config{
		CgroupRoot: c.CgroupRoot, BPFFS: c.BPFFS, Proc: c.Proc, Namespaces: c.Namespaces,
		Packets: c.Packets, Devices: c.Devices, Order: c.Order, FastPath: c.FastPath,
	}
}
