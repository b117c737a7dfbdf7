package neutron_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/portsbinding"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/security/groups"
	neutronrules "github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/security/rules"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	workloadsneutron "github.com/isthmus-net/isthmus/controlplane/workloads/neutron"
	"github.com/isthmus-net/isthmus/controlplane/workloads/rules"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/neutron"
)

// judged adds the test with an engine, which make test-security-groups sets.
var judged = os.Getenv("ISTHMUS_SECURITY_GROUPS") != ""

// TCP ports of every machine. The policy admits a client at the first.
const (
	sqlPort   = 5432
	adminPort = 22
)

// A NetworkPolicy that selects a server outside of the clusters holds, as OVN judges packets by the groups that Isthmus writes to
// Neutron: of two clients it admits one, at one port.
func TestSecurityGroupsHold(t *testing.T) {
	if !judged {
		t.Log("no packet is judged; make test-security-groups installs OVN for it")
		conformance.LeaveOut(t, "F29")
		return
	}
	bed := newBench(t)
	client, stranger, server := bed.machine(t, "client", ""), bed.machine(t, "stranger", ""), bed.machine(t, "server", "server-1")
	all := []*machine{client, stranger, server}
	before := bed.groupsOf(t, server)

	bed.awaitReached(t, "without a policy", all, everyone)
	bed.apply(t, rules.Build("cluster-1", []*networkingv1.NetworkPolicy{admitting(t, client)}, []rules.Machine{
		{ID: "server-1", Namespace: "shop", Labels: map[string]string{"app": "db"}},
	}))
	bed.awaitReached(t, "with a policy", all, func(from, to *machine, port uint16) bool {
		return to != server || from == client && port == sqlPort
	})
	bed.apply(t, rules.Plan{})
	bed.awaitReached(t, "after the policy", all, everyone)
	if after := bed.groupsOf(t, server); !slices.Equal(after, before) {
		t.Errorf("the server has the groups %v afterwards; want the former %v", after, before)
	}
	conformance.Holds(t, "F29")
}

// everyone reaches everyone.
func everyone(_, _ *machine, _ uint16) bool { return true }

// admitting returns a policy that selects databases and admits a client at one port.
func admitting(t *testing.T, client *machine) *networkingv1.NetworkPolicy {
	t.Helper()
	spec := fmt.Sprintf(`{
		podSelector: {matchLabels: {app: db}}, policyTypes: [Ingress],
		ingress: [{from: [{ipBlock: {cidr: %s/32}}, {ipBlock: {cidr: "%s/128"}}], ports: [{port: %d}]}],
	}`, client.addrs[0], client.addrs[1], sqlPort)
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "db"}}
	if err := yaml.UnmarshalStrict([]byte(spec), &p.Spec); err != nil {
		t.Fatal(err)
	}
	return p
}

// bench is a cloud with an engine, and a group that admits everything.
type bench struct {
	cloud   *neutron.Cloud
	ids     neutron.IDs
	network *gophercloud.ServiceClient // with an administrator's rights
	open    string                     // ID of the group
	groups  *workloadsneutron.Neutron
	devices int
}

func newBench(t *testing.T) *bench {
	t.Helper()
	if !netlab.IsRoot() {
		t.Fatal("an engine needs root; run make test-security-groups as root")
	}
	dir := t.TempDir()
	cloud := neutron.Open(neutron.Config{Dir: dir, Engine: true, Progress: t.Output()})
	t.Cleanup(func() {
		if t.Failed() {
			said, err := os.ReadFile(filepath.Join(dir, "neutron.log"))
			t.Logf("end of Neutron's log: %s %v", said[max(0, len(said)-20_000):], err)
		}
		if err := cloud.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	for _, step := range []func(context.Context) error{cloud.Prepare, cloud.Up} {
		if err := step(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	b := &bench{cloud: cloud, groups: workloadsneutron.New(workloadsneutron.Config{
		Cloud: neutron.SecurityGroupsCredential, File: cloud.CloudsYAML(), Timeout: listTimeout,
	})}
	var err error
	if b.ids, err = cloud.IDs(); err != nil {
		t.Fatal(err)
	}
	if b.network, err = cloud.Networking(t.Context()); err != nil {
		t.Fatal(err)
	}
	group, err := groups.Create(t.Context(), b.network, groups.CreateOpts{Name: "open", ProjectID: b.ids.Project}).Extract()
	if err != nil {
		t.Fatal(err)
	}
	b.open = group.ID
	for _, family := range []neutronrules.RuleEtherType{neutronrules.EtherType4, neutronrules.EtherType6} { // egress is open in a new group
		if err := neutronrules.Create(t.Context(), b.network, neutronrules.CreateOpts{
			SecGroupID: group.ID, ProjectID: b.ids.Project, Direction: neutronrules.DirIngress, EtherType: family,
		}).Err; err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// apply gives the groups of a plan to the servers, and waits until the engine judges by them. It repeats that, as the controller
// does, because SQLite refuses some of two writes at the same time.
func (b *bench) apply(t *testing.T, plan rules.Plan) {
	t.Helper()
	await.NoError(t, "groups of the plan", func() error {
		refused, err := b.groups.Apply(t.Context(), "cluster-1", plan)
		if err == nil && len(refused)+len(plan.Faults) > 0 {
			err = fmt.Errorf("refused %v, faults %v", refused, plan.Faults)
		}
		return err
	})
	if err := b.cloud.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// groupsOf returns the IDs of the groups of a machine's port.
func (b *bench) groupsOf(t *testing.T, m *machine) []string {
	t.Helper()
	p, err := ports.Get(t.Context(), b.network, m.port).Extract()
	if err != nil {
		t.Fatal(err)
	}
	return p.SecurityGroups
}

// machine is a network namespace behind a port of Neutron. It serves its TCP ports.
type machine struct {
	name  string
	space *netlab.Namespace
	port  string // its ID
	addrs []netip.Addr
}

// machine starts a machine with an ID, and connects it.
func (b *bench) machine(t *testing.T, name, id string) *machine {
	t.Helper()
	p, err := ports.Create(t.Context(), b.network, portsbinding.CreateOptsExt{HostID: neutron.Host, CreateOptsBuilder: ports.CreateOpts{
		Name: name, NetworkID: b.ids.Network, ProjectID: b.ids.Project, DeviceID: id, SecurityGroups: &[]string{b.open},
	}}).Extract()
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{name: name, port: p.ID}
	for _, fixed := range p.FixedIPs {
		m.addrs = append(m.addrs, netip.MustParseAddr(fixed.IPAddress))
	}
	slices.SortFunc(m.addrs, netip.Addr.Compare) // IPv4 first
	if m.space, err = netlab.NewNamespace(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.space.Close(); err != nil {
			t.Error(err)
		}
	})
	b.devices++
	device := fmt.Sprintf("port%d", b.devices)
	if err := m.connect(device, p.MACAddress); err != nil {
		t.Fatal(err)
	}
	if err := b.cloud.Plug(t.Context(), p.ID, device); err != nil {
		t.Fatal(err)
	}
	for _, port := range []uint16{sqlPort, adminPort} {
		m.serve(t, port)
	}
	await.NoError(t, "port of "+name, func() error {
		p, err := ports.Get(t.Context(), b.network, m.port).Extract()
		if err == nil && p.Status != "ACTIVE" {
			err = fmt.Errorf("it is %s", p.Status)
		}
		return err
	})
	return m
}

// connect joins the machine and this process's network by a pair of devices. The machine's kernel computes the checksums of
// packets, because Open vSwitch's userspace datapath takes them for wrong otherwise.
func (m *machine) connect(device, mac string) error {
	const inside = "eth0"
	hardware, err := net.ParseMAC(mac)
	if err != nil {
		return err
	}
	space, err := os.Open(m.space.Path())
	if err != nil {
		return err
	}
	defer space.Close()
	veth := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: device}, PeerName: inside, PeerHardwareAddr: hardware, PeerNamespace: netlink.NsFd(space.Fd()),
	}
	if err := errors.Join(netlink.LinkAdd(veth), netlink.LinkSetUp(veth), netlab.TxChecksum.Set(device, false)); err != nil {
		return fmt.Errorf("make a device of %s: %w", m.name, err)
	}
	return m.space.Do(func() error {
		link, err := netlink.LinkByName(inside)
		if err != nil {
			return err
		}
		errs := []error{netlab.TxChecksum.Set(inside, false), netlink.LinkSetUp(link)}
		for _, a := range m.addrs {
			bits := map[bool]int{true: 24, false: 64}[a.Is4()]
			errs = append(errs, netlink.AddrAdd(link, &netlink.Addr{
				IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}, Flags: unix.IFA_F_NODAD,
			}))
		}
		return errors.Join(errs...)
	})
}

// serve answers connections at a port with the name of the machine.
func (m *machine) serve(t *testing.T, port uint16) {
	t.Helper()
	if err := m.space.Do(func() error {
		l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		netlab.Answer(t, l, func(c net.Conn) { _, _ = io.WriteString(c, m.name) })
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// reaches connects to a port of another machine and reads the answer.
func (m *machine) reaches(ctx context.Context, to *machine, at netip.AddrPort) error {
	const patience = 2 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var conn net.Conn
	if err := m.space.Do(func() (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, "tcp", at.String())
		return err
	}); err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	said, err := io.ReadAll(conn)
	if err == nil && string(said) != to.name {
		err = fmt.Errorf("%q answers", said)
	}
	return err
}

// judgedWithin is how long awaitReached repeats connections. Settle has waited for the rules before. Open vSwitch 3.1 ends by an
// assertion (conn_update_state) after some thousand connections through its userspace datapath, and then none is answered.
const judgedWithin = 5 * time.Second

// awaitReached waits until each machine reaches the ports of the others that it should reach, and no others.
func (b *bench) awaitReached(t *testing.T, when string, all []*machine, want func(from, to *machine, port uint16) bool) {
	t.Helper()
	begun := time.Now()
	var reached, denied atomic.Int32
	err := await.Poll(t.Context(), judgedWithin, func() error {
		reached.Store(0)
		denied.Store(0)
		var each sync.WaitGroup
		wrong := make(chan error, 2*2*len(all)*len(all)) // ports and families
		for _, c := range connections(all) {
			each.Go(func() {
				err := c.from.reaches(t.Context(), c.to, c.at)
				if err == nil {
					reached.Add(1)
				} else {
					denied.Add(1)
				}
				if (err == nil) != want(c.from, c.to, c.at.Port()) {
					wrong <- fmt.Errorf("%s to %s at %s: %w", c.from.name, c.to.name, c.at, cmp.Or(err, errReached))
				}
			})
		}
		each.Wait()
		close(wrong)
		var errs []error
		for err := range wrong {
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
	if err != nil {
		t.Fatalf("%s: after %s: %v", when, judgedWithin, err)
	}
	t.Logf("%s: %d connections are answered, %d are not, after %s", when, reached.Load(), denied.Load(), time.Since(begun).Round(time.Second/10))
}

// errReached is the error of a connection that should not be answered.
var errReached = errors.New("is answered")

// connection is a connection from a machine to a port of another.
type connection struct {
	from, to *machine
	at       netip.AddrPort
}

// connections returns those between all machines, of both families.
func connections(all []*machine) (list []connection) {
	for _, from := range all {
		for _, to := range all {
			for _, addr := range to.addrs {
				for _, port := range []uint16{sqlPort, adminPort} {
					if from != to {
						list = append(list, connection{from, to, netip.AddrPortFrom(addr, port)})
					}
				}
			}
		}
	}
	return list
}
