package pool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"strings"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/isthmus-net/isthmus/controlplane/api/crds"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	gatewaycrds "github.com/isthmus-net/isthmus/gateway/api/crds"
	"github.com/isthmus-net/isthmus/tools/apiserver"
)

// server is an API server with the kinds of Isthmus.
type server struct {
	*apiserver.Server
	dir   string
	cidrs []netip.Prefix
	first map[string]string // contents of etcd before the first loan
	since time.Time         // idle
}

// start starts a server whose files are in a new folder below dir.
func start(ctx context.Context, dir, assets string, cidrs []netip.Prefix) (*server, error) {
	own, err := os.MkdirTemp(dir, "apiserver-")
	if err != nil {
		return nil, err
	}
	s := &server{dir: own, cidrs: cidrs}
	s.Server, err = apiserver.Start(ctx, apiserver.Config{Assets: assets, Dir: own, NoFsync: true, Frugal: true, ServiceCIDRs: cidrs})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(own))
	}
	if err := s.prepare(ctx); err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

// prepare installs the kinds and remembers the contents.
func (s *server) prepare(ctx context.Context) (err error) {
	if err := InstallKinds(s.As(apiserver.Admin)); err != nil {
		return err
	}
	if err := keepParameters(ctx, s.As(apiserver.Admin)); err != nil {
		return err
	}
	s.first, err = s.contents(ctx)
	return err
}

// InstallKinds installs all kinds that Isthmus uses.
func InstallKinds(config *rest.Config) error {
	all, err := crds.All()
	gateways, gatewaysErr := gatewaycrds.GatewayNodes()
	if err := errors.Join(err, gatewaysErr); err != nil {
		return err
	}
	definitions := append([]*apiextensionsv1.CustomResourceDefinition{gateways}, all...)
	if _, err := envtest.InstallCRDs(config, envtest.CRDInstallOptions{CRDs: definitions}); err != nil {
		return fmt.Errorf("install kinds: %w", err)
	}
	return nil
}

// keepParameters has the server follow Leases and Services for good. Policies of the next borrower would otherwise see those of the past.
func keepParameters(ctx context.Context, config *rest.Config) error {
	admin, err := client.New(config, client.Options{})
	if err != nil {
		return err
	}
	for _, obj := range admission.Parameters() {
		if err := admin.Create(ctx, obj); err != nil {
			return err
		}
	}
	return nil
}

func (s *server) access() Access {
	config := s.As(apiserver.Admin)
	return Access{Host: config.Host, Token: config.BearerToken, CA: config.CAData}
}

func (s *server) wipe(ctx context.Context) error {
	if err := s.Wipe(ctx); err != nil {
		return err
	}
	return s.prepare(ctx)
}

// stop ends the server and removes its files.
func (s *server) stop() {
	s.Stop()
	if err := os.RemoveAll(s.dir); err != nil {
		fmt.Fprintln(os.Stderr, "files of an API server:", err)
	}
}

// ownKeys are prefixes of keys that an API server writes about itself all the time.
var ownKeys = []string{"/registry/leases/kube-system/apiserver-", "/registry/masterleases/", "/registry/peerserverleases/"}

// kinds is the prefix of the keys of CustomResourceDefinitions.
const kinds = "/registry/apiextensions.k8s.io/customresourcedefinitions/"

// contents returns all objects in etcd by key, except for those that the server writes about itself.
func (s *server) contents(ctx context.Context) (map[string]string, error) {
	var found struct {
		KVs []struct{ Key, Value []byte }
	}
	err := s.Etcd(ctx, "range", map[string]any{"key": []byte("/registry/"), "range_end": []byte("/registry0")}, &found)
	if err != nil {
		return nil, err
	}
	all := make(map[string]string, len(found.KVs))
	for _, kv := range found.KVs {
		all[string(kv.Key)] = string(kv.Value)
	}
	maps.DeleteFunc(all, func(key, _ string) bool {
		for _, prefix := range ownKeys {
			if strings.HasPrefix(key, prefix) {
				return true
			}
		}
		return false
	})
	return all, nil
}

// reset gives etcd the contents that it had before the first loan. The server watches etcd, and follows.
func (s *server) reset(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	have, err := s.contents(ctx)
	if err != nil {
		return err
	}
	var changes []any
	for key := range have {
		if _, ok := s.first[key]; !ok {
			changes = append(changes, map[string]any{"requestDeleteRange": map[string]any{"key": []byte(key)}})
		}
	}
	for key, value := range s.first {
		if _, ok := have[key]; !ok && strings.HasPrefix(key, kinds) {
			return fmt.Errorf("a kind was removed: %s", key) // admission may need half a minute to know it again
		}
		if have[key] != value {
			changes = append(changes, map[string]any{"requestPut": map[string]any{"key": []byte(key), "value": []byte(value)}})
		}
	}
	const perTransaction = 100 // etcd allows 128
	for len(changes) > 0 {
		n := min(perTransaction, len(changes))
		if err := s.Etcd(ctx, "txn", map[string]any{"success": changes[:n]}, nil); err != nil {
			return err
		}
		changes = changes[n:]
	}
	return nil
}

// asNew returns an error unless the server is ready and has the contents that it had before the first loan.
func (s *server) asNew(ctx context.Context) error {
	if err := s.Ready(ctx); err != nil {
		return err
	}
	have, err := s.contents(ctx)
	if err != nil {
		return err
	}
	for key, value := range s.first {
		if have[key] != value {
			return fmt.Errorf("%s was changed after the reset", key)
		}
		delete(have, key)
	}
	for key := range have {
		return fmt.Errorf("%s was created after the reset", key)
	}
	return nil
}
