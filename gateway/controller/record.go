package controller

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// A Service's status records its port in the condition Allocated. A controller that starts while OpenStack does not answer
// serves the Service from it: the annotation has only an id, and the addresses in status.loadBalancer may be floating IPs,
// whose VIPs only Neutron knows. It is in the status because users cannot write that. With an annotation, a tenant could
// name another tenant's VIP, and receive its connections until Neutron answers.
//
// The record also has the properties of the pool without which its address would be withdrawn. They hold until an edit of the
// settings is agreed to.
//
// For example: "port=0f3c… pool=public group=default announce=bgp return=snat default-floating-ip=allocate
// addresses=10.9.0.17,fd09::17 floating-ip=5a1b…/203.0.113.9".

// record is a port as a Service's status records it.
type record struct {
	port
	group    string
	announce desired.Announce
	returns  desired.Return
	peers    []netip.Addr // the only ones that receive the routes to its addresses; empty: all
	router   uint8        // the virtual router of its addresses; 0: the first one of the gateways
	floats   bool         // Services of its pool got a floating IP without asking for it
}

// listed reports whether the port consists of addresses of a list.
func (r record) listed() bool { return r.ID == staticID(r.VIPs) }

// route returns how the routes to its addresses differ from others, as far as it decides who can reach them.
func (r record) route() *desired.Route {
	if len(r.peers) == 0 {
		return nil
	}
	return &desired.Route{Peers: r.peers}
}

// virtualRouter returns the virtual router of its addresses as a pool has it.
func (r record) virtualRouter() *VRRPPool {
	if r.router == 0 {
		return nil
	}
	return &VRRPPool{RouterID: r.router}
}

// The fields of a record.
const (
	recordPort       = "port"
	recordPool       = "pool"
	recordGroup      = "group"
	recordAnnounce   = "announce"
	recordReturn     = "return"
	recordPeers      = "peers"
	recordRouter     = "router-id"
	recordFloats     = "default-floating-ip"
	recordAddresses  = "addresses"
	recordFloatingIP = "floating-ip"
)

// writeRecord returns the condition that records a port.
func writeRecord(p record) metav1.Condition {
	text := fmt.Sprintf("%s=%s %s=%s %s=%s %s=%s %s=%s", recordPort, p.ID, recordPool, p.Pool, recordGroup, p.group, recordAnnounce, p.announce, recordReturn, p.returns)
	if len(p.peers) > 0 {
		text += " " + recordPeers + "=" + joined(p.peers, ",")
	}
	if p.router > 0 {
		text += fmt.Sprintf(" %s=%d", recordRouter, p.router)
	}
	if p.floats {
		text += " " + recordFloats + "=allocate"
	}
	text += " " + recordAddresses + "=" + joined(p.VIPs, ",")
	if p.Floating.ID != "" {
		text += fmt.Sprintf(" %s=%s/%s", recordFloatingIP, p.Floating.ID, p.Floating.Addr)
	}
	return metav1.Condition{Type: service.ConditionAllocated, Status: metav1.ConditionTrue, Reason: service.ReasonAllocated, Message: text}
}

// readRecord returns the port that a Service's status records. It takes a floating IP for the user's, which is never deleted:
// the record does not say whether it is ours.
func readRecord(s *corev1.Service) (p record, ok bool) {
	c := meta.FindStatusCondition(s.Status.Conditions, service.ConditionAllocated)
	if c == nil || c.Status != metav1.ConditionTrue {
		return record{}, false
	}
	is := map[string]string{}
	for field := range strings.FieldsSeq(c.Message) {
		name, value, _ := strings.Cut(field, "=")
		is[name] = value
	}
	p = record{
		port:  port{ID: is[recordPort], Pool: is[recordPool]},
		group: is[recordGroup], announce: desired.Announce(is[recordAnnounce]), returns: desired.Return(is[recordReturn]), floats: is[recordFloats] == "allocate",
	}
	var err error
	if p.VIPs, err = parseAddrs(is[recordAddresses]); err != nil {
		return record{}, false
	}
	if text, has := is[recordPeers]; has {
		if p.peers, err = parseAddrs(text); err != nil {
			return record{}, false
		}
	}
	if text, has := is[recordRouter]; has {
		id, err := strconv.ParseUint(text, 10, 8)
		if err != nil {
			return record{}, false
		}
		p.router = uint8(id)
	}
	if id, text, has := strings.Cut(is[recordFloatingIP], "/"); has {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return record{}, false
		}
		p.Floating = openstack.FloatingIP{ID: id, Addr: addr, Port: p.ID}
		p.Floating.Fixed, _ = ipv4(p.VIPs)
	}
	return p, p.ID != "" && p.Pool != "" && p.group != ""
}

// parseAddrs parses addresses with commas in between.
func parseAddrs(text string) (all []netip.Addr, err error) {
	for one := range strings.SplitSeq(text, ",") {
		addr, err := netip.ParseAddr(one)
		if err != nil {
			return nil, err
		}
		all = append(all, addr)
	}
	return all, nil
}

// leadRecorded completes a recorded failover IP: the status of a GatewayNode says that it leads there.
func (w *worker) leadRecorded(ctx context.Context, p *port) error {
	if pool := w.settings.pool(p.Pool); pool == nil || pool.FailoverIP == nil {
		return nil
	}
	var nodes v1alpha1.GatewayNodeList
	if err := w.client.List(ctx, &nodes); err != nil {
		return fmt.Errorf("list gateway nodes: %w", err)
	}
	p.Floating.Port, p.Floating.Fixed = "", netip.Addr{}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if addr, ok := floatingTarget(n); ok && slices.Contains(n.Status.FloatingIPs, p.Floating.Addr.String()) {
			p.Floating.Port, p.Floating.Fixed = n.Spec.NeutronPort, addr
		}
	}
	return nil
}
