// Package apitest gives tests real API servers ([apiserver]) that know all kinds of Isthmus. No controller-manager and no
// kubelet runs: nothing changes but what the test changes.
//
// A package borrows its servers once, in TestMain, by [Run]; each test asks a [Server] for its configuration. Package [pool] lends
// them. The programs are those in the folder that KUBEBUILDER_ASSETS names.
package apitest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/tools/apiserver"
	"github.com/isthmus-net/isthmus/tools/apitest/pool"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// assets is the variable that names the folder of kube-apiserver and etcd.
const assets = "KUBEBUILDER_ASSETS"

// Server is one API server. The zero value is one that [Run] borrows.
type Server struct {
	// ServiceCIDRs hold the ClusterIPs; by default 10.96.0.0/16 and fd00:96::/112.
	ServiceCIDRs []netip.Prefix

	loan *pool.Loan
}

// Run borrows servers, runs the tests of the package, returns the servers and returns the exit code for TestMain. They come
// from the pool that [pool.Variable] names, or else from one for this package. Without the programs it borrows no server,
// and tests that need one skip (see [Require]).
func Run(m *testing.M, servers ...*Server) int {
	if !available() {
		return m.Run()
	}
	code, err := run(m, servers)
	if err != nil {
		fmt.Fprintln(os.Stderr, "API servers for tests:", err)
		return 1
	}
	return code
}

func run(m *testing.M, servers []*Server) (code int, err error) {
	ctx := context.Background()
	socket := os.Getenv(pool.Variable)
	if socket == "" || netlab.Inside() { // whose loopback has none of that pool's servers
		var own *pool.Pool
		if own, err = pool.Listen(ctx, os.Getenv(assets)); err != nil {
			return 1, err
		}
		defer func() { err = errors.Join(err, own.Close()) }()
		socket = own.Socket()
	}
	defer func() {
		for _, s := range servers {
			if s.loan != nil {
				err = errors.Join(err, s.loan.Close())
			}
		}
	}()
	var group errgroup.Group
	for _, s := range servers {
		group.Go(func() (err error) {
			s.loan, err = pool.Borrow(ctx, socket, s.cidrs())
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

func (s *Server) cidrs() []netip.Prefix {
	if s.ServiceCIDRs == nil {
		return []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:96::/112")}
	}
	return s.ServiceCIDRs
}

// StartEmpty starts a server without the kinds of Isthmus, which ends with the test, and returns an administrator's
// configuration of it.
func StartEmpty(t testing.TB) *rest.Config {
	t.Helper()
	Require(t)
	config, stop, err := Empty(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return config
}

// Empty starts a server without the kinds of Isthmus, for tests that are run by something else than [testing.T].
func Empty(ctx context.Context) (config *rest.Config, stop func() error, err error) {
	dir, err := os.MkdirTemp("", "isthmus-apitest-")
	if err != nil {
		return nil, nil, err
	}
	s, err := apiserver.Start(ctx, apiserver.Config{
		Assets: os.Getenv(assets), Dir: dir, NoFsync: true, Frugal: true, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")},
	})
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	return s.As(apiserver.Admin), func() error {
		s.Stop()
		return os.RemoveAll(dir)
	}, nil
}

// Config returns an administrator's configuration of the server, which the caller may change.
func (s *Server) Config(t testing.TB) *rest.Config {
	t.Helper()
	Require(t)
	return s.loan.Config()
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
	if err := s.loan.Restart(away); err != nil {
		t.Fatalf("restart the API server: %v", err)
	}
}

// Wipe replaces the cluster behind the server's address: the database is empty but for the kinds of Isthmus, and the
// administrator stays the same.
func (s *Server) Wipe(t testing.TB) {
	t.Helper()
	Require(t)
	if err := s.loan.Wipe(); err != nil {
		t.Fatalf("wipe the API server: %v", err)
	}
}
