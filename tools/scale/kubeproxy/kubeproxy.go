// Package kubeproxy programs network namespaces with a real kube-proxy, for comparisons and for coexistence tests. An API
// server of its own holds the Services.
package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/isthmus-net/isthmus/tools/apiserver"
	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/process"
)

const (
	node      = "node"
	namespace = metav1.NamespaceDefault
	// writers is the number of clients that fill the API server.
	writers = 8
	// poll is the interval at which the kernel's rules are checked.
	poll = 100 * time.Millisecond
	// limit is the time that kube-proxy has, and limitEach the additional time per Service.
	limit     = time.Minute
	limitEach = 60 * time.Millisecond
	// tail is the length of the log that an error contains, in bytes.
	tail = 2000
)

// Service describes a Service to program. The port and the endpoint port have the same number for all protocols.
type Service struct {
	Name               string
	Protocols          []corev1.Protocol
	Port, EndpointPort int32
	Endpoints          []netip.Addr // IPv4
}

// ClusterIP returns the address of the i-th Service passed to Program.
func ClusterIP(i int) netip.Addr {
	i += 256 // the API server uses the first addresses
	return netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)})
}

// Config describes the API server for kube-proxies.
type Config struct {
	Assets   string     // a folder with etcd, kube-apiserver and kube-proxy
	Dir      string     // for all files; it must exist, and the caller removes it
	Address  netip.Addr // of the node that all kube-proxies run on
	Progress io.Writer
}

// Cluster is a running API server with Services.
type Cluster struct {
	cfg      Config
	api      *apiserver.Server
	services []Service
}

// New starts an API server and creates at most 65,000 services in it.
func New(ctx context.Context, cfg Config, services []Service) (*Cluster, error) {
	api, err := apiserver.Start(ctx, apiserver.Config{Assets: cfg.Assets, Dir: cfg.Dir})
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(cfg.Progress, "write %d Services to an API server for kube-proxy\n", len(services))
	begin := time.Now()
	if err := fill(ctx, api, cfg.Address, services); err != nil {
		api.Stop()
		return nil, err
	}
	fmt.Fprintf(cfg.Progress, "wrote them in %.0fs\n", time.Since(begin).Seconds())
	return &Cluster{cfg, api, services}, nil
}

// Close stops the API server. Stop all proxies first.
func (c *Cluster) Close() { c.api.Stop() }

// Mode is the backend of a kube-proxy in the kernel.
type Mode string

// The modes, by the values of kube-proxy's --proxy-mode.
const (
	NFTables Mode = "nftables"
	IPTables Mode = "iptables"
)

// Proxy is a running kube-proxy in a namespace.
type Proxy struct {
	process *process.Process
	log     string
	unrelay func() error
	// Took is the time from its start until the rules for all Services were in the kernel.
	Took time.Duration
}

// Start starts a kube-proxy in ns and returns when the rules for all Services are in the kernel.
func (c *Cluster) Start(ctx context.Context, ns *netlab.Namespace, mode Mode) (_ *Proxy, err error) {
	if err := debian.Ensure(ctx, c.cfg.Progress, string(mode), "conntrack"); err != nil { // the packages have the names of the modes
		return nil, err
	}
	dir, err := os.MkdirTemp(c.cfg.Dir, "kube-proxy-")
	if err != nil {
		return nil, err
	}
	p := &Proxy{log: filepath.Join(dir, "log")}
	address, stop, err := relay(ctx, ns, c.api.Address())
	if err != nil {
		return nil, err
	}
	p.unrelay = stop
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := c.api.WriteKubeconfig(kubeconfig, apiserver.Admin, address, namespace); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	begin := time.Now()
	p.process, err = process.Start(nsenter, p.log, "--net="+ns.Path(),
		filepath.Join(c.cfg.Assets, "kube-proxy"), "--proxy-mode="+string(mode), "--kubeconfig="+kubeconfig, "--hostname-override="+node,
		"--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249",
		// Do not change settings of the whole machine.
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")
	if err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	waiting, cancel := context.WithTimeout(ctx, limit+time.Duration(len(c.services))*limitEach)
	defer cancel()
	for i := range c.services { // one transaction contains all rules, but that is not guaranteed
		if i == 0 || i == len(c.services)-1 {
			if err := p.await(waiting, ns, mode, c.services[i], ClusterIP(i)); err != nil {
				return nil, errors.Join(err, p.Stop())
			}
		}
	}
	p.Took = time.Since(begin)
	return p, nil
}

// Stop ends the kube-proxy. Its rules stay.
func (p *Proxy) Stop() error {
	var err error
	if p.process != nil {
		err = p.process.Stop()
	}
	return errors.Join(err, p.unrelay())
}

// Program runs a kube-proxy in ns until its nftables rules for services are in the kernel, and returns the time from its start.
// The kube-proxy is stopped then, and its rules stay until the namespace is closed.
func Program(ctx context.Context, cfg Config, ns *netlab.Namespace, services []Service) (took time.Duration, err error) {
	c, err := New(ctx, cfg, services)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	p, err := c.Start(ctx, ns, NFTables)
	if err != nil {
		return 0, err
	}
	return p.Took, p.Stop()
}

// nsenter runs a program in a namespace by exec: the process keeps its PID.
const nsenter = "/usr/bin/nsenter"

// await waits until the kernel has a Service, or kube-proxy exits.
func (p *Proxy) await(ctx context.Context, ns *netlab.Namespace, mode Mode, s Service, ip netip.Addr) error {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	// The other family is programmed separately, and has no Services to wait for.
	question := fmt.Sprintf("nft get element ip kube-proxy service-ips '{ %s . tcp . %d }' && nft list table ip6 kube-proxy", ip, s.Port)
	if mode == IPTables {
		question = fmt.Sprintf("iptables-save --table nat | grep -e '-A KUBE-SERVICES -d %s/32 ' && ip6tables-save --table nat | grep -e '-A KUBE-POSTROUTING .* MASQUERADE'", ip)
	}
	for {
		if exec.CommandContext(ctx, nsenter, "--net="+ns.Path(), "sh", "-c", question).Run() == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			said, err := os.ReadFile(p.log)
			return errors.Join(fmt.Errorf("wait for kube-proxy's rules: %w; the end of its log:\n%s", ctx.Err(), said[max(0, len(said)-tail):]), err)
		case <-p.process.Ended():
			return p.process.Failure()
		case <-tick.C:
		}
	}
}

// relay makes an address of the machine's own network reachable from ns, at the returned address, until stop.
func relay(ctx context.Context, ns *netlab.Namespace, address string) (at string, stop func() error, err error) {
	var l net.Listener
	if err := ns.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
		return err
	}); err != nil {
		return "", nil, fmt.Errorf("relay to %s: %w", address, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var connections errgroup.Group
	connections.Go(func() error {
		for {
			in, err := l.Accept()
			if err != nil {
				return nil //nolint:nilerr // the listener was closed
			}
			connections.Go(func() error { return forward(ctx, in, address) })
		}
	})
	return l.Addr().String(), func() error {
		err := l.Close()
		cancel()
		return errors.Join(err, connections.Wait())
	}, nil
}

// forward copies in both directions until one side closes or ctx ends. It ignores errors, which both ends of the connection
// see.
func forward(ctx context.Context, in net.Conn, address string) error {
	defer in.Close()
	out, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil // the client sees that the connection is closed
	}
	defer out.Close()
	done := make(chan struct{}, 2)
	for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
		go func() {
			_, _ = io.Copy(pair[0], pair[1])
			done <- struct{}{}
		}()
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
	return nil
}

// fill writes the node and all Services.
func fill(ctx context.Context, api *apiserver.Server, address netip.Addr, services []Service) error {
	cfg := api.As(apiserver.Admin)
	cfg.ContentType = "application/vnd.kubernetes.protobuf" // needs half the server's CPU time
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: node},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address.String()}}},
	}
	if n, err = client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("write node: %w", err)
	}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address.String()}}
	if _, err = client.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("write node: %w", err)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(writers)
	for i, s := range services {
		group.Go(func() error { return write(ctx, client, s, ClusterIP(i)) })
	}
	return group.Wait()
}

// write writes one Service and its endpoints.
func write(ctx context.Context, client kubernetes.Interface, s Service, ip netip.Addr) error {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: s.Name}, Spec: corev1.ServiceSpec{ClusterIP: ip.String()}}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: s.Name, Labels: map[string]string{discoveryv1.LabelServiceName: s.Name}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for i, p := range s.Protocols {
		name := fmt.Sprint("p", i)
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: name, Protocol: p, Port: s.Port})
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &name, Protocol: &p, Port: &s.EndpointPort})
	}
	for _, a := range s.Endpoints {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a.String()}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)},
		})
	}
	if _, err := client.CoreV1().Services(namespace).Create(ctx, svc, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("write Service %s: %w", s.Name, err)
	}
	if _, err := client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("write endpoints of %s: %w", s.Name, err)
	}
	return nil
}
