package datapath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/conntrack"
	"github.com/isthmus-net/isthmus/bpf/datapath/internal/device"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Finding is a fault of the node's configuration that affects the dataplane, with its fix.
type Finding = device.Finding

// Findings are cached for findingsAge, or for findingsCost times as long as the check took if that is longer: the check
// reads all backends and the kernel's connections, which can be very many.
const (
	findingsAge  = 10 * time.Second
	findingsCost = 100
)

// findings is the cached result of a check.
type findings struct {
	mu    sync.Mutex
	until time.Time // when the result expires
	found []Finding
	err   error
}

// Findings returns faults of the node that affect the dataplane: members without a route, and masqueraded
// connections. With a packet path it also returns disabled forwarding, reverse path filters and MTUs that lose packets,
// unsuitable devices, and programs of others that run between ours and the client. New findings are logged. The result
// may be some seconds old.
func (d *Datapath) Findings() ([]Finding, error) {
	d.findings.mu.Lock()
	defer d.findings.mu.Unlock()
	if f, begin := &d.findings, time.Now(); begin.After(f.until) {
		before := f.found
		f.found, f.err = d.examine()
		f.until = begin.Add(max(findingsAge, findingsCost*time.Since(begin)))
		for _, n := range f.found {
			if !slices.Contains(before, n) {
				d.log.Warn("the node's configuration affects the dataplane", "finding", n.Name, "severity", n.Severity.String(), "problem", n.Message, "fix", n.Fix)
			}
		}
	}
	return slices.Clone(d.findings.found), d.findings.err
}

// examine returns the findings without the cache.
func (d *Datapath) examine() ([]Finding, error) {
	devices, err := device.List()
	if err != nil {
		return nil, err
	}
	node := device.Node{Devices: devices, Sysctl: "/proc/sys/net"}
	var between []Finding
	if d.packets != nil {
		if node.Served, between, err = d.packets.neighbours(); err != nil {
			return nil, err
		}
		between = append(between, device.CheckBare(devices, d.packets.patterns)...)
	}
	var replaced []Finding
	if node.Routes, replaced, err = d.routes(devices); err != nil {
		return nil, err
	}
	found, err := node.Check()
	return slices.Concat(found, replaced, between), err
}

// destination is the backends of one member and address family.
type destination struct {
	cluster lb.ClusterIndex
	ipv6    bool
}

// routes returns the route to one backend of each destination, and a finding for each that is masqueraded.
func (d *Datapath) routes(devices []device.Device) ([]device.Route, []Finding, error) {
	translated, err := masqueraded()
	if err != nil {
		return nil, nil, err
	}
	first := map[destination]netip.Addr{}
	sources := map[destination][]netip.Addr{} // that backends see instead of the clients
	err = dump(context.Background(), d.Reader, bpf.MapBackends, func(_ uint32, v bpf.Backend) {
		b := decodeBackend(v)
		to := b.AddrPort.Addr()
		in := destination{b.Cluster, to.Is6()}
		if have, ok := first[in]; !ok || to.Less(have) {
			first[in] = to
		}
		if a, ok := translated[b.Address]; ok {
			sources[in] = append(sources[in], a)
		}
	})
	if err != nil {
		return nil, nil, err
	}
	var routes []device.Route
	var found []Finding
	for in, to := range first {
		w, err := device.FindRoute(string(d.clusterName(in.cluster)), to, devices)
		if err != nil {
			return nil, nil, err
		}
		routes = append(routes, w)
		if addrs := sources[in]; len(addrs) > 0 {
			found = append(found, masquerade(w.Cluster, slices.MinFunc(addrs, netip.Addr.Compare)))
		}
	}
	slices.SortFunc(routes, func(a, b device.Route) int { return cmp.Or(strings.Compare(a.Cluster, b.Cluster), a.To.Compare(b.To)) })
	slices.SortFunc(found, func(a, b Finding) int { return strings.Compare(a.Message, b.Message) })
	return routes, found, nil
}

// masqueradedMax bounds the destinations of masqueraded connections that are read. They include destinations that are
// not backends, such as hosts on the internet.
const masqueradedMax = 1 << 16

// masqueraded returns the destinations of masqueraded connections, and the source that each sees instead of the client.
// A connection that began before its rule was removed stays in the kernel's table until it ends.
func masqueraded() (map[lb.Address]netip.Addr, error) {
	translated := map[lb.Address]netip.Addr{}
	err := conntrack.Masqueraded(func(f conntrack.Flow) bool {
		translated[lb.Address{AddrPort: f.To, Protocol: clusterset.Protocol(f.Protocol)}] = f.Translated
		return len(translated) < masqueradedMax
	})
	if errors.Is(err, conntrack.ErrUnsupported) {
		return nil, nil // Missing reports it
	}
	return translated, err
}

func masquerade(cluster string, source netip.Addr) Finding {
	return Finding{
		Name: "masquerade", Severity: device.Warning,
		Message: fmt.Sprintf("connections to backends of cluster %s are masqueraded on this node: the backends see %s instead of the pods", cluster, source),
		Fix:     "exclude the pod networks of other members from masquerading, for instance with ipMasq of a CNI plugin or nonMasqueradeCIDRs of an ip-masq-agent",
	}
}
