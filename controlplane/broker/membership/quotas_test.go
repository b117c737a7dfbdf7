package membership

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// An administrator sees what each member uses of its quotas, and what waits.
func TestQuotas(t *testing.T) {
	const ns = "quotas"
	info, asAdmin := deploy(t, Broker{Namespace: ns, Ranges: cidrs("243.0.0.0/8")})
	for i, id := range []clusterset.ClusterID{"a", "b"} {
		if _, err := reserve(t, asAdmin, "uid", request(info, id, 1+i)); err != nil {
			t.Fatal(err)
		}
	}
	config := brokerConfig(t, asAdmin, ns)
	config.Spec.Quotas = &v1alpha1.Quotas{Services: 2}
	if err := asAdmin.Update(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	for n := range 3 {
		r := mcs.ExportRecord(clusterset.Export{
			Cluster: "a", Service: clusterset.ServiceName{Namespace: "shop", Name: fmt.Sprint("web-", n)}, Type: clusterset.Headless, ExportedAt: time.Now(),
			Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}}, Labels: map[string]string{"team": "shop"},
		})
		r.Namespace = ns
		if err := asAdmin.Create(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	uses, err := Quotas(t.Context(), asAdmin, ns)
	if err != nil {
		t.Fatal(err)
	}
	want := []QuotaUse{
		{"services", 2, 2, 1},
		{"ports", 2, 20_000, 0},
		{"portsPerService", 1, 1000, 0},
		{"slices", 0, 20_000, 0},
		{"endpoints", 0, 200_000, 0},
		{"metadataBytes", 16, 32 << 20, 0},
		{"changesPerMinute", 3, 20_000, 0},
	}
	if !slices.Equal(uses["a"], want) {
		t.Errorf("a uses %v, want %v", uses["a"], want)
	}
	if len(uses["b"]) != len(want) || uses["b"][0].Used != 0 {
		t.Errorf("b uses %v, want nothing", uses["b"])
	}
}
