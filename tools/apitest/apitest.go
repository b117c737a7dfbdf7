// Package apitest gives tests real API servers ([apiserver]) that know all kinds of Isthmus. No controller-manager and no
// kubelet runs: nothing changes but what the test changes.
//
// A package starts its servers once, in TestMain, by [Run]; each test asks a [Server] for its configuration. The programs are
// those in the folder that KUBEBUILDER_ASSETS names.
package apitest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
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
	"github.com/isthmus-net/isthmus/tools/apiserver"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// assets is the variable that names the folder of kube-apiserver and etcd.
const assets = "KUBEBUILDER_ASSETS"

// Server is one API server. The zero value is one that [Run] starts.
type Server struct {
	// ServiceCIDRs hold the ClusterIPs; by default 10.96.0.0/16 and fd00:96::/112.
	ServiceCIDRs []netip.Prefix

	dir    string
	server *apiserver.Server
}

// Run starts servers, runs the tests of the package, stops the servers and returns the exit code for TestMain. Without the
// programs it starts no server, and tests that need one skip (see [Require]).
func Run(m *testing.M, servers ...*Server) int {
	if !available() {
		return m.Run()
	}
	var group errgroup.Group
	group.SetLimit(runtime.NumCPU() + 1) // starting a server takes CPU time most of the time
	for _, s := range servers {
		group.Go(func() error { return s.start(context.Background()) })
	}
	err := group.Wait()
	code := 1
	if err == nil {
		code = m.Run()
	}
	for _, s := range servers {
		err = errors.Join(err, s.stop())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "API servers for tests:", err)
		return 1
	}
	return code
}

// StartEmpty starts a server without the kinds of Isthmus, which ends with the test, and returns an administrator's
// configuration of it.
func StartEmpty(t testing.TB) *rest.Config {
	t.Helper()
	Require(t)
	s := &Server{}
	t.Cleanup(func() {
		if err := s.stop(); err != nil {
			t.Error(err)
		}
	})
	if err := s.startEmpty(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s.Config(t)
}

// Empty starts a server without the kinds of Isthmus, for tests that are run by something else than [testing.T].
func Empty(ctx context.Context) (config *rest.Config, stop func() error, err error) {
	s := &Server{}
	if err := s.startEmpty(ctx); err != nil {
		return nil, nil, errors.Join(err, s.stop())
	}
	return s.server.As(apiserver.Admin), s.stop, nil
}

func (s *Server) start(ctx context.Context) error {
	cidrs := s.ServiceCIDRs
	if cidrs == nil {
		cidrs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:96::/112")}
	}
	if err := s.startWith(ctx, cidrs...); err != nil {
		return err
	}
	return s.installKinds()
}

// startEmpty starts a server of one family and without the kinds of Isthmus.
func (s *Server) startEmpty(ctx context.Context) error {
	return s.startWith(ctx, netip.MustParsePrefix("10.0.0.0/24"))
}

func (s *Server) startWith(ctx context.Context, serviceCIDRs ...netip.Prefix) (err error) {
	if s.dir, err = os.MkdirTemp("", "isthmus-apitest-"); err != nil {
		return err
	}
	s.server, err = apiserver.Start(ctx, apiserver.Config{
		Assets: os.Getenv(assets), Dir: s.dir, NoFsync: true, ServiceCIDRs: serviceCIDRs,
	})
	return err
}

// stop ends the server and removes its files. It may be called for a server that was never started.
func (s *Server) stop() error {
	if s.server != nil {
		s.server.Stop()
	}
	return os.RemoveAll(s.dir)
}

// installKinds installs all kinds that Isthmus uses.
func (s *Server) installKinds() error {
	all, err := crds.All()
	gateways, gatewaysErr := gatewaycrds.GatewayNodes()
	if err := errors.Join(err, gatewaysErr); err != nil {
		return err
	}
	definitions := append([]*apiextensionsv1.CustomResourceDefinition{gateways}, all...)
	_, err = envtest.InstallCRDs(s.server.As(apiserver.Admin), envtest.CRDInstallOptions{CRDs: definitions})
	if err != nil {
		return fmt.Errorf("install kinds: %w", err)
	}
	return nil
}

// Config returns an administrator's configuration of the server, which the caller may change.
func (s *Server) Config(t testing.TB) *rest.Config {
	t.Helper()
	Require(t)
	return s.server.As(apiserver.Admin)
}

// available reports whether tests may start API servers.
func available() bool { return os.Getenv(assets) != "" && !netlab.UnitOnly() }

// Require skips a test, or fails it when REQUIRE_PRIVILEGED=1, without the programs of an API server.
func Require(t testing.TB) {
	t.Helper()
	if !available() {
		netlab.Skip(t, "needs an API server: "+assets+" does not name a folder with kube-apiserver and etcd; make test builds them")
	}
}

// Restart kills the API server, waits for a while, starts it again with the same flags, and returns when it is ready. Its
// etcd keeps running.
func (s *Server) Restart(t testing.TB, away time.Duration) {
	t.Helper()
	Require(t)
	if err := s.server.Restart(t.Context(), away); err != nil {
		t.Fatalf("restart the API server: %v", err)
	}
}

// Wipe replaces the cluster behind the server's address: the database is empty but for the kinds of Isthmus, and the
// administrator stays the same.
func (s *Server) Wipe(t testing.TB) {
	t.Helper()
	Require(t)
	err := s.server.Wipe(t.Context())
	if err == nil {
		err = s.installKinds()
	}
	if err != nil {
		t.Fatalf("wipe the API server: %v", err)
	}
}
