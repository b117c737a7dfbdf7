package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/vrrp"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// TestRights runs a gateway with the capabilities that the chart grants, which tools/check/tree lists: it balances, and
// is the VRRP master. It ends gracefully with these capabilities, and leaves no VIP.
func TestRights(t *testing.T) {
	netlab.Privileged(t)
	program := filepath.Join(t.TempDir(), "isthmus-gateway")
	if said, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, said)
	}
	for balancer, rights := range map[desired.Balancer]string{
		desired.NFTables: "+net_admin,+net_raw,+sys_nice",
		desired.EBPF:     "+net_admin,+net_raw,+sys_nice,+sys_admin",
	} {
		t.Run(string(balancer), func(t *testing.T) {
			cfg, client := config(t)
			ns, err := netlab.NewNamespace()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = ns.Close() })
			if err := ns.Do(machine); err != nil {
				t.Fatal(err)
			}
			in := func(ctx context.Context, network, address string) (c net.Conn, err error) {
				return c, errors.Join(ns.Do(func() error {
					c, err = new(net.Dialer).DialContext(ctx, network, address)
					return nil
				}), err)
			}
			client.Transport.(*http.Transport).DialContext = in
			asks := &http.Client{Transport: &http.Transport{DialContext: in, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
			t.Cleanup(asks.CloseIdleConnections)

			t.Cleanup(func() { // keepalived outlives a gateway that crashes
				if err := ns.Do(func() error {
					return vrrp.Cleanup(context.WithoutCancel(t.Context()), filepath.Join(cfg.RunDir, "vrrp"))
				}); err != nil {
					t.Error(err)
				}
			})
			bpffs := netlab.BPFFS(t)
			begin := func() *process {
				t.Helper()
				g := &process{ended: make(chan error, 1)}
				flows := "--flows=0"
				if balancer == desired.EBPF {
					flows = "--flows=1024"
				}
				g.cmd = exec.CommandContext(t.Context(), "setpriv", "--bounding-set=-all,"+rights, "--inh-caps=-all", "--no-new-privs",
					program, "run", "--cluster=a", "--balancer="+string(balancer), flows, "--bpffs="+bpffs, "--listen="+cfg.Listen, "--http-listen="+cfg.HTTPListen,
					"--cert="+cfg.Files.Cert, "--key="+cfg.Files.Key, "--ca="+cfg.Files.CA, "--state-dir="+cfg.StateDir, "--run-dir="+cfg.RunDir)
				g.cmd.Stdout, g.cmd.Stderr = &g.said, &g.said
				if err := ns.Do(g.cmd.Start); err != nil {
					t.Fatal(err)
				}
				go func() { g.ended <- g.cmd.Wait() }()
				t.Cleanup(func() { _ = g.cmd.Process.Kill() })
				return g
			}
			g := begin()
			awaitBy(t, asks, "https://"+cfg.HTTPListen+"/healthz", 200)

			vip := netip.MustParseAddr("192.0.2.100")
			body, err := json.Marshal(desired.NewRequest(1, desired.State{
				Cluster: "a", Group: "edge", Balancer: balancer,
				VRRP: &desired.VRRP{Interface: "eth0", Source: netip.MustParseAddr("192.0.2.11"), Peers: []netip.Addr{netip.MustParseAddr("192.0.2.12")}, RouterID: 51, Priority: 100, IntervalMillis: 100},
				VIPs: []desired.VIP{{
					Addr: vip, Announce: desired.ByVRRP, Return: desired.Masquerade,
					Frontends: []desired.Frontend{{Service: "shop/web", Protocol: "TCP", Port: 80, Backends: []desired.Backend{{Addr: netip.MustParseAddr("192.0.2.5"), Port: 8080, Weight: 1}}}},
				}},
			}))
			if err != nil {
				t.Fatal(err)
			}
			answer, err := client.Post("https://"+cfg.Listen+"/v1/reconfigure", "application/json", bytes.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			why, _ := io.ReadAll(answer.Body)
			answer.Body.Close()
			if answer.StatusCode != http.StatusOK {
				t.Fatalf("%d %s\n%s", answer.StatusCode, why, g.said.String())
			}
			awaitBy(t, asks, "https://"+cfg.HTTPListen+"/readyz", 200)
			// A restarted gateway compares everything with the machine before it is ready.
			g.end(t, syscall.SIGHUP)
			g = begin()
			awaitBy(t, asks, "https://"+cfg.HTTPListen+"/readyz", 200)
			for want := "isthmus_gateway_announced_vips 1"; !strings.Contains(awaitBy(t, asks, "https://"+cfg.HTTPListen+"/metrics", 200), want); {
				if t.Context().Err() != nil {
					t.Fatal(want)
				}
			}
			g.end(t, syscall.SIGTERM)
			if err := ns.Do(func() error { return hasNot(vip) }); err != nil {
				t.Error(err)
			}
		})
	}
}

// process is a running gateway.
type process struct {
	cmd   *exec.Cmd
	said  bytes.Buffer
	ended chan error
}

// end ends the gateway gracefully by a signal.
func (g *process) end(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := g.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
	if err := <-g.ended; err != nil {
		t.Errorf("%v: %v\n%s", s, err, g.said.String())
	}
}

// machine turns its namespace into a machine that can be a gateway.
func machine() error {
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "switch"}
	addr, err := netlink.ParseAddr("192.0.2.11/24")
	if err := errors.Join(err, netlink.LinkAdd(link)); err != nil {
		return err
	}
	end, err := netlink.LinkByName(link.PeerName)
	if err != nil {
		return err
	}
	return errors.Join(netlink.AddrAdd(link, addr), netlink.LinkSetUp(link), netlink.LinkSetUp(end), os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
}

// hasNot returns an error when its namespace has an address.
func hasNot(vip netip.Addr) error {
	all, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	for _, a := range all {
		if a.IP.String() == vip.String() {
			err = errors.Join(err, errors.New("the gateway has ended, and the machine has "+vip.String()))
		}
	}
	return err
}
