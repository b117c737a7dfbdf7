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

// Finding is something about a node that does not go well with the dataplane, with the fix.
type Finding = device.Finding

// Findings stands by what it has found for findingsAge, or for findingsCost times as long as it took to find:
// it reads all backends and the kernel's connections, which on some nodes are very many.
const (
	findingsAge  = 10 * time.Second
	findingsCost = 100
)

// findings are the last ones.
type findings struct {
	mu    sync.Mutex
	until time.Time // when they are too old
	found []Finding
	err   error
}

// Findings returns what on this node does not go well with the dataplane: backends without a route, sources that
// somebody masquerades, and with a packet path also forwarding that is off, reverse path filters and MTUs that
// lose packets, devices it cannot be on, and programs of others that come between. What is new it also logs. It may be some seconds old.
func (d *Datapath) Findings() ([]Finding, error) {
	d.findings.mu.Lock()
	defer d.findings.mu.Unlock()
	if f, begin := &d.findings, time.Now(); begin.After(f.until) {
		before := f.found
		f.found, f.err = d.examine()
		f.until = begin.Add(max(findingsAge, findingsCost*time.Since(begin)))
		for _, n := range f.found {
			if !slices.Contains(before, n) {
				d.log.Warn("the node does not go well with the dataplane", "finding", n.Name, "severity", n.Severity.String(), "problem", n.Message, "fix", n.Fix)
			}
		}
	}
	return slices.Clone(d.findings.found), d.findings.err
}

// examine is Findings as of now.
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
	if node.Ways, replaced, err = d.ways(devices); err != nil {
		return nil, err
	}
	found, err := node.Check()
	return slices.Concat(found, replaced, between), err
}

// direction is where the backends of a member are, in one family.
type direction struct {
	cluster lb.ClusterIndex
	six     bool
}

// ways returns how the node reaches one backend in each direction, and where somebody masquerades.
func (d *Datapath) ways(devices []device.Device) ([]device.Way, []Finding, error) {
	shown, err := masqueraded()
	if err != nil {
		return nil, nil, err
	}
	first := map[direction]netip.Addr{}
	instead := map[direction][]netip.Addr{} // of clients
	err = dump(context.Background(), d.Reader, bpf.MapBackends, func(_ uint32, v bpf.Backend) {
		b := decodeBackend(v)
		to := b.AddrPort.Addr()
		in := direction{b.Cluster, to.Is6()}
		if have, ok := first[in]; !ok || to.Less(have) {
			first[in] = to
		}
		if a, ok := shown[b.Address]; ok {
			instead[in] = append(instead[in], a)
		}
	})
	if err != nil {
		return nil, nil, err
	}
	var ways []device.Way
	var found []Finding
	for in, to := range first {
		w, err := device.FindWay(string(d.clusterName(in.cluster)), to, devices)
		if err != nil {
			return nil, nil, err
		}
		ways = append(ways, w)
		if addrs := instead[in]; len(addrs) > 0 {
			found = append(found, masquerade(w.Cluster, slices.MinFunc(addrs, netip.Addr.Compare)))
		}
	}
	slices.SortFunc(ways, func(a, b device.Way) int { return cmp.Or(strings.Compare(a.Cluster, b.Cluster), a.To.Compare(b.To)) })
	slices.SortFunc(found, func(a, b Finding) int { return strings.Compare(a.Message, b.Message) })
	return ways, found, nil
}

// masqueradedMax is how many destinations of masqueraded connections are looked at. Those that are no backends, on
// the internet for one, are among them.
const masqueradedMax = 1 << 16

// masqueraded returns the destinations that do not see who connects to them, and whom they see instead. A connection
// that began before the rule for it went stays in the kernel's table until it has ended.
func masqueraded() (map[lb.Address]netip.Addr, error) {
	shown := map[lb.Address]netip.Addr{}
	err := conntrack.Masqueraded(func(f conntrack.Flow) bool {
		shown[lb.Address{AddrPort: f.To, Protocol: clusterset.Protocol(f.Protocol)}] = f.Shown
		return len(shown) < masqueradedMax
	})
	if errors.Is(err, conntrack.ErrUnsupported) {
		return nil, nil // Missing says so
	}
	return shown, err
}

func masquerade(cluster string, shown netip.Addr) Finding {
	return Finding{
		Name: "masquerade", Severity: device.Warning,
		Message: fmt.Sprintf("connections to backends of cluster %s are masqueraded on this node: the backends see %s and not the pods that connect", cluster, shown),
		Fix:     "leave the pod networks of other members out of masquerading, with ipMasq of a CNI plugin or nonMasqueradeCIDRs of an ip-masq-agent for instance",
	}
}
