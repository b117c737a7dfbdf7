// Package topology says which clusters and machines a lab has and which addresses they get.
//
// In: a text such as "a:2 b:1/ipv4-only broker:0" (cluster a with two nodes, b with one and without
// IPv6, and broker, a control plane without nodes). Out: a Topology, whose addresses follow from the position
// of a cluster (i, 1..9) and of a node in it (j, 1..9) alone:
//
//	control plane of i   10.200.0.<i>0     fd00:200::<i>0
//	node j of i          10.200.0.<i><j>   fd00:200::<i><j>
//	pods of that node    10.20<i>.<j>.0/24 fd00:20<i>:<j>::/64
//	Services of i        10.10<i>.0.0/16   fd00:10<i>::/112
//
// Everything here is pure.
package topology

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Default is the topology of a lab that asks for none.
const Default = "a:2 b:1 broker:0"

// maxClusters and maxNodes keep every index a single decimal digit of an address.
const (
	maxClusters = 9
	maxNodes    = 9
)

// FabricIPv4 and FabricIPv6 are the addresses of the network all machines share. The
// fabric itself, where drivers such as kubectl run, holds the address in the prefix.
var (
	FabricIPv4 = netip.MustParsePrefix("10.200.0.1/24")
	FabricIPv6 = netip.MustParsePrefix("fd00:200::1/64")
)

// clusterName also bounds the length: "p-<cluster><digit>" names a network interface,
// which Linux limits to 15 bytes.
var clusterName = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,9}[a-z0-9])?$`)

// Topology is an ordered list of clusters. The order decides addresses.
type Topology []Cluster

// Families are the address families of a cluster's Services, pods and nodes. The machines' network always has both.
type Families string

// The values of Families.
const (
	IPv4First Families = "" // both; an address of either comes first where Kubernetes prefers one
	IPv6First Families = "ipv6-first"
	IPv4Only  Families = "ipv4-only"
)

// ordered returns what a cluster of these families has of v4 and v6, the preferred one first.
func ordered[T any](f Families, v4, v6 T) []T {
	switch f {
	case IPv6First:
		return []T{v6, v4}
	case IPv4Only:
		return []T{v4}
	default:
		return []T{v4, v6}
	}
}

// Cluster is one Kubernetes cluster: a control plane and Nodes.
type Cluster struct {
	Name     string
	Index    int // 1..9, position in the topology
	Families Families
	Nodes    []Node
}

// Node is one worker of a cluster.
type Node struct {
	Name    string // cluster name and Index: "a1"
	Cluster string
	Index   int // 1..9, position in the cluster
	IPv4    netip.Addr
	IPv6    netip.Addr
	PodIPv4 netip.Prefix
	PodIPv6 netip.Prefix
	// Families are those of its cluster. Their addresses above are set all the same.
	Families Families
}

// PodCIDRs holds the node's pods, the preferred family first.
func (n Node) PodCIDRs() []netip.Prefix { return ordered(n.Families, n.PodIPv4, n.PodIPv6) }

// Addresses are those that Kubernetes knows, the preferred family first.
func (n Node) Addresses() []netip.Addr { return ordered(n.Families, n.IPv4, n.IPv6) }

// Machine is anything with an address on the fabric: a node or a control plane.
type Machine struct {
	Name string
	IPv4 netip.Addr
	IPv6 netip.Addr
	// DNS is the cluster DNS Service, the machine's own resolver.
	DNS netip.Addr
}

// Parse reads words "NAME:NODES" or "NAME:NODES/FAMILIES", separated by space or comma. The error joins every
// fault found.
func Parse(s string) (Topology, error) {
	words := strings.FieldsFunc(s, func(r rune) bool { return r == ' ' || r == ',' })
	var errs []error
	if len(words) == 0 {
		errs = append(errs, errors.New("no cluster named, want for example \"a:2 b:1 broker:0\""))
	}
	if len(words) > maxClusters {
		errs = append(errs, fmt.Errorf("%d clusters, at most %d fit the address plan", len(words), maxClusters))
	}
	var t Topology
	seen := map[string]bool{}
	claim := func(name string) {
		if seen[name] {
			errs = append(errs, fmt.Errorf("two machines are called %q", name))
		}
		seen[name] = true
	}
	for at, word := range words {
		name, count, ok := strings.Cut(word, ":")
		if !ok || !clusterName.MatchString(name) {
			errs = append(errs, fmt.Errorf("%q is not CLUSTER:NODES with a short lower-case name", word))
			continue
		}
		count, families, _ := strings.Cut(count, "/")
		if f := Families(families); f != IPv4First && f != IPv6First && f != IPv4Only {
			errs = append(errs, fmt.Errorf("%q: the families are %s or %s, or both if none are given", word, IPv6First, IPv4Only))
			continue
		}
		nodes, err := strconv.Atoi(count)
		if err != nil || nodes < 0 || nodes > maxNodes {
			errs = append(errs, fmt.Errorf("%q: the number of nodes is between 0 and %d", word, maxNodes))
			continue
		}
		c := Cluster{Name: name, Index: at + 1, Families: Families(families)}
		claim(name)
		for j := 1; j <= nodes; j++ {
			n := newNode(c, j)
			claim(n.Name)
			c.Nodes = append(c.Nodes, n)
		}
		t = append(t, c)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("topology %q: %w", s, err)
	}
	return t, nil
}

// String is the text Parse accepts.
func (t Topology) String() string {
	words := make([]string, len(t))
	for i, c := range t {
		words[i] = fmt.Sprintf("%s:%d", c.Name, len(c.Nodes))
		if c.Families != IPv4First {
			words[i] += "/" + string(c.Families)
		}
	}
	return strings.Join(words, " ")
}

// Cluster returns the cluster of that name.
func (t Topology) Cluster(name string) (Cluster, bool) {
	for _, c := range t {
		if c.Name == name {
			return c, true
		}
	}
	return Cluster{}, false
}

// Grow returns a topology in which the named cluster has another node, and that node.
func (t Topology) Grow(name string) (Topology, Node, error) {
	i := slices.IndexFunc(t, func(c Cluster) bool { return c.Name == name })
	if i < 0 {
		return nil, Node{}, fmt.Errorf("no cluster %q in topology %q", name, t)
	}
	c := t[i]
	if len(c.Nodes) == maxNodes {
		return nil, Node{}, fmt.Errorf("cluster %s has %d nodes already, the most that the address plan holds", name, maxNodes)
	}
	n := newNode(c, len(c.Nodes)+1)
	c.Nodes = append(slices.Clone(c.Nodes), n)
	grown := slices.Clone(t)
	grown[i] = c
	return grown, n, nil
}

// Shrink returns a topology in which the named cluster lacks its last node, and that node.
func (t Topology) Shrink(name string) (Topology, Node, error) {
	i := slices.IndexFunc(t, func(c Cluster) bool { return c.Name == name && len(c.Nodes) > 0 })
	if i < 0 {
		return nil, Node{}, fmt.Errorf("no cluster %q with nodes in topology %q", name, t)
	}
	shrunk := slices.Clone(t)
	last := len(t[i].Nodes) - 1
	shrunk[i].Nodes = t[i].Nodes[:last:last]
	return shrunk, t[i].Nodes[last], nil
}

// NodeNames returns the names of all nodes that a cluster can have.
func (c Cluster) NodeNames() []string {
	var names []string
	for j := 1; j <= maxNodes; j++ {
		names = append(names, newNode(c, j).Name)
	}
	return names
}

// Nodes returns the nodes of all clusters in order.
func (t Topology) Nodes() []Node {
	var all []Node
	for _, c := range t {
		all = append(all, c.Nodes...)
	}
	return all
}

// Machines returns every control plane and node in order.
func (t Topology) Machines() []Machine {
	var all []Machine
	for _, c := range t {
		all = append(all, c.Machine())
		for _, n := range c.Nodes {
			all = append(all, Machine{Name: n.Name, IPv4: n.IPv4, IPv6: n.IPv6, DNS: c.DNSServiceIP()})
		}
	}
	return all
}

// Machine is the control plane's machine. It has the cluster's name.
func (c Cluster) Machine() Machine {
	v4, v6 := fabricAddrs(c.Index, 0)
	return Machine{Name: c.Name, IPv4: v4, IPv6: v6, DNS: c.DNSServiceIP()}
}

// Server is the URL of the API server, reachable from the fabric and from every machine and pod.
func (c Cluster) Server() string {
	return "https://" + netip.AddrPortFrom(c.Machine().IPv4, 6443).String()
}

// Advertise is the address at which the API server is an endpoint of default/kubernetes: of the preferred family.
func (c Cluster) Advertise() netip.Addr {
	m := c.Machine()
	return ordered(c.Families, m.IPv4, m.IPv6)[0]
}

// PodCIDRs holds the pods of all nodes, the preferred family first.
func (c Cluster) PodCIDRs() []netip.Prefix {
	return ordered(c.Families,
		netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(200 + c.Index), 0, 0}), 16),
		netip.MustParsePrefix(fmt.Sprintf("fd00:20%d::/32", c.Index)))
}

// ServiceCIDRs holds the ClusterIPs, the preferred family first.
func (c Cluster) ServiceCIDRs() []netip.Prefix {
	return ordered(c.Families,
		netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(100 + c.Index), 0, 0}), 16),
		netip.MustParsePrefix(fmt.Sprintf("fd00:10%d::/112", c.Index)))
}

// KubernetesServiceIP is the ClusterIP of default/kubernetes.
func (c Cluster) KubernetesServiceIP() netip.Addr { return c.ServiceCIDRs()[0].Addr().Next() }

// DNSServiceIP is the ClusterIP of kube-system/kube-dns.
func (c Cluster) DNSServiceIP() netip.Addr {
	return ordered(c.Families,
		netip.AddrFrom4([4]byte{10, byte(100 + c.Index), 0, 10}),
		netip.MustParseAddr(fmt.Sprintf("fd00:10%d::a", c.Index)))[0]
}

func newNode(c Cluster, j int) Node {
	v4, v6 := fabricAddrs(c.Index, j)
	return Node{
		Name:    c.Name + strconv.Itoa(j),
		Cluster: c.Name,
		Index:   j,
		IPv4:    v4,
		IPv6:    v6,
		PodIPv4: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(200 + c.Index), byte(j), 0}), 24),
		PodIPv6: netip.MustParsePrefix(fmt.Sprintf("fd00:20%d:%d::/64", c.Index, j)),

		Families: c.Families,
	}
}

// fabricAddrs gives machine j of cluster i its addresses; control planes are machine 0.
func fabricAddrs(i, j int) (v4, v6 netip.Addr) {
	return netip.AddrFrom4([4]byte{10, 200, 0, byte(10*i + j)}),
		netip.MustParseAddr(fmt.Sprintf("fd00:200::%d%d", i, j))
}
