// Package apiserver runs real Kubernetes API servers on this machine: a kube-apiserver and its etcd as two
// processes whose cost can be told apart, with users of the caller's choice and nothing that acts by itself.
package apiserver

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"

	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/scale/internal/program"
	"github.com/isthmus-net/isthmus/tools/scale/internal/scrape"
)

const (
	// startTimeout is how long a server may take until it is ready.
	startTimeout = 2 * time.Minute
	poll         = 50 * time.Millisecond
	// Admin is the user who may do everything.
	Admin = "admin"
)

// Config says what to start.
type Config struct {
	// Assets is a folder with the programs kube-apiserver and etcd.
	Assets string
	// Dir is where everything of the server is kept. It must exist, and is the caller's to remove.
	Dir string
	// Users may ask the server, besides Admin. They have the rights that RBAC gives to their names.
	Users []string
}

// Server is one API server. It runs until Stop.
type Server struct {
	dir    string
	host   string
	ca     []byte // PEM
	tokens map[string]string
	etcd   *program.Program
	api    *program.Program
	http   *http.Client // of the administrator
}

// Start starts a server and waits until it is ready.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	s := &Server{dir: cfg.Dir, tokens: map[string]string{}}
	if err := s.start(ctx, cfg); err != nil {
		return nil, errors.Join(fmt.Errorf("start an API server: %w", err), s.Stop())
	}
	return s, nil
}

func (s *Server) start(ctx context.Context, cfg Config) error {
	ports, err := netlab.FreePorts(3)
	if err != nil {
		return err
	}
	if err := s.writeCredentials(cfg.Users); err != nil {
		return err
	}
	client, peer := "http://"+ports[0].String(), "http://"+ports[1].String()
	s.etcd, err = program.Start(filepath.Join(cfg.Assets, "etcd"), s.path("etcd.log"),
		"--name=etcd", "--data-dir="+s.path("etcd"), "--log-level=warn",
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=etcd="+peer)
	if err != nil {
		return err
	}
	s.api, err = program.Start(filepath.Join(cfg.Assets, "kube-apiserver"), s.path("kube-apiserver.log"),
		"--etcd-servers="+client,
		"--bind-address=127.0.0.1", "--secure-port="+strconv.Itoa(int(ports[2].Port())), "--advertise-address=127.0.0.1",
		"--tls-cert-file="+s.path("tls.crt"), "--tls-private-key-file="+s.path("tls.key"),
		"--token-auth-file="+s.path("tokens.csv"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+s.path("accounts.key"), "--service-account-signing-key-file="+s.path("accounts.key"),
		"--service-cluster-ip-range=192.168.0.0/16",
		"--authorization-mode=RBAC",
		// It would try in vain to publish an address of this machine alone.
		"--endpoint-reconciler-type=none",
		// Nothing makes the ServiceAccounts that it asks for.
		"--disable-admission-plugins=ServiceAccount")
	if err != nil {
		return err
	}
	s.host = "https://" + ports[2].String()
	admin := s.As(Admin)
	admin.DisableCompression = true // which would cost the server more than the metrics
	if s.http, err = rest.HTTPClientFor(admin); err != nil {
		return err
	}
	return s.awaitReady(ctx)
}

func (s *Server) path(name string) string { return filepath.Join(s.dir, name) }

// writeCredentials makes the server's certificate, the key of its ServiceAccounts and its users' tokens.
func (s *Server) writeCredentials(users []string) error {
	certificate, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", nil, nil)
	if err != nil {
		return fmt.Errorf("make a certificate: %w", err)
	}
	s.ca = certificate
	accounts, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return fmt.Errorf("make a key: %w", err)
	}
	var tokens strings.Builder
	for i, user := range append(slices.Clone(users), Admin) {
		s.tokens[user] = rand.Text()
		groups := ""
		if user == Admin {
			groups = ",system:masters"
		}
		fmt.Fprintf(&tokens, "%s,%s,%d%s\n", s.tokens[user], user, i, groups)
	}
	for name, content := range map[string][]byte{
		"tls.crt": certificate, "tls.key": key,
		"accounts.key": pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(accounts)}),
		"tokens.csv":   []byte(tokens.String()),
	} {
		if err := os.WriteFile(s.path(name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// awaitReady waits until the server says that it is ready, or one of its programs has ended.
func (s *Server) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("kube-apiserver is not ready: %w", ctx.Err())
		case <-s.etcd.Ended():
			return s.etcd.Failure()
		case <-s.api.Ended():
			return s.api.Failure()
		case <-tick.C:
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.host+"/readyz", nil)
		if err != nil {
			return err
		}
		resp, err := s.http.Do(req)
		if err != nil {
			continue // not listening yet
		}
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return nil
		}
	}
}

// As returns how user reaches the server, without a limit on the rate of requests. It is the caller's.
func (s *Server) As(user string) *rest.Config {
	return &rest.Config{Host: s.host, BearerToken: s.tokens[user], TLSClientConfig: rest.TLSClientConfig{CAData: s.ca}, QPS: -1}
}

// Address is the host and port of the server.
func (s *Server) Address() string { return strings.TrimPrefix(s.host, "https://") }

// WriteKubeconfig writes to path how user reaches the server at address, which is its own or that of
// something that forwards to it. namespace is that of the context.
func (s *Server) WriteKubeconfig(path, user, address, namespace string) error {
	const name = "scale"
	err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{name: {Server: "https://" + address, CertificateAuthorityData: s.ca}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{name: {Token: s.tokens[user]}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name, Namespace: namespace}},
		CurrentContext: name,
	}, path)
	if err != nil {
		return fmt.Errorf("write kubeconfig %s: %w", path, err)
	}
	return nil
}

// CPU returns the CPU time that kube-apiserver and etcd have taken so far.
func (s *Server) CPU() (api, etcd time.Duration, err error) {
	a, errA := s.api.Usage()
	e, errE := s.etcd.Usage()
	return a.CPU, e.CPU, errors.Join(errA, errE)
}

// Requests returns how many requests the server has answered so far, by "VERB resource" with the
// subresource after a slash. Watches count when they end.
func (s *Server) Requests(ctx context.Context) (map[string]float64, error) {
	const metric = "apiserver_request_total"
	samples, err := scrape.Get(ctx, s.http, s.host+"/metrics", metric)
	if err != nil {
		return nil, err
	}
	requests := map[string]float64{}
	for _, sample := range samples {
		resource := sample.Labels["resource"]
		if resource == "" {
			continue // no object: health, metrics, discovery
		}
		if sub := sample.Labels["subresource"]; sub != "" {
			resource += "/" + sub
		}
		requests[sample.Labels["verb"]+" "+resource] += sample.Value
	}
	return requests, nil
}

// Stop ends both programs. It may be called twice.
func (s *Server) Stop() error {
	var errs []error
	for _, p := range []*program.Program{s.api, s.etcd} {
		if p != nil {
			errs = append(errs, p.Stop())
		}
	}
	return errors.Join(errs...)
}
