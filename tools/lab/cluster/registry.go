package cluster

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/isthmus-net/isthmus/tools/lab/internal/supervisor"
)

// registryPort is the TCP port of the lab's registry.
const registryPort = 5000

// registryAddress returns the address of the lab's registry: a port of the first cluster's control plane.
func (l *Lab) registryAddress() netip.AddrPort {
	return netip.AddrPortFrom(l.topology[0].Advertise(), registryPort)
}

// trustRegistry adds the configuration by which containerd pulls from the lab's registry, which has no TLS, to the files of a node.
func (l *Lab) trustRegistry(files map[string]string) {
	address := l.registryAddress()
	files["containerd/certs.d/"+address.String()+"/hosts.toml"] = fmt.Sprintf("server = \"http://%[1]s\"\n[host.\"http://%[1]s\"]\n", address)
}

// StartRegistry starts an OCI registry on the lab's network, unless it runs, and returns its address. Every node can pull from it,
// without TLS. Its content is gone when the lab is down.
func (l *Lab) StartRegistry(ctx context.Context) (string, error) {
	address := l.registryAddress()
	at := l.machine(l.topology[0].Name)
	if err := start(at, []supervisor.Component{{
		Name: "registry", Argv: []string{l.settings.Programs["registry"], "--listen=" + address.String(), "--dir=/var/lib/registry"},
	}}); err != nil {
		return "", err
	}
	return address.String(), waitFor(ctx, "registry", func(ctx context.Context) error {
		return l.FabricCommand(ctx, "bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/%d", net.IP(address.Addr().AsSlice()), registryPort)).Run()
	})
}
