package main

import (
	"errors"
	"net/http"

	"github.com/isthmus-net/isthmus/bpf/datapath/names"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/dns"
)

// dnsStatus says what the name server has done, and false while there is none.
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

// kernelStatus says what the kernel answers, which must be something. The caller holds mu.
func (n *nameserver) kernelStatus() names.Status {
	is, err := n.kernel.Status()
	if err != nil {
		n.log.Error("count answers of the kernel", "err", err)
	}
	return is
}

// records returns the records at and below a name, all when it is empty.
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

// serveRecords answers with the records at and below name=.
func (s *sight) serveRecords(w http.ResponseWriter, r *http.Request) {
	all, err := s.names.records(r.FormValue("name"))
	writeAnswer(w, all, err)
}
