// Package apiserver starts real Kubernetes API servers. Tests, benchmarks and labs all use it, so that there is one command
// line, one set of certificates and one way to wait for readiness.
//
// [Start] runs a kube-apiserver and its etcd as child processes, without any controller. A lab runs the same command lines
// ([Etcd], [Flags]) with the same files ([pki]) in its nodes instead, under its own supervisor.
package apiserver

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/isthmus-net/isthmus/tools/apiserver/pki"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/scrape"
)

const (
	// Timeout is how long a server may take until it is ready on a busy machine.
	Timeout = 5 * time.Minute
	poll    = 50 * time.Millisecond
	// Admin is the user who may do everything.
	Admin = "admin"
)

// Config describes an API server.
type Config struct {
	// Assets is a folder with the programs kube-apiserver and etcd.
	Assets string
	// Dir holds all files of the server. It must exist; the caller removes it after Stop.
	Dir string
	// ServiceCIDRs hold the ClusterIPs; by default 192.168.0.0/16.
	ServiceCIDRs []netip.Prefix
	// Users may connect, besides Admin. RBAC decides what they may do.
	Users []string
	// NoFsync keeps etcd from waiting for the disk.
	NoFsync bool
	// Frugal is for servers beside many others. It makes the two programs spend a fifth less CPU time: each stays on one CPU at a
	// time, and its timers may be 1 ms late. Without the kinds of unneeded, the server starts in three quarters of the time.
	Frugal bool
	// Flags are further flags of kube-apiserver.
	Flags []string
}

// Server is a running API server. Its methods may be called from one goroutine at a time, As and Address from any.
type Server struct {
	cfg       Config
	etcdURL   string
	etcdFlags []string
	apiFlags  []string
	host      string
	ca        []byte            // PEM
	tokens    map[string]string // by user
	http      *http.Client      // the administrator's

	etcd, api *process.Process
}

// Start starts a server and waits until it is ready.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	if len(cfg.ServiceCIDRs) == 0 {
		cfg.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")}
	}
	const tries = 3 // another program may take a port that was free a moment ago
	for try := 1; ; try++ {
		s := &Server{cfg: cfg, tokens: map[string]string{}}
		err := s.start(ctx)
		if err == nil {
			return s, nil
		}
		s.Stop()
		if exited := errors.Is(err, errExited) || errors.Is(err, errEtcdExited); !exited || try == tries {
			return nil, fmt.Errorf("start an API server: %w", err)
		}
		if err := os.RemoveAll(s.path("etcd")); err != nil {
			return nil, err
		}
	}
}

func (s *Server) start(ctx context.Context) error {
	if err := s.prepare(); err != nil {
		return err
	}
	if err := s.startEtcd(); err != nil {
		return err
	}
	return s.startServer(ctx)
}

var (
	// unneeded are the versions of API groups that a frugal server does not serve.
	unneeded = []string{
		"autoscaling/v1", "autoscaling/v2", "batch/v1", "flowcontrol.apiserver.k8s.io/v1", "node.k8s.io/v1",
		"resource.k8s.io/v1", "storage.k8s.io/v1",
	}
	// needing are the admission plugins that watch such kinds.
	needing = []string{"DefaultStorageClass", "PersistentVolumeClaimResize", "RuntimeClass"}
)

// prepare chooses ports, writes credentials and builds the command lines.
func (s *Server) prepare() error {
	ports, err := netlab.FreePorts(3)
	if err != nil {
		return err
	}
	loopback := ports[2].Addr()
	if err := s.writeCredentials(loopback); err != nil {
		return err
	}
	more := []string{
		"--bind-address=" + loopback.String(),
		"--token-auth-file=" + s.path("tokens.csv"),
		// The reconciler cannot publish a loopback address as an endpoint.
		"--endpoint-reconciler-type=none",
	}
	disabled := []string{"ServiceAccount"} // no controller creates the ServiceAccounts that this plugin demands
	if s.cfg.Frugal {
		disabled = append(disabled, needing...)
		more = append(more, "--enable-priority-and-fairness=false", "--runtime-config="+strings.Join(unneeded, "=false,")+"=false")
	}
	more = append(more, "--disable-admission-plugins="+strings.Join(disabled, ","))
	etcd := Etcd{Name: "etcd", DataDir: s.path("etcd"), Client: ports[0], Peer: ports[1], NoFsync: s.cfg.NoFsync}
	s.etcdURL, s.etcdFlags = etcd.URL(), etcd.Flags()
	s.apiFlags = Flags{
		Etcd: etcd.URL(), Advertise: loopback, Port: ports[2].Port(), ServiceCIDRs: s.cfg.ServiceCIDRs,
		PKI: s.cfg.Dir, Issuer: "https://kubernetes.default.svc", Authorization: "RBAC",
		More: append(more, s.cfg.Flags...),
	}.List()
	s.host = "https://" + ports[2].String()
	admin := s.As(Admin)
	admin.DisableCompression = true // compression would cost the server more than the metrics do
	s.http, err = rest.HTTPClientFor(admin)
	return err
}

func (s *Server) path(name string) string { return filepath.Join(s.cfg.Dir, name) }

// writeCredentials writes the server's certificates and keys, and its users' tokens.
func (s *Server) writeCredentials(address netip.Addr) error {
	authority, err := pki.New(s.cfg.Dir, "isthmus-test-ca")
	if err != nil {
		return err
	}
	s.ca = authority.CertPEM()
	if err := authority.WriteServer(address); err != nil {
		return err
	}
	s.tokens[Admin] = rand.Text()
	var tokens strings.Builder
	fmt.Fprintf(&tokens, "%s,%s,%s,%s\n", s.tokens[Admin], Admin, Admin, pki.Masters)
	for i, user := range s.cfg.Users {
		s.tokens[user] = rand.Text()
		fmt.Fprintf(&tokens, "%s,%s,%d\n", s.tokens[user], user, i)
	}
	return os.WriteFile(s.path("tokens.csv"), []byte(tokens.String()), 0o600)
}

func (s *Server) startEtcd() (err error) {
	s.etcd, err = s.run("etcd", s.etcdFlags)
	return err
}

// run starts a program.
func (s *Server) run(program string, flags []string) (*process.Process, error) {
	var o process.Options
	if s.cfg.Frugal {
		o = process.Options{Env: append(os.Environ(), "GOMAXPROCS=1"), TimerSlack: time.Millisecond}
	}
	return process.StartWith(o, filepath.Join(s.cfg.Assets, program), s.path(program+".log"), flags...)
}

// startServer starts kube-apiserver and waits until it is ready.
func (s *Server) startServer(ctx context.Context) (err error) {
	s.api, err = s.run("kube-apiserver", s.apiFlags)
	if err != nil {
		return err
	}
	return s.awaitReady(ctx)
}

// awaitReady waits until kube-apiserver is ready, or one of the processes has exited.
func (s *Server) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for s.Ready(ctx) != nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("kube-apiserver is not ready: %w", ctx.Err())
		case <-s.etcd.Ended():
			return fmt.Errorf("%w: %w", errEtcdExited, s.etcd.Failure())
		case <-s.api.Ended():
			return fmt.Errorf("%w: %w", errExited, s.api.Failure())
		case <-tick.C:
		}
	}
	return nil
}

// Ready asks the server whether it is ready.
func (s *Server) Ready(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.host+"/readyz", nil)
	if err != nil {
		return err
	}
	resp, err := s.http.Do(req)
	if err != nil {
		return err
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("kube-apiserver is not ready: %s", resp.Status)
	}
	return nil
}

// Errors of a program that exits before the server is ready.
var (
	errExited     = errors.New("kube-apiserver exited")
	errEtcdExited = errors.New("etcd exited")
)

// Restart kills kube-apiserver, waits for the given time, starts it again with the same flags, and waits until it is ready.
// Its etcd keeps running.
func (s *Server) Restart(ctx context.Context, away time.Duration) error {
	s.api.Kill()
	select {
	case <-time.After(away):
	case <-ctx.Done():
		return ctx.Err()
	}
	return s.startAgain(ctx)
}

// Wipe kills kube-apiserver and etcd, and starts both with an empty database: the address and the administrator stay, the
// cluster is a new one.
func (s *Server) Wipe(ctx context.Context) error {
	s.api.Kill()
	s.etcd.Kill()
	if err := os.RemoveAll(s.path("etcd")); err != nil {
		return err
	}
	if err := s.startEtcd(); err != nil {
		return err
	}
	return s.startAgain(ctx)
}

// startAgain starts a kube-apiserver that was killed. It exits at once while its port is taken, as by an outgoing connection
// that was made meanwhile; then startAgain tries again.
func (s *Server) startAgain(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	for {
		err := s.startServer(ctx)
		if !errors.Is(err, errExited) || ctx.Err() != nil {
			return err
		}
	}
}

// As returns the client configuration of a user, without a rate limit. The caller may change it.
func (s *Server) As(user string) *rest.Config {
	return &rest.Config{Host: s.host, TLSClientConfig: rest.TLSClientConfig{CAData: s.ca}, BearerToken: s.tokens[user], QPS: -1}
}

// Address is the host and port of the server.
func (s *Server) Address() string { return strings.TrimPrefix(s.host, "https://") }

// ServiceAccountKey returns the key that signs tokens of ServiceAccounts, as PEM.
func (s *Server) ServiceAccountKey() ([]byte, error) {
	return os.ReadFile(s.path(pki.ServiceAccountKey))
}

// EtcdURL is where etcd serves its API.
func (s *Server) EtcdURL() string { return s.etcdURL }

// WriteKubeconfig writes the kubeconfig of a user to path. It reaches the server at address: its own, or that of a forwarder.
// namespace is the context's default.
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

// CPU returns the CPU time that kube-apiserver and etcd have used so far.
func (s *Server) CPU() (api, etcd time.Duration, err error) {
	a, errA := s.api.Usage()
	e, errE := s.etcd.Usage()
	return a.CPU, e.CPU, errors.Join(errA, errE)
}

// Requests returns how many requests the server has answered so far, by "VERB resource" with the subresource after a slash.
// A watch counts when it ends.
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
			continue // a request without an object: health, metrics, discovery
		}
		if sub := sample.Labels["subresource"]; sub != "" {
			resource += "/" + sub
		}
		requests[sample.Labels["verb"]+" "+resource] += sample.Value
	}
	return requests, nil
}

// Pause keeps both processes from using CPU time until Resume: an API server without a client uses 2 to 3 % of a CPU.
func (s *Server) Pause() error { return errors.Join(s.api.Pause(), s.etcd.Pause()) }

// Resume lets paused processes go on, etcd first, and waits until the server is ready: what it had begun before the pause is
// overdue at first.
func (s *Server) Resume(ctx context.Context) error {
	if err := errors.Join(s.etcd.Resume(), s.api.Resume()); err != nil {
		return err
	}
	return s.awaitReady(ctx)
}

// Stop kills both processes: nothing they have is worth a graceful end. It may be called twice.
func (s *Server) Stop() {
	for _, p := range []*process.Process{s.api, s.etcd} {
		if p != nil {
			p.Kill()
		}
	}
}
