// Package frr runs a router in a network namespace: FRR's zebra, bgpd and bfdd, configured by a Config and queried by
// vtysh. The daemons come from Debian's package frr; the machine's own FRR is neither started nor used.
package frr

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Package is the Debian package with the daemons.
const Package = "frr"

// Config describes a router.
type Config struct {
	ASN      uint32
	RouterID netip.Addr
	Peers    []Peer
	// Paths is the maximum number of equal-cost routes; 0: one.
	Paths int
	// Networks are announced to the peers.
	Networks []netip.Prefix
	// Followers are routes that follow those to VIPs.
	Followers []Follower
}

// Follower routes packets to a network like packets to a VIP, in a separate routing table. So replies to clients pass the
// gateway that has the VIP. Without a gateway they are dropped: by the main table they would reach clients untranslated,
// and clients would answer with a reset.
type Follower struct {
	To    netip.Prefix
	VIP   netip.Addr
	Table int
}

// Peer is a neighbour that dials this router.
type Peer struct {
	Addr     netip.Addr
	ASN      uint32
	Password string
	// BFDMillis is the interval of BFD packets, of which three may be lost; 0: no BFD.
	BFDMillis int
	// Hops is the number of hops to the neighbour, if packets from farther away are dropped; 0: they are not.
	Hops int
	// Hold is the hold time that the router proposes, 9 s by default. The shorter one of both ends counts.
	Hold time.Duration
}

// Router is a running router. The caller closes it.
type Router struct {
	ns      *netlab.Namespace
	dir     string
	cfg     Config
	daemons map[string]*daemon
}

type daemon struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

// defaultHold is the hold time of a Peer that names none.
const defaultHold = 9 * time.Second

const (
	timeout = 20 * time.Second
	poll    = 20 * time.Millisecond
)

// Start starts a router in ns and returns when it answers.
func Start(ctx context.Context, ns *netlab.Namespace, cfg Config) (*Router, error) {
	dir, err := folder(ctx)
	if err != nil {
		return nil, err
	}
	r := &Router{ns: ns, dir: dir, cfg: cfg, daemons: map[string]*daemon{}}
	names := []string{"zebra", "bfdd", "bgpd"}
	if len(cfg.Followers) > 0 {
		names = append(names, "staticd")
	}
	for _, name := range names {
		if err := r.start(ctx, name); err != nil {
			return nil, errors.Join(err, r.Close())
		}
	}
	return r, nil
}

// folder creates a folder that the daemons, which do not run as root, can use.
func folder(ctx context.Context) (string, error) {
	dir, err := os.MkdirTemp("", "isthmus-frr-")
	if err != nil {
		return "", fmt.Errorf("make folder: %w", err)
	}
	if out, err := exec.CommandContext(ctx, "chown", "frr:frr", dir).CombinedOutput(); err != nil {
		return "", fmt.Errorf("is Debian's package %s installed? %s", Package, out)
	}
	return dir, nil
}

// Sockets is the folder of vtysh's sockets (its --vty_socket).
func (r *Router) Sockets() string { return r.dir }

// Close stops the daemons.
func (r *Router) Close() error {
	var errs []error
	for _, name := range []string{"staticd", "bgpd", "bfdd", "zebra"} {
		errs = append(errs, r.end(name, syscall.SIGTERM))
	}
	return errors.Join(append(errs, os.RemoveAll(r.dir))...)
}

// RestartBGP kills bgpd, which forgets everything, and starts it again.
func (r *Router) RestartBGP(ctx context.Context) error {
	if err := r.end("bgpd", syscall.SIGKILL); err != nil {
		return err
	}
	return r.start(ctx, "bgpd")
}

func (r *Router) start(ctx context.Context, name string) error {
	conf := filepath.Join(r.dir, name+".conf")
	text := "hostname r\n"
	switch name {
	case "bgpd":
		text += r.cfg.bgp()
	case "staticd":
		text += r.cfg.followers()
	}
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(r.dir, name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	args := []string{"-u", "frr", "-g", "frr", "-P", "0", "--vty_socket", r.dir, "-z", r.dir + "/zserv.api", "-f", conf, "-i", r.dir + "/" + name + ".pid"}
	switch name {
	case "bfdd":
		args = append(args, "--bfdctl", r.dir+"/bfdd.sock")
	case "zebra": // otherwise it replaces an IPv6 route by removing it first, and packets between the two are lost
		args = append(args, "--v6-rr-semantics")
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "/usr/lib/frr/"+name, args...) // Close stops it
	cmd.Stdout, cmd.Stderr = log, log
	if err := r.ns.Do(cmd.Start); err != nil {
		return fmt.Errorf("start %s of Debian's package %s: %w", name, Package, err)
	}
	d := &daemon{cmd: cmd, ended: make(chan struct{})}
	r.daemons[name] = d
	go func() {
		_ = cmd.Wait() // its log has the reason
		close(d.ended)
	}()
	if name == "bfdd" {
		// A router sends BFD's packets from hardware or at real-time priority. Here bfdd shares the machine with clients and servers, and would
		// take all gateways for dead when it has waited for a CPU for too long.
		is := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}
		if err := unix.SchedSetAttr(cmd.Process.Pid, &is, 0); err != nil && !errors.Is(err, unix.EPERM) { // a container may refuse that
			return fmt.Errorf("give bfdd priority: %w", err)
		}
	}
	return r.await(ctx, name, d)
}

// await returns when a daemon answers.
func (r *Router) await(ctx context.Context, name string, d *daemon) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		_, err := r.vtysh(ctx, "-d", name, "-c", "show version")
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-d.ended:
			said, _ := os.ReadFile(filepath.Join(r.dir, name+".log"))
			return fmt.Errorf("%s ended: %s", name, said)
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer: %w", name, err)
		}
	}
}

func (r *Router) end(name string, signal syscall.Signal) error {
	d := r.daemons[name]
	if d == nil {
		return nil
	}
	delete(r.daemons, name)
	_ = d.cmd.Process.Signal(signal) // it may have ended
	select {
	case <-d.ended:
		return nil
	case <-time.After(timeout):
		return errors.Join(fmt.Errorf("%s does not end", name), d.cmd.Process.Kill())
	}
}

// bgp returns the configuration of bgpd.
func (c Config) bgp() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("router bgp %d", c.ASN)
	line(" bgp router-id %s", c.RouterID)
	line(" no bgp ebgp-requires-policy")
	line(" no bgp network import-check")
	for _, p := range c.Peers {
		line(" neighbor %s remote-as %d", p.Addr, p.ASN)
		hold := cmp.Or(p.Hold, defaultHold)
		line(" neighbor %s timers %.0f %.0f", p.Addr, hold.Seconds()/3, hold.Seconds())
		line(" neighbor %s passive", p.Addr)
		line(" neighbor %s graceful-restart-helper", p.Addr)
		if p.Password != "" {
			line(" neighbor %s password %s", p.Addr, p.Password)
		}
		if p.Hops > 0 {
			line(" neighbor %s ttl-security hops %d", p.Addr, p.Hops)
		}
		if p.BFDMillis > 0 {
			line(" neighbor %s bfd 3 %d %d", p.Addr, p.BFDMillis, p.BFDMillis)
		}
	}
	for _, family := range []string{"ipv4", "ipv6"} {
		line(" address-family %s unicast", family)
		line("  maximum-paths %d", max(c.Paths, 1))
		for _, n := range c.Networks {
			if n.Addr().Is4() == (family == "ipv4") {
				line("  network %s", n)
			}
		}
		for _, p := range c.Peers {
			line("  neighbor %s activate", p.Addr)
			line("  neighbor %s soft-reconfiguration inbound", p.Addr)
		}
		line(" exit-address-family")
	}
	return b.String()
}

// followers returns the configuration of staticd.
func (c Config) followers() string {
	var b strings.Builder
	for _, f := range c.Followers {
		family := "ip"
		if f.VIP.Is6() {
			family = "ipv6"
		}
		fmt.Fprintf(&b, "%[1]s route %[2]s %[3]s table %[4]d\n%[1]s route %[2]s blackhole 250 table %[4]d\n", family, f.To, f.VIP, f.Table)
	}
	return b.String()
}

// Ask runs a vtysh command and returns its output.
func (r *Router) Ask(ctx context.Context, command string) ([]byte, error) {
	return r.vtysh(ctx, "-c", command)
}

func (r *Router) vtysh(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "vtysh", append([]string{"--vty_socket", r.dir}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("vtysh %q: %w: %s", args, err, stderr.Bytes())
	}
	return out, nil
}

// Route is one path to a prefix, as bgpd has it.
type Route struct {
	From        netip.Addr // the peer
	NextHops    []netip.Addr
	MED         int
	LocalPref   int
	Communities []string // in FRR's notation
	Large       []string
	Best, Stale bool
	Multipath   bool
}

// Routes returns all paths to a VIP.
func (r *Router) Routes(ctx context.Context, vip netip.Addr) ([]Route, error) {
	family := "ipv4"
	if vip.Is6() {
		family = "ipv6"
	}
	out, err := r.Ask(ctx, fmt.Sprintf("show bgp %s unicast %s json", family, netip.PrefixFrom(vip, vip.BitLen())))
	if err != nil {
		return nil, err
	}
	var answer struct {
		Paths []struct {
			Peer struct {
				PeerID netip.Addr `json:"peerId"`
			} `json:"peer"`
			NextHops []struct {
				IP    netip.Addr `json:"ip"`
				Scope string     `json:"scope"`
			} `json:"nexthops"`
			MED       int `json:"metric"`
			LocalPref int `json:"locPrf"`
			Community struct {
				List []string `json:"list"`
			} `json:"community"`
			Large struct {
				List []string `json:"list"`
			} `json:"largeCommunity"`
			Best struct {
				Overall bool `json:"overall"`
			} `json:"bestpath"`
			Stale     bool `json:"stale"`
			Multipath bool `json:"multipath"`
		} `json:"paths"`
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return nil, fmt.Errorf("read what bgpd has of %s: %w", vip, err)
	}
	var routes []Route
	for _, p := range answer.Paths {
		have := Route{
			From: p.Peer.PeerID, MED: p.MED, LocalPref: p.LocalPref, Communities: p.Community.List, Large: p.Large.List,
			Best: p.Best.Overall, Stale: p.Stale, Multipath: p.Multipath,
		}
		for _, h := range p.NextHops {
			have.NextHops = append(have.NextHops, h.IP)
		}
		routes = append(routes, have)
	}
	return routes, nil
}
