package workloads

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// perSlice limits the endpoints of a slice, as in Kubernetes' own controllers.
const perSlice = 100

// offer is a wanted Service of machines.
type offer struct {
	name        clusterset.ServiceName
	ports       []port
	annotations map[string]string
	slices      []*discoveryv1.EndpointSlice // sorted by name
	problems    []problem
}

// problem is the reason why a machine is not offered, or not as requested.
type problem struct {
	of   machine
	text string
}

// build returns the Services of machines, sorted by name. kept are ports of Services whose machines are currently unknown;
// they take precedence. The order of machines does not matter. If two machines contradict each other about their Service,
// the older one counts and the younger one has a problem.
func build(machines []machine, kept map[clusterset.ServiceName][]port) []offer {
	byName := map[clusterset.ServiceName][]machine{}
	for name := range kept {
		byName[name] = nil
	}
	for _, m := range slices.SortedFunc(slices.Values(machines), machine.compare) {
		byName[m.service] = append(byName[m.service], m)
	}
	var all []offer
	for name, of := range byName {
		o := offer{name: name, ports: slices.Clone(kept[name]), annotations: map[string]string{}}
		groups := map[string]*group{}
		for _, m := range o.ofOneOwner(of) {
			o.annotate(m)
			ports := o.admit(m)
			for _, a := range m.addrs {
				key := fmt.Sprint(m.source, " ", clusterset.FamilyOf(a), " ", ports)
				if groups[key] == nil {
					groups[key] = &group{source: m.source, family: clusterset.FamilyOf(a), ports: ports}
				}
				groups[key].endpoints = append(groups[key].endpoints, endpoint(m, a))
			}
		}
		for key, g := range groups {
			if len(g.ports) > 0 {
				o.slices = append(o.slices, o.slicesOf(key, g)...)
			}
		}
		slices.SortFunc(o.slices, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
		all = append(all, o)
	}
	slices.SortFunc(all, func(a, b offer) int { return a.name.Compare(b.name) })
	return all
}

// ofOneOwner returns the machines that the Service has, of those that name it. Each source is an owner: the namespace itself, the
// servers of a cloud, and its load balancers. A name that the oldest machine, or m, has by default is not shared with another
// owner. For example, a load balancer in front of servers joins their Service only if its tag names that Service.
func (o *offer) ofOneOwner(all []machine) (kept []machine) {
	for _, m := range all {
		if first := all[0]; m.source != first.source && (m.byDefault || first.byDefault) {
			o.problems = append(o.problems, problem{m, fmt.Sprintf("service %s is that of %s, which has another owner; choose another name", o.name, first)})
			continue
		}
		kept = append(kept, m)
	}
	return kept
}

// annotate takes the annotations of m for the Service.
func (o *offer) annotate(m machine) {
	for key, value := range m.annotations {
		if have, said := o.annotations[key]; !said {
			o.annotations[key] = value
		} else if have != value {
			o.problems = append(o.problems, problem{m, fmt.Sprintf("%s is %q, and an older machine of service %s has %q; make them the same", key, value, o.name, have)})
		}
	}
}

// admit returns the ports of m that clients can reach, under the Service's names for them.
func (o *offer) admit(m machine) (ports []port) {
	for _, text := range m.refused {
		o.problems = append(o.problems, problem{m, text})
	}
	for _, p := range m.ports {
		i := slices.IndexFunc(o.ports, p.is)
		if i < 0 {
			if i = slices.IndexFunc(o.ports, func(q port) bool { return q.name == p.name }); i >= 0 {
				o.problems = append(o.problems, problem{m, fmt.Sprintf("port %s is left out: an older machine of service %s has %s; make them the same", p, o.name, o.ports[i])})
				continue
			}
			o.ports, i = append(o.ports, p), len(o.ports)
		}
		ports = append(ports, port{o.ports[i].name, p.number, p.protocol, p.target})
	}
	slices.SortFunc(ports, func(a, b port) int { return strings.Compare(a.name, b.name) })
	return ports
}

// group holds endpoints with the same source, family and ports.
type group struct {
	source    source
	family    clusterset.Family
	ports     []port
	endpoints []discoveryv1.Endpoint
}

// slicesOf returns the slices of a group. Their names follow from key, so that they stay the same.
func (o *offer) slicesOf(key string, g *group) (all []*discoveryv1.EndpointSlice) {
	byAddress := func(a, b discoveryv1.Endpoint) int { return strings.Compare(a.Addresses[0], b.Addresses[0]) }
	slices.SortStableFunc(g.endpoints, byAddress) // of two machines with one address the older one is kept
	endpoints := slices.CompactFunc(g.endpoints, func(a, b discoveryv1.Endpoint) bool { return byAddress(a, b) == 0 })
	labels := map[string]string{discoveryv1.LabelServiceName: o.name.Name, discoveryv1.LabelManagedBy: v1alpha1.ManagedByMachines}
	g.source.mark(labels)
	var ports []discoveryv1.EndpointPort
	for _, p := range g.ports {
		ports = append(ports, discoveryv1.EndpointPort{Name: new(p.name), Protocol: new(p.protocol), Port: new(p.target)})
	}
	hash := fnv.New64a()
	hash.Write([]byte(key))
	for part := range slices.Chunk(endpoints, perSlice) {
		all = append(all, &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: o.name.Namespace, Name: fmt.Sprintf("%s-machines-%x-%d", o.name.Name, hash.Sum64(), len(all)), Labels: labels,
			},
			AddressType: discoveryv1.AddressType(g.family.String()), Endpoints: part, Ports: ports,
		})
	}
	return all
}

// endpoint returns the endpoint of m at an address.
func endpoint(m machine, a netip.Addr) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{
		Addresses:  []string{a.String()},
		Conditions: discoveryv1.EndpointConditions{Ready: new(m.ready), Serving: new(m.ready), Terminating: new(false)},
	}
	if len(validation.IsDNS1123Label(m.name)) == 0 {
		e.Hostname = new(m.name)
	}
	return e
}
