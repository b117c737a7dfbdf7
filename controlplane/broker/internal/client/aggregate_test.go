package client

import (
	"bytes"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// An exporter whose cache lacks an aggregate replaces the choice against addresses that it finds on the broker, and logs that.
func TestIgnoredChoiceIsLogged(t *testing.T) {
	t.Parallel()
	b := newQuotaBroker(t, quota.Defaults())
	var log bytes.Buffer
	b.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	name := webService(1)
	declined := mcs.Aggregate(clusterset.Aggregate{Service: name, Type: clusterset.ClusterSetIP, UseIP: clusterset.Disabled})
	declined.Namespace = "broker"
	if err := b.fake.Create(t.Context(), declined); err != nil {
		t.Fatal(err)
	}
	vip := netip.MustParseAddr("243.0.0.1")
	found, si, err := b.read(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	have, err := b.complete(t.Context(), found, si, clusterset.Aggregate{
		Service: name, Type: clusterset.ClusterSetIP, IPs: []netip.Addr{vip}, AllocatedBy: "west", UseIP: clusterset.Enabled,
	})
	if err != nil || have.UseIP != clusterset.Enabled || len(have.IPs) != 1 {
		t.Errorf("the aggregate is %+v: %v", have, err)
	}
	if !strings.Contains(log.String(), clusterset.ChoiceIgnored) || !strings.Contains(log.String(), "service="+name.Name) {
		t.Errorf("the log does not say that the choice is ignored: %s", log.String())
	}
}
