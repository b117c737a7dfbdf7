// Package apitest gives tests real API servers: a kube-apiserver and an etcd each, with every kind that
// Isthmus uses, and nothing that acts by itself (no controller-manager, no kubelet).
//
// A package starts its servers once, in TestMain, by [Run]; each test asks a [Server] for what it needs.
// The binaries are those in the directory that KUBEBUILDER_ASSETS names.
package apitest

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/isthmus-net/isthmus/controlplane/api/crds"
	gatewaycrds "github.com/isthmus-net/isthmus/gateway/api/crds"
)

// serverTimeout is how long a server may need to start or to stop on a busy machine.
const serverTimeout = 2 * time.Minute

// assets is the variable that names the directory of kube-apiserver and etcd.
const assets = "KUBEBUILDER_ASSETS"

// Server is one API server. The zero value is one that [Run] starts.
type Server struct {
	env         *envtest.Environment
	config      *rest.Config
	again, etcd *process // by Restart and Wipe
}

// Run starts servers, runs the tests of the package, stops the servers and returns what TestMain must exit
// with. Without the binaries it starts nothing, and tests that need a server skip (see Server.Config).
func Run(m *testing.M, servers ...*Server) int {
	if os.Getenv(assets) == "" {
		return m.Run()
	}
	var group errgroup.Group
	group.SetLimit(runtime.NumCPU() + 1) // a start is work for a CPU, all but a moment
	for _, s := range servers {
		group.Go(s.start)
	}
	err := group.Wait()
	code := 1
	if err == nil {
		code = m.Run()
	}
	for _, s := range servers {
		s.again.stop()
		s.etcd.stop()
		if s.env != nil {
			if stopErr := s.env.Stop(); stopErr != nil && err == nil {
				err = stopErr
			}
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "api servers for tests:", err)
		return 1
	}
	return code
}

func (s *Server) start() error {
	all, err := kinds()
	if err != nil {
		return err
	}
	s.env = &envtest.Environment{CRDs: all, ControlPlaneStartTimeout: serverTimeout, ControlPlaneStopTimeout: serverTimeout}
	flags := s.env.ControlPlane.GetAPIServer().Configure()
	flags.Set("service-cluster-ip-range", "10.96.0.0/16,fd00:96::/112")
	if s.config, err = s.env.Start(); err != nil {
		return fmt.Errorf("start: %w", err)
	}
	return nil
}

// kinds are all that Isthmus uses.
func kinds() ([]*apiextensionsv1.CustomResourceDefinition, error) {
	all, err := crds.All()
	gateways, gatewaysErr := gatewaycrds.GatewayNodes()
	return append(all, gateways), errors.Join(err, gatewaysErr)
}

// Config returns an administrator's configuration of the server, the caller's to change. Without the
// binaries the test is skipped, or fails when REQUIRE_PRIVILEGED=1.
func (s *Server) Config(t testing.TB) *rest.Config {
	t.Helper()
	if s.config == nil {
		const why = assets + " does not name a directory with kube-apiserver and etcd; run make test, which builds them"
		if os.Getenv("REQUIRE_PRIVILEGED") == "1" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	return rest.CopyConfig(s.config)
}
