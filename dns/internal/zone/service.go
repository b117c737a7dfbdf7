package zone

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// serviceEntries returns the names of one Service with their records, and the parts of it that cannot have a name.
func (c Config) serviceEntries(s *clusterset.Service) (entries []entry, problems []string) {
	for _, label := range []string{s.Service.Name, s.Service.Namespace} {
		if !isLabel(label) {
			return nil, []string{notALabel(label)}
		}
	}
	r := serviceRecords{recordBuilder: recordBuilder{ttl: c.TTL}, Config: c, name: under(svcName, s.Service.Name, s.Service.Namespace), service: s}
	switch {
	case s.Type == clusterset.Headless:
		r.addHeadless()
	case s.UseIP == clusterset.Disabled:
		r.addWithoutIP()
	default:
		r.addClusterSetIP()
	}
	return r.entries(), r.problems
}

// serviceRecords collects the records of one Service.
type serviceRecords struct {
	recordBuilder
	Config
	name     string // SERVICE.NAMESPACE.svc.clusterset.local
	service  *clusterset.Service
	problems []string
}

// addClusterSetIP adds the names of a Service with ClusterSetIPs. The name exists even before an IP is allocated, so that
// resolvers cache NODATA and never NXDOMAIN.
func (r *serviceRecords) addClusterSetIP() {
	r.addName(r.name)
	for _, ip := range r.service.IPs {
		ip = ip.Unmap()
		r.addAddress(r.name, ip)
		for _, p := range r.Reverse {
			if p.Contains(ip) {
				r.add(reverseName(netip.PrefixFrom(ip, ip.BitLen())), PTR, r.name)
			}
		}
	}
	r.addPorts(r.name, r.service.Ports)
	r.addClusters()
}

// addClusters adds, if ClusterScoped, the name of each cluster that exports the Service, with the addresses and ports of its own
// endpoints. A cluster without a ready endpoint keeps the others: who asks for a cluster gets no other one.
func (r *serviceRecords) addClusters() {
	if !r.ClusterScoped {
		return
	}
	for _, id := range r.service.Clusters {
		if name, ok := r.below(string(id)); ok {
			r.addName(name)
		}
	}
	serving := r.serving()
	for i := range r.service.Slices {
		slice := &r.service.Slices[i]
		name, ok := r.below(string(slice.Cluster))
		if !ok {
			continue
		}
		used := false
		for j := range slice.Endpoints {
			if e := &slice.Endpoints[j]; len(e.Addrs) > 0 && (e.Ready || !serving[slice.Cluster]) {
				r.addAddresses(name, e.Addrs)
				used = true
			}
		}
		if used {
			r.addPorts(name, servicePorts(slice.Ports))
		}
	}
}

// serving returns the clusters with a ready endpoint.
func (r *serviceRecords) serving() map[clusterset.ClusterID]bool {
	all := map[clusterset.ClusterID]bool{}
	for i := range r.service.Slices {
		slice := &r.service.Slices[i]
		if slices.ContainsFunc(slice.Endpoints, func(e clusterset.Endpoint) bool { return e.Ready && len(e.Addrs) > 0 }) {
			all[slice.Cluster] = true
		}
	}
	return all
}

// addPorts adds the SRV records of a target that listens on ports: all of them at the target's own name, as the
// conformance suite asks, and each named port under _PORT._PROTOCOL.
func (r *serviceRecords) addPorts(target string, ports []clusterset.Port) {
	numbers := map[uint16]bool{}
	for _, port := range ports {
		numbers[port.Port] = true
	}
	for n := range numbers {
		r.add(target, SRV, srvData(share(len(numbers)), n, target))
	}
	for _, port := range ports {
		r.addPort(target, port.Name, port.Protocol, share(1), port.Port, target)
	}
}

// share returns the SRV weight of each of n records.
func share(n int) uint16 { return uint16(max(100/n, 1)) }

// addPort adds the SRV record of one named port below name. A port without a name has none.
func (r *serviceRecords) addPort(name, port string, proto clusterset.Protocol, weight, number uint16, target string) {
	if port == "" {
		return
	}
	label, protocol := "_"+strings.ToLower(port), "_"+strings.ToLower(proto.String())
	if len(label) > maxLabel || len(name)+len(label)+len(protocol)+2 > maxName {
		r.addProblem(fmt.Sprintf("the port name %q makes the DNS name too long", port))
		return
	}
	forms := [][2]string{{label, protocol}}
	if r.ClusterScoped { // Lighthouse also accepts names without underscores
		forms = append(forms, [2]string{label[1:], protocol[1:]})
	}
	for _, form := range forms {
		at := under(name, form[1])
		r.addName(at)
		r.add(under(at, form[0]), SRV, srvData(weight, number, target))
	}
}

func (r *serviceRecords) addProblem(reason string) {
	if !slices.Contains(r.problems, reason) {
		r.problems = append(r.problems, reason)
	}
}

func notALabel(s string) string {
	return fmt.Sprintf("%q is not a DNS label: 1 to 63 of a-z, 0-9, '-' and '_'", s)
}

// below returns the name of labels, joined by dots, below the Service's name, and adds the names in between. If there
// can be no such name, it notes a problem and returns false.
func (r *serviceRecords) below(labels string) (string, bool) {
	parts := strings.Split(labels, ".")
	for _, l := range parts {
		if !isLabel(l) {
			r.addProblem(notALabel(l))
			return "", false
		}
	}
	name := under(r.name, parts...)
	if len(name) > maxName {
		r.addProblem(fmt.Sprintf("%s is longer than 253 characters", Text(name)))
		return "", false
	}
	for between := parent(name); between != r.name; between = parent(between) {
		r.addName(between)
	}
	return name, true
}

// host is an endpoint with a name of its own.
type host struct {
	name  string
	ports []clusterset.EndpointPort
}

// addHeadless adds the ready endpoints of all members that are not drained. Without any the Service has no name, unless
// EmptyHeadless is set.
func (r *serviceRecords) addHeadless() {
	if r.EmptyHeadless {
		r.addName(r.name)
	}
	var hosts []host
	for i := range r.service.Slices {
		slice := &r.service.Slices[i]
		for j := range slice.Endpoints {
			e := &slice.Endpoints[j]
			if !e.Ready || len(e.Addrs) == 0 {
				continue
			}
			if !r.Drained[slice.Cluster] {
				r.addAddresses(r.name, e.Addrs)
			}
			if name, ok := r.addEndpoint(slice, e); ok && !r.Drained[slice.Cluster] {
				hosts = append(hosts, host{name, slice.Ports})
			}
		}
	}
	r.addHostPorts(r.name, hosts)
}

// addEndpoint adds the names of one endpoint of a headless Service and returns the one that SRV records point at:
// HOST.CLUSTER below the Service's name.
func (r *serviceRecords) addEndpoint(slice *clusterset.Slice, e *clusterset.Endpoint) (name string, ok bool) {
	cluster := string(slice.Cluster)
	if r.ClusterScoped {
		if name, ok := r.below(cluster); ok {
			r.addAddresses(name, e.Addrs)
		}
	}
	if name, ok = r.below(hostLabel(e) + "." + cluster); !ok {
		return "", false
	}
	r.addAddresses(name, e.Addrs)
	if e.Hostname == "" && isLabel(e.Pod) { // Lighthouse has the pod's name too; SRV records still use the name above
		if alias, ok := r.below(e.Pod + "." + cluster); ok {
			r.addAddresses(alias, e.Addrs)
		}
	}
	if r.ClusterScoped {
		r.addHostPorts(under(r.name, strings.Split(cluster, ".")...), []host{{name, slice.Ports}})
	}
	return name, true
}

// addHostPorts adds the SRV records of hosts at name.
func (r *serviceRecords) addHostPorts(name string, hosts []host) {
	type target struct {
		host string
		port uint16
	}
	type named struct {
		name  string
		proto clusterset.Protocol
	}
	all := map[target]bool{}
	byName := map[named]map[target]bool{}
	for _, h := range hosts {
		for _, port := range h.ports {
			t := target{h.name, port.Port}
			all[t] = true
			n := named{port.Name, port.Protocol}
			if byName[n] == nil {
				byName[n] = map[target]bool{}
			}
			byName[n][t] = true
		}
	}
	for t := range all {
		r.add(name, SRV, srvData(share(len(all)), t.port, t.host))
	}
	for n, targets := range byName {
		for t := range targets {
			r.addPort(name, n.name, n.proto, share(len(targets)), t.port, t.host)
		}
	}
}

// hostLabel returns the label of an endpoint within its cluster: its hostname, or else its first address with dashes.
func hostLabel(e *clusterset.Endpoint) string {
	if e.Hostname != "" {
		return e.Hostname
	}
	return strings.NewReplacer(".", "-", ":", "-").Replace(e.Addrs[0].String())
}

// addWithoutIP adds a Service whose owner switched the ClusterSetIP off. Its endpoints are the Service's own addresses in
// its clusters. An answer holds one of them: the local cluster's while that one serves, or else each serving cluster's
// in turn.
func (r *serviceRecords) addWithoutIP() {
	r.addName(r.name)
	r.addClusters()
	serving := r.serving()
	maps.DeleteFunc(serving, func(id clusterset.ClusterID, _ bool) bool { return r.Drained[id] })
	for i := range r.service.Slices {
		slice := &r.service.Slices[i]
		if !serving[slice.Cluster] || serving[r.Local] && slice.Cluster != r.Local {
			continue
		}
		for j := range slice.Endpoints {
			if e := &slice.Endpoints[j]; e.Ready {
				r.addRotating(r.name, e.Addrs)
			}
		}
	}
	r.addPorts(r.name, r.service.Ports)
}

// servicePorts converts the ports of one cluster's endpoints.
func servicePorts(ports []clusterset.EndpointPort) []clusterset.Port {
	own := make([]clusterset.Port, len(ports))
	for i, port := range ports {
		own[i] = clusterset.Port{Name: port.Name, Protocol: port.Protocol, Port: port.Port}
	}
	return own
}
