package main

import (
	"errors"
	"net/http"

	"github.com/isthmus-net/isthmus/bpf/datapath/names"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/dns"
)

// dnsStatus returns the status of the name server, and false while it has no sockets.
func (n *nameserver) dnsStatus() (dns.Status, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.server == nil {
		return dns.Status{}, false
	}
	s := n.server.Status()
	if n.kernel == nil {
		return s, true
	}
	kernel := n.kernelStatus()
	for typ, messages := range map[string]uint64{"A": kernel.A, "AAAA": kernel.AAAA} {
		s.Counts.Answers = append(s.Counts.Answers, dns.Count{Path: "kernel", Type: typ, Rcode: "NOERROR", Messages: messages})
	}
	return s, true
}

// kernelStatus returns the counters of the kernel's answers. The caller holds mu, and n.kernel must not be nil.
func (n *nameserver) kernelStatus() names.Status {
	s, err := n.kernel.Status()
	if err != nil {
		n.log.Error("count answers of the kernel", "err", err)
	}
	return s
}

// records returns the records at a name and below, or all if it is empty.
func (n *nameserver) records(name string) (status.Records, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.server == nil {
		return nil, errors.Join(errNotListening, n.err)
	}
	all := status.Records{}
	for _, r := range n.server.Records(name) {
		all = append(all, status.Record{Name: r.Name, Type: r.Type.String(), TTL: r.TTL, Data: r.Data})
	}
	return all, nil
}

// serveRecords handles RecordsPath.
func (in *introspection) serveRecords(w http.ResponseWriter, r *http.Request) {
	all, err := in.names.records(r.FormValue("name"))
	writeAnswer(w, all, err)
}
