package bootstrap

import (
	"os"
	"testing"

	"github.com/go-logr/logr"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

var serverA, serverB, serverC apitest.Server

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &serverA, &serverB, &serverC))
}

const namespace = "isthmus-system"

func newClient(t testing.TB, cfg *rest.Config) client.Client {
	t.Helper()
	scheme, err := membership.NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// newTestbed returns three clusters.
func newTestbed(t *testing.T) (a, b, c Cluster) {
	t.Helper()
	reach := func(id string, s *apitest.Server) Cluster {
		cfg := s.Config(t)
		return Cluster{ID: clusterID(id), Context: "ctx-" + id, Client: newClient(t, cfg), Host: cfg.Host, CA: cfg.CAData}
	}
	return reach("a", &serverA), reach("b", &serverB), reach("c", &serverC)
}

func supervisor(c Cluster) Cluster {
	c.Supervisor = true
	return c
}
