package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

// Host is a machine without Kubernetes on the lab's fabric: a network namespace, with IPv4 alone.
type Host struct {
	Name string
	Addr netip.Addr

	lab        *Lab
	resolvConf string
}

// AddHost adds a host to a lab that is up. number is from 2 to 9: the last byte of its address. Its name server is dns; the zero Addr:
// none.
func (l *Lab) AddHost(ctx context.Context, name string, number byte, dns netip.Addr) (*Host, error) {
	at := topology.FabricIPv4.Addr().As4()
	at[3] = number
	h := &Host{Name: name, Addr: netip.AddrFrom4(at), lab: l, resolvConf: filepath.Join(l.dir, "hosts", name, "resolv.conf")}
	if err := os.MkdirAll(filepath.Dir(h.resolvConf), 0o755); err != nil {
		return nil, err
	}
	servers := ""
	if dns.IsValid() {
		servers = fmt.Sprintf("nameserver %s\n", dns)
	}
	if err := os.WriteFile(h.resolvConf, []byte(servers), 0o644); err != nil {
		return nil, err
	}
	if err := l.fabric.Attach(ctx, topology.Machine{Name: name, IPv4: h.Addr}, l.topology); err != nil {
		return nil, fmt.Errorf("add host %s: %w", name, err)
	}
	return h, nil
}

// Remove removes the host. Its processes have to be over.
func (h *Host) Remove(ctx context.Context) error { return h.lab.fabric.Detach(ctx, h.Name) }

// Command returns a command that will run on the host.
func (h *Host) Command(ctx context.Context, argv ...string) *exec.Cmd {
	const run = `mount --bind "$0" /etc/resolv.conf && exec "$@"` // in a mount namespace of its own
	return exec.CommandContext(ctx, "ip", slices.Concat([]string{"netns", "exec", h.lab.fabric.NameOf(h.Name), "sh", "-c", run, h.resolvConf}, argv)...)
}
