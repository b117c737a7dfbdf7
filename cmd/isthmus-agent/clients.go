package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/rest"
)

// The name server answers pods and nodes of its cluster at the node's own addresses, and refuses others. The agent knows them
// from the objects of addresses, and from the endpoints of Service isthmus-dns: these are the nodes that have an agent. Listing
// them is far cheaper than listing all nodes. The permission is that of the view.

// dnsClients are the clients of the cluster that get answers at the node's addresses.
type dnsClients struct {
	known       []netip.Prefix
	pods, nodes bool // known has those of pods, and of other nodes
	// partial is set while an object of the API server could not be read.
	partial bool
	saved   []netip.Prefix // by an earlier process; used until the clients are known completely
}

// clients returns the clients that objects of the API server say.
func (a *addresses) clients() dnsClients {
	c := dnsClients{known: slices.Clone(a.agents), nodes: len(a.agents) > 0}
	for _, o := range a.ownMember {
		c.nodes = c.nodes || o.Use == useNodes
	}
	for _, o := range slices.Concat(a.ownMember, a.ownNode) {
		if o.Use == usePods || o.Use == useNodes {
			c.known = append(c.known, o.Prefix)
		}
		c.pods = c.pods || o.Use == usePods
	}
	c.known = sortedPrefixes(c.known)
	return c
}

// readAgents reads the addresses of all agents. The API server may answer from its cache.
func (a *addresses) readAgents(ctx context.Context, server rest.Interface, namespace string) error {
	var list discoveryv1.EndpointSliceList
	path := fmt.Sprintf("/apis/discovery.k8s.io/v1/namespaces/%s/endpointslices?resourceVersion=0&labelSelector=%s%%3Disthmus-dns", namespace, discoveryv1.LabelServiceName)
	if err := getObject(ctx, server, path, &list); err != nil {
		return err
	}
	var agents []netip.Prefix
	for _, s := range list.Items {
		for _, e := range s.Endpoints {
			for _, text := range e.Addresses {
				for _, o := range ownAddresses(useNodes, text) {
					agents = append(agents, o.Prefix)
				}
			}
		}
	}
	if len(agents) > 0 {
		a.agents = sortedPrefixes(agents)
	}
	return nil
}

// SetClients sets the cluster's clients that get answers at the node's addresses. Once pods are among them, the node-local addresses
// refuse clients on other machines.
func (n *nameserver) SetClients(c dnsClients) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c.saved = n.clients.saved
	if !c.partial && len(c.known) > 0 {
		if path := n.clientsFile(); path != "" && !slices.Equal(c.known, c.saved) {
			if err := saveClients(path, c.known); err != nil {
				n.log.Warn("cannot save which clients DNS answers; after a restart other nodes get no answers until the API server is reachable", "err", err)
			}
		}
		c.saved = c.known
	}
	n.clients = c
	n.passClients()
}

// passClients passes the clients to the server and to the kernel. The caller holds mu.
func (n *nameserver) passClients() {
	if n.server == nil {
		return
	}
	all := sortedPrefixes(slices.Concat(n.always, n.clients.known, n.clients.saved))
	n.server.SetClients(all, n.clients.pods)
	if len(n.fast.Guarded) > 0 {
		if err := n.kernel.SetClients(all); err != nil {
			n.log.Error("cannot pass the clients of DNS to the kernel; the name server answers those that are missing", "err", err)
		}
	}
}

// unknownClients returns the capabilities that the node lacks because clients are unknown. The caller holds mu.
func (n *nameserver) unknownClients() []string {
	if len(n.cfg.Guarded) == 0 || !n.clients.listed() {
		return nil
	}
	const fix = ", are refused at the node's own addresses; register them with isthmusctl member set %s, or allow their ranges with --dns-allow (agent.dns.allow of the chart)"
	var missing []string
	if !n.clients.pods {
		missing = append(missing, "DNS for pods of other nodes: their addresses are unknown, so their questions, while their own agent is down"+fmt.Sprintf(fix, "--pod-cidr"))
	}
	if !n.clients.nodes {
		missing = append(missing, "DNS for other nodes: their addresses are unknown, so their questions, while their own agent is down"+fmt.Sprintf(fix, "--node-cidr"))
	}
	return missing
}

// listed reports whether the API server has said which clients there are.
func (c dnsClients) listed() bool { return !c.partial && len(c.known) > 0 }

// clientsFile returns the path of the file that keeps the clients over restarts, beside the zone file; "" if there is none.
func (n *nameserver) clientsFile() string {
	if n.cfg.File == "" {
		return ""
	}
	return n.cfg.File + ".clients"
}

// restoreClients reads the clients that an earlier process saved.
func (n *nameserver) restoreClients() {
	path := n.clientsFile()
	if path == "" {
		return
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		n.clients.saved, err = parseRanges(strings.Fields(string(text)))
	}
	if err != nil {
		n.clients.saved = nil
		n.log.Warn("cannot read which clients DNS answered; other nodes get no answers until the API server is reachable", "file", path, "err", err)
	}
}

// saveClients replaces the file atomically.
func saveClients(path string, known []netip.Prefix) error {
	var text strings.Builder
	for _, p := range known {
		fmt.Fprintln(&text, p)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, []byte(text.String()), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
