package view

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// One of 20,000 slices of 10,000 imports changes, and a Snapshot is built.
func BenchmarkOneSliceOf10k(b *testing.B) {
	w := newJoined()
	var of []*member
	for i := range 10000 {
		name := clusterset.ServiceName{Namespace: fmt.Sprint("ns", i%100), Name: fmt.Sprint("s", i)}
		w.replaceImport(nil, &clusterset.Import{Service: name})
		for c := range 2 {
			s := clusterset.Slice{Name: fmt.Sprintf("%s-%d", name.Name, c), Cluster: clusterset.ClusterID(fmt.Sprint("c", c)), Endpoints: make([]clusterset.Endpoint, 5)}
			for e := range s.Endpoints {
				s.Endpoints[e].Addrs = []netip.Addr{netip.AddrFrom4([4]byte{10, byte(c), byte(i), byte(e)})}
			}
			m := &member{name, s}
			w.replaceSlice(nil, m)
			of = append(of, m)
		}
	}
	w.snapshot()
	for n := 0; b.Loop(); n++ {
		was := of[n%len(of)]
		is := *was
		w.replaceSlice(was, &is)
		of[n%len(of)] = &is
		if s := w.snapshot(); len(s.Services) != 10000 {
			b.Fatal(len(s.Services))
		}
	}
}
