package dns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/crds"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/apiserver"
	"github.com/isthmus-net/isthmus/tools/bench/dns/internal/names"
	"github.com/isthmus-net/isthmus/tools/bench/internal/manifests"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

// coreDNS names the peer.
const coreDNS = "CoreDNS"

// cluster is an API server with the Services that CoreDNS serves.
type cluster struct {
	server     *apiserver.Server
	storage    string // folder of its files
	client     client.Client
	kubeconfig string
	program    string // path of CoreDNS
	dir        string
	filled     int // the number of its Services
}

// newCluster starts an API server and builds CoreDNS.
func newCluster(ctx context.Context, dir string, progress io.Writer) (*cluster, error) {
	assets, err := simulation.Assets(ctx, progress)
	if err != nil {
		return nil, err
	}
	module, err := moduleDir(ctx)
	if err != nil {
		return nil, err
	}
	c := &cluster{dir: dir, program: filepath.Join(dir, "coredns"), kubeconfig: filepath.Join(dir, "kubeconfig")}
	if err := build(ctx, filepath.Join(module, "tools/lab/components/coredns"), "tool", c.program); err != nil {
		return nil, err
	}
	all, err := crds.All()
	if err != nil {
		return nil, err
	}
	storage, err := os.MkdirTemp(simulation.DefaultStorage(), "isthmus-bench-")
	if err != nil {
		return nil, fmt.Errorf("make folder: %w", err)
	}
	c.storage = storage
	if c.server, err = apiserver.Start(ctx, apiserver.Config{Assets: assets, Dir: storage, NoFsync: true}); err != nil {
		return nil, errors.Join(err, os.RemoveAll(storage))
	}
	if err := c.connect(all); err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

// connect installs definitions, and gives the benchmark and CoreDNS an administrator's credentials.
func (c *cluster) connect(definitions []*apiextensionsv1.CustomResourceDefinition) error {
	cfg := c.server.As(apiserver.Admin)
	if _, err := envtest.InstallCRDs(cfg, envtest.CRDInstallOptions{CRDs: definitions}); err != nil {
		return fmt.Errorf("install definitions: %w", err)
	}
	if err := c.server.WriteKubeconfig(c.kubeconfig, apiserver.Admin, c.server.Address(), ""); err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1beta1.Install(scheme)); err != nil {
		return err
	}
	var err error
	c.client, err = client.New(cfg, client.Options{Scheme: scheme})
	return err
}

func (c *cluster) close() error {
	c.server.Stop()
	return os.RemoveAll(c.storage)
}

// writers is the number of concurrent requests while the API server is filled.
const writers = 16

// fill adds the missing Services of a set to the API server, which has the first c.filled of them.
func (c *cluster) fill(ctx context.Context, set names.Set, progress io.Writer) error {
	begin := time.Now()
	var objects []client.Object
	for _, n := range set.Namespaces() {
		objects = append(objects, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: n}})
	}
	if c.filled == 0 {
		for _, s := range (names.Set{Services: 1, Endpoints: set.Endpoints}).Snapshot().Services {
			objects = append(objects, manifests.Objects(&s)...)
		}
		c.filled = 1
	}
	// Namespaces must exist before the objects in them.
	for _, some := range [][]client.Object{objects[:len(set.Namespaces())], objects[len(set.Namespaces()):]} {
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(writers)
		for _, o := range some {
			group.Go(func() error {
				if err := c.client.Create(ctx, o); err != nil && !apierrors.IsAlreadyExists(err) {
					return fmt.Errorf("create %T %s/%s: %w", o, o.GetNamespace(), o.GetName(), err)
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			return err
		}
	}
	if err := c.multiply(ctx, set); err != nil {
		return err
	}
	c.filled = set.Services
	fmt.Fprintf(progress, "filled an API server with %d ServiceImports in %.0fs\n", set.Services, time.Since(begin).Seconds())
	return nil
}

// corefile is the usual Corefile of a cluster, with the ClusterSet's zone.
const corefile = `.:%d {
    errors
    prometheus %s
    cache 30
    loadbalance
    kubernetes cluster.local clusterset.local {
        kubeconfig %s
        multicluster clusterset.local
    }
}
`

// readLimit is the time that CoreDNS has to read all objects.
const readLimit = 90 * time.Second

// serve starts CoreDNS on one CPU and waits until it answers for all Services of the cluster. Occasionally one Service in ten
// thousand never becomes available, and only a restart helps.
func (c *cluster) serve(ctx context.Context, cpu int, set names.Set) (s *server, err error) {
	for range 3 {
		if s, err = c.start(ctx, cpu, set); err == nil || ctx.Err() != nil {
			break
		}
	}
	return s, err
}

func (c *cluster) start(ctx context.Context, cpu int, set names.Set) (*server, error) {
	ports, err := netlab.FreePorts(2)
	if err != nil {
		return nil, err
	}
	at, metrics := ports[0], ports[1]
	path := filepath.Join(c.dir, "Corefile")
	if err := os.WriteFile(path, fmt.Appendf(nil, corefile, at.Port(), metrics, c.kubeconfig), 0o600); err != nil {
		return nil, err
	}
	s, err := start(ctx, coreDNS, at, cpu, c.program, "-conf", path)
	if err != nil {
		return nil, err
	}
	s.logOutput()
	// It starts to answer before it has read all Services, which it reads in no order.
	reading, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	for i := 0; i < set.Services; i += max(1, set.Services/10_000) {
		if _, err := s.await(reading, names.Question{Wire: names.Ask(names.Name(i), names.TypeA, false), Answers: 1}); err != nil {
			return nil, errors.Join(err, s.stop())
		}
	}
	return s, nil
}

// change gives Service i another address and returns the time until CoreDNS, which has answered for it before, returns that
// address.
func (c *cluster) change(ctx context.Context, s *server, i, changes int) (time.Duration, error) {
	want := names.Address(i, changes)
	q := names.Question{Wire: names.Ask(names.Name(i), names.TypeA, false), Answers: 1}
	if _, err := s.await(ctx, q); err != nil {
		return 0, err
	}
	si := mcs.ServiceImport(names.Service(i, 0).Import)
	patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"ips":[%q]}}`, want))
	begin := time.Now()
	if err := c.client.Patch(ctx, si, patch); err != nil {
		return 0, fmt.Errorf("change %s: %w", names.Name(i), err)
	}
	for time.Since(begin) < startLimit {
		answer, at, err := s.ask(ctx, q)
		if err != nil {
			return 0, err
		}
		if ends := want.As4(); len(answer) > 4 && [4]byte(answer[len(answer)-4:]) == ends {
			return at.Sub(begin), nil
		}
	}
	return 0, fmt.Errorf("%s does not answer %s for %s", s.name, want, names.Name(i))
}
