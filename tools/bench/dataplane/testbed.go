package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"

	"github.com/isthmus-net/isthmus/tools/bench/dataplane/internal/services"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// testbed holds everything that a run needs.
type testbed struct {
	sizes
	progress io.Writer
	dir      string // a temporary folder

	router, server *netlab.Namespace // the second router, and the backend
	bare           *netlab.Cgroup    // without programs
	paths          []path
	lanes          int
	planes         []plane
	references     *baselines
	size           size
	agent          agentCost
	peerProgram    float64 // seconds that kube-proxy took to program its rules

	undo []func() error
}

func newTestbed(ctx context.Context, s sizes, progress io.Writer) (*testbed, error) {
	b := &testbed{sizes: s, progress: progress}
	for _, step := range []func(context.Context) error{b.makeFolder, b.makeCgroup, b.makeNetwork, b.startServer, b.buildPaths} {
		if err := step(ctx); err != nil {
			return nil, errors.Join(err, b.close())
		}
	}
	return b, nil
}

func (b *testbed) close() error {
	var errs []error
	for _, undo := range slices.Backward(b.undo) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

func (b *testbed) makeFolder(context.Context) (err error) {
	if b.dir, err = os.MkdirTemp("", "isthmus-bench-"); err != nil {
		return fmt.Errorf("make folder: %w", err)
	}
	b.undo = append(b.undo, func() error { return os.RemoveAll(b.dir) })
	return nil
}

func (b *testbed) makeCgroup(context.Context) (err error) {
	b.bare, err = b.newCgroup()
	return err
}

// backend is the address of the server.
var backend = netip.AddrPortFrom(services.Answered, services.EndpointPort)

// makeNetwork makes the part of the network that all paths share: the second router and the backend.
func (b *testbed) makeNetwork(context.Context) error {
	var err error
	if b.router, err = b.newNamespace(); err != nil {
		return err
	}
	if b.server, err = b.newNamespace(); err != nil {
		return err
	}
	gateway := netip.MustParsePrefix("10.98.3.1/24")
	return errors.Join(
		b.router.Connect(b.server, gateway, netip.PrefixFrom(backend.Addr(), gateway.Bits())),
		b.server.Route(gateway.Addr()),
	)
}

func (b *testbed) newNamespace() (*netlab.Namespace, error) {
	ns, err := netlab.NewNamespace()
	if err == nil {
		b.undo = append(b.undo, ns.Close)
	}
	return ns, err
}

// lane is a client and the first router on its path to the backend.
type lane struct {
	client, node *netlab.Namespace
	address      netip.Addr // of the node, as the client sees it
	router       netip.Addr // of the second router, as the node sees it
	devices      []string   // of the node: to the client, and to the second router
}

// newLane makes a client and a router, joined with the second router.
func (b *testbed) newLane() (*lane, error) {
	client, err := b.newNamespace()
	if err != nil {
		return nil, err
	}
	node, err := b.newNamespace()
	if err != nil {
		return nil, err
	}
	b.lanes++
	at := func(network, host int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 98, byte(network + b.lanes), byte(host)}), 24)
	}
	const inner, outer = 10, 100 // offsets of the networks between client and node, and between node and router
	l := &lane{client: client, node: node, address: at(inner, 1).Addr(), router: at(outer, 2).Addr()}
	l.devices = []string{netlab.DeviceName(at(inner, 1)), netlab.DeviceName(at(outer, 1))}
	return l, errors.Join(
		client.Connect(node, at(inner, 2), at(inner, 1)),
		node.Connect(b.router, at(outer, 1), at(outer, 2)),
		client.Route(at(inner, 1).Addr()),
		node.Route(l.router),
		b.router.RouteTo(at(inner, 0), at(outer, 1).Addr()),
	)
}

// newCgroup makes a cgroup for the sockets of a path.
func (b *testbed) newCgroup() (*netlab.Cgroup, error) {
	c, err := netlab.NewCgroup()
	if err == nil {
		b.undo = append(b.undo, c.Close)
	}
	return c, err
}
