package main

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/gateway/controller"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// link is one step of gateway explain.
type link = status.Link

func fine(name, format string, args ...any) link {
	return link{Link: name, State: status.LinkOK, Text: fmt.Sprintf(format, args...)}
}

func note(name, format string, args ...any) link {
	return link{Link: name, State: status.LinkNote, Text: fmt.Sprintf(format, args...)}
}

// broken returns a broken link. The message names the fault, and after the first semicolon the fix, if it knows a better one.
func broken(name, message, fix string) link {
	text, better, _ := strings.Cut(strings.ReplaceAll(message, "\n", "; "), "; ")
	return link{Link: name, State: status.LinkBroken, Text: text, Fix: cmp.Or(better, fix)}
}

// decisionLinks returns the links of a Service up to the first one on which all others depend. Unknown says why the settings
// are not known, "" if they are.
func decisionLinks(d *controller.Decision, unknown string) []link {
	s := d.Service
	if d.NotTaken != "" {
		return []link{broken("class", d.NotTaken, "wait until its addresses are returned")}
	}
	links := append([]link{fine("class", "type LoadBalancer, and the gateways handle it")}, poolLinks(d, unknown)...)
	if d.Edit != "" {
		links = append(links, note("settings", "%s", d.Edit))
	}
	if d.Refused != nil {
		links = append(links, broken("request", d.Refused.Error(), "change what it names; until then the Service keeps what it has"))
	}
	links = append(links, addressLink(d))
	for _, p := range d.Ports {
		links = append(links, portLink(d, p))
	}
	if !d.Has {
		return links
	}
	if d.Fault != "" {
		links = append(links, broken("backends", d.Fault, "correct the EndpointSlice that it names"))
	}
	links = append(links, gatewayLinks(d)...)
	if c := meta.FindStatusCondition(s.Status.Conditions, service.ConditionApplied); c != nil && c.Status != metav1.ConditionTrue {
		links = append(links, broken("applied", c.Reason+": "+c.Message, "see isthmusctl gateway show"))
	}
	return append(links, announcedLink(d))
}

// poolLinks says which pool a Service has or gets, and why no other one.
func poolLinks(d *controller.Decision, unknown string) (links []link) {
	if unknown != "" {
		return []link{note("pool", "the settings are unknown, so nothing is said of pools; give them by --settings: %s", unknown)}
	}
	for _, p := range d.Pools {
		if p.Chosen {
			links = append(links, fine("pool", "%s: %s", p.Pool, p.Reason))
		} else {
			links = append(links, note("pool", "not %s: %s", p.Pool, p.Reason))
		}
	}
	return links
}

// addressLink says which addresses a Service has, or what it waits for.
func addressLink(d *controller.Decision) link {
	c := meta.FindStatusCondition(d.Service.Status.Conditions, service.ConditionMapped)
	texts := make([]string, len(d.Addresses))
	for i, a := range d.Addresses {
		texts[i] = a.String()
	}
	switch {
	case d.Has && (c == nil || c.Status == metav1.ConditionTrue || d.Refused != nil):
		return fine("addresses", "%s, of pool %s, at the gateways of group %s", strings.Join(texts, " "), d.Pool, d.Group)
	case d.Refused != nil:
		return note("addresses", "none")
	case c != nil && c.Status != metav1.ConditionTrue:
		return broken("addresses", c.Reason+": "+c.Message, "the controller tries again by itself")
	}
	return broken("addresses", "it has none yet", "check that isthmus-gateway-controller runs, and see its log")
}

// portLink says whether a port is served, and by how many backends.
func portLink(d *controller.Decision, p controller.PortVerdict) link {
	name := "port " + p.String()
	served := p.Protocol == "TCP" || p.Protocol == "UDP"
	switch {
	case p.NotServed != "" && (!d.Has || !served):
		return note(name, "not served: %s", p.NotServed)
	case p.NotServed != "":
		return broken(name, "not served: "+p.NotServed, "choose another port; or see the log of isthmus-gateway-controller")
	}
	var texts []string
	none := ""
	for i := range d.VIPs {
		v := &d.VIPs[i]
		for j := range v.Frontends {
			if f := &v.Frontends[j]; f.Protocol == p.Protocol && f.Port == p.Port {
				accept, draining := backends(f)
				texts = append(texts, fmt.Sprintf("backends at %s: %d for new connections, %d draining", v.Addr, accept, draining))
				if accept == 0 {
					none = v.Addr.String()
				}
			}
		}
	}
	if none != "" {
		return broken(name, fmt.Sprintf("no backend accepts new connections at %s", none), "make its pods ready: kubectl get pods -n "+d.Service.Namespace)
	}
	return fine(name, "%s", strings.Join(texts, ", "))
}

// backends counts those that accept new connections, and those that drain.
func backends(f *desired.Frontend) (accept, draining int) {
	for _, b := range f.Backends {
		if b.Draining {
			draining++
		} else {
			accept++
		}
	}
	return accept, draining
}

// gatewayLinks says what each gateway of the group does with a Service.
func gatewayLinks(d *controller.Decision) (links []link) {
	for _, g := range d.Gateways {
		r := gatewayRowOf(g.Node)
		r.Faults = gatewayFaults(g.Node, func(message string) bool { // other Services do not matter here
			return strings.Contains(message, fmt.Sprintf(" %s/%s: ", d.Service.Namespace, d.Service.Name))
		})
		switch {
		case g.Refused != "":
			links = append(links, broken("gateway", r.Gateway+" does not get the Service: "+g.Refused, "correct what it names"))
		case r.Cordoned || r.Leaving:
			links = append(links, note("gateway", "%s is %s: it announces nothing, and still balances", r.Gateway, r.state()))
		case len(r.Faults) > 0:
			links = append(links, broken("gateway", r.Gateway+": "+strings.Join(r.Faults, ", "), "see kubectl describe gatewaynode "+r.Gateway))
		default:
			links = append(links, fine("gateway", "%s has applied generation %d", r.Gateway, r.Generation))
		}
		if late := lateRenewal(g.Node); late != "" {
			links = append(links, note("certificate", "%s: %s", r.Gateway, late))
		}
	}
	if len(links) == 0 {
		links = append(links, broken("gateway", fmt.Sprintf("no gateway has the group %s", d.Group), "create a GatewayNode with it"))
	}
	return links
}

// announcedLink says which gateways announce the VIPs of a Service.
func announcedLink(d *controller.Decision) link {
	const name = "announced"
	if len(d.VIPs) == 0 {
		return note(name, "the floating IP of pool %s leads to no gateway", d.Pool)
	}
	var by []string
	for i := range d.VIPs {
		v := &d.VIPs[i]
		switch gateways := announcers(d, v.Addr); {
		case v.Announce == desired.ByNone:
			return note(name, "pool %s has announce: none, so something else leads packets to the gateways", d.Pool)
		case len(gateways) > 0:
			by = append(by, fmt.Sprintf("%s by %s", v.Addr, strings.Join(gateways, " ")))
		case v.Serves():
			return broken(name, fmt.Sprintf("no gateway of group %s announces %s", d.Group, v.Addr), fmt.Sprintf("check the %s peers of its gateways, and whether all are cordoned: isthmusctl gateway show", v.Announce))
		default:
			return note(name, "no: no port at %s has a backend", v.Addr)
		}
	}
	return fine(name, "%s", strings.Join(by, ", "))
}

// announcers returns the gateways that announce a VIP.
func announcers(d *controller.Decision, vip netip.Addr) (names []string) {
	for _, g := range d.Gateways {
		if slices.Contains(g.Node.Status.Announced, vip.String()) {
			names = append(names, g.Node.Name)
		}
	}
	return names
}
