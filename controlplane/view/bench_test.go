package view

import (
	"fmt"
	"net/netip"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// 10,000 imports and 20,000 slices in their caches become a Snapshot.
func BenchmarkAssemble10k(b *testing.B) {
	imports, members := cache.NewStore(cache.MetaNamespaceKeyFunc), cache.NewStore(cache.MetaNamespaceKeyFunc)
	for i := range 10000 {
		name := clusterset.ServiceName{Namespace: fmt.Sprint("ns", i%100), Name: fmt.Sprint("s", i)}
		meta := metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}
		if err := imports.Add(&cached[clusterset.Import]{ObjectMeta: meta, value: clusterset.Import{Service: name}}); err != nil {
			b.Fatal(err)
		}
		for c := range 2 {
			meta.Name = fmt.Sprintf("%s-%d", name.Name, c)
			s := clusterset.Slice{Name: meta.Name, Cluster: clusterset.ClusterID(fmt.Sprint("c", c)), Endpoints: make([]clusterset.Endpoint, 5)}
			for e := range s.Endpoints {
				s.Endpoints[e].Addrs = []netip.Addr{netip.AddrFrom4([4]byte{10, byte(c), byte(i), byte(e)})}
			}
			if err := members.Add(&cached[member]{ObjectMeta: meta, value: member{name, s}}); err != nil {
				b.Fatal(err)
			}
		}
	}
	for b.Loop() {
		if s := assemble(values[clusterset.Import](imports), values[member](members)); len(s.Services) != 10000 {
			b.Fatal(len(s.Services))
		}
	}
}
