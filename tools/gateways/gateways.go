// Package gateways puts an edge before a cluster of a lab: a client, a router, two gateways behind it, and a real
// Keystone and Neutron that know their ports. The router is FRR, and does what Neutron's agents do; it learns of floating
// IPs and allowed address pairs only from Neutron.
//
// Up needs a lab that is up. It provides the network, the cloud, and functions that run a gateway's programs and break
// things. Close removes everything and leaves the lab unchanged.
package gateways

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gophercloud/gophercloud/v2"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/edge"
	"github.com/isthmus-net/isthmus/tools/netlab/frr"
	"github.com/isthmus-net/isthmus/tools/neutron"
	"github.com/isthmus-net/isthmus/tools/neutron/l3"
)

// Autonomous systems of the router and of the gateways.
const (
	RouterASN  = 64500
	GatewayASN = 64512
)

// External are the networks of floating IPs.
var External = [2]netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8:f::/64")}

// internal are the networks of gateways and VIPs, those of package edge.
var internal = [2]netip.Prefix{
	netip.PrefixFrom(edge.Router[0], 24).Masked(),
	netip.PrefixFrom(edge.Router[1], 64).Masked(),
}

// trunk joins the router, the first end of each pair, with the lab's fabric.
var trunk = [2][2]netip.Prefix{
	{netip.MustParsePrefix("10.97.0.1/30"), netip.MustParsePrefix("10.97.0.2/30")},
	{netip.MustParsePrefix("fd97::1/126"), netip.MustParsePrefix("fd97::2/126")},
}

// clients and machines are routed across the trunk: the lab's addresses are those of package topology.
var (
	clients  = []netip.Prefix{netip.MustParsePrefix("10.98.0.0/24"), netip.MustParsePrefix("fd98::/64")}
	machines = []netip.Prefix{netip.MustParsePrefix("10.192.0.0/11"), netip.MustParsePrefix("fd00:200::/28")}
)

// Config holds the settings of an edge.
type Config struct {
	Lab      *cluster.Lab
	Dir      string    // state of the cloud
	Progress io.Writer // gets one line per step; default: none
}

// Edge is the edge of a cluster.
type Edge struct {
	*edge.Lab

	Cloud  *neutron.Cloud
	IDs    neutron.IDs
	Router *frr.Router
	L3     *l3.Router

	hub     *netlab.Namespace          // the lab's fabric
	network *gophercloud.ServiceClient // Neutron with its administrator's credentials
	follow  *errgroup.Group
	stop    context.CancelFunc
}

// Prepare installs the packages, compiles the programs and creates the initial state of the cloud. Up and Install do the
// same, but on a new machine it takes minutes, and Prepare can run while the lab comes up.
func Prepare(ctx context.Context, cfg Config) error {
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return err
	}
	preparing, ctx := errgroup.WithContext(ctx)
	preparing.Go(func() error { return Build(ctx, cfg.Dir, programs...) })
	preparing.Go(func() error {
		if err := install(ctx, &cfg); err != nil {
			return err
		}
		return cfg.cloud("").Prepare(ctx)
	})
	return preparing.Wait()
}

// cloud returns the edge's cloud, in a network namespace.
func (cfg Config) cloud(namespace string) *neutron.Cloud {
	return neutron.Open(neutron.Config{
		Dir: filepath.Join(cfg.Dir, "cloud"), Namespace: namespace, Addr: topology.FabricIPv4.Addr(),
		External: External, Internal: internal, Gateways: slices.Clone(edge.Gateways[:2]), TrustTokens: true, Progress: cfg.Progress,
	})
}

// install installs the packages of the router and the gateways.
func install(ctx context.Context, cfg *Config) error {
	if cfg.Progress == nil {
		cfg.Progress = io.Discard
	}
	return debian.Ensure(ctx, cfg.Progress, frr.Package, "nftables", "keepalived")
}

// Up brings the edge up.
func Up(ctx context.Context, cfg Config) (e *Edge, err error) {
	if err := install(ctx, &cfg); err != nil {
		return nil, err
	}
	e = &Edge{}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close(context.WithoutCancel(ctx)))
		}
	}()
	if e.Lab, err = edge.New(); err != nil {
		return e, err
	}
	if err := e.join(cfg.Lab); err != nil {
		return e, fmt.Errorf("join the router to the lab: %w", err)
	}
	peers := make([]frr.Peer, 0, len(e.Gateways))
	for i := range e.Gateways {
		peers = append(peers, frr.Peer{Addr: edge.Gateways[i][0], ASN: GatewayASN, BFDMillis: 100})
	}
	if e.Router, err = frr.Start(ctx, e.Lab.Router, frr.Config{ASN: RouterASN, RouterID: edge.Router[0], Peers: peers}); err != nil {
		return e, err
	}
	e.Cloud = cfg.cloud(cfg.Lab.FabricPath())
	if err := e.Cloud.Up(ctx); err != nil {
		return e, err
	}
	if e.IDs, err = e.Cloud.IDs(); err != nil {
		return e, err
	}
	if e.network, err = e.Cloud.Networking(ctx); err != nil {
		return e, err
	}
	return e, e.lead(ctx, cfg.Progress)
}

// join sets up the trunk with routes on both sides. It removes the trunk of an edge that was never closed.
func (e *Edge) join(lab *cluster.Lab) (err error) {
	if e.hub, err = netlab.OpenNamespace(lab.FabricPath()); err != nil {
		return err
	}
	if err := errors.Join(e.part(), e.hub.Do(forward)); err != nil {
		return err
	}
	for i, ends := range trunk {
		if err := e.Lab.Router.Connect(e.hub, ends[0], ends[1]); err != nil {
			return err
		}
		err := errors.Join(
			e.Lab.Router.RouteTo(machines[i], ends[1].Addr()),
			e.hub.RouteTo(internal[i], ends[0].Addr()), e.hub.RouteTo(clients[i], ends[0].Addr()),
		)
		if err != nil {
			return err
		}
	}
	return nil
}

// part removes the trunk.
func (e *Edge) part() error {
	var errs []error
	for _, ends := range trunk {
		errs = append(errs, e.hub.Disconnect(ends[1]))
	}
	return errors.Join(errs...)
}

// forward makes the current namespace a router.
func forward() error {
	return errors.Join(
		os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
		os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0),
	)
}

// lead keeps the router in step with Neutron.
func (e *Edge) lead(ctx context.Context, progress io.Writer) error {
	network, err := e.Cloud.Networking(ctx)
	if err != nil {
		return err
	}
	e.L3 = &l3.Router{
		Namespace: e.Lab.Router, Outside: "c0", Ports: map[string]string{},
		Report: func(s string) { fmt.Fprintln(progress, "router:", s) },
	}
	for i, g := range e.IDs.Gateways {
		e.L3.Ports[g.Port] = edge.Port(i)
	}
	ctx, e.stop = context.WithCancel(context.WithoutCancel(ctx))
	e.follow = &errgroup.Group{}
	e.follow.Go(func() error { return e.L3.Follow(ctx, network, 250*time.Millisecond) })
	return nil
}

// FromClient runs a command in the client's network and returns its output.
func (e *Edge) FromClient(ctx context.Context, argv ...string) (out string, err error) {
	err = e.Client.Do(func() error {
		b, err := exec.CommandContext(ctx, argv[0], argv[1:]...).Output()
		out = string(b)
		if failed, ok := errors.AsType[*exec.ExitError](err); ok {
			return fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, failed.Stderr)
		}
		return err
	})
	return out, err
}

// Close removes the edge.
func (e *Edge) Close(ctx context.Context) error {
	var errs []error
	if e.stop != nil {
		e.stop()
		errs = append(errs, e.follow.Wait())
	}
	if e.Cloud != nil {
		errs = append(errs, e.Cloud.Down(ctx))
	}
	if e.Router != nil {
		errs = append(errs, e.Router.Close())
	}
	if e.hub != nil {
		errs = append(errs, e.part(), e.hub.Close())
	}
	if e.Lab != nil {
		errs = append(errs, e.Lab.Close())
	}
	return errors.Join(errs...)
}
