package gateways_test

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/documents"
	"github.com/isthmus-net/isthmus/tools/netlab"
	"github.com/isthmus-net/isthmus/tools/netlab/frr"
)

// standIn does what systemd does with the unit of a gateway, without its restarts and its sandbox.
const standIn = `#!/bin/bash
[ "$*" = "enable --now isthmus-gateway" ] || exit 0
unit=/etc/systemd/system/isthmus-gateway.service
mkdir -m 700 /var/lib/isthmus-gateway /run/isthmus-gateway
. <(sed 's/=\(.*\)/="\1"/' /etc/default/isthmus-gateway)
sed -n 's/^ExecStartPre=[+-]*//p' "$unit" | sed 's/\$\$/$/g' | sh
eval "exec setsid $(sed -n 's/^ExecStart=//p' "$unit")" >FOLDER/log 2>&1 </dev/null &
echo $! >FOLDER/pid
`

// machine is the machine of a gateway or a router: a network namespace, and for a gateway a copy of what it writes outside of its folder.
type machine struct {
	*netlab.Namespace
	t      *testing.T
	folder string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	netlab.Privileged(t)
	ns, err := netlab.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ns.Close(); err != nil {
			t.Error(err)
		}
	})
	return &machine{ns, t, t.TempDir()}
}

// program gives the machine a program of this text.
func (m *machine) program(name, text string) {
	m.t.Helper()
	path := filepath.Join(m.folder, "programs", name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(text, "FOLDER", m.folder)), 0o700); err != nil {
		m.t.Fatal(err)
	}
}

// run runs commands in a folder of the machine, and returns their output.
func (m *machine) run(folder, commands string) string {
	m.t.Helper()
	cmd := exec.CommandContext(m.t.Context(), "nsenter", "--net="+m.Path(), "bash", "-euo", "pipefail", "-c", commands)
	cmd.Dir = filepath.Join(m.folder, folder)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Join(m.folder, "programs")+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		m.t.Fatalf("%v\n%s\n%s", err, commands, out)
	}
	return string(out)
}

// commands returns the only commands below a heading of a page.
func commands(t *testing.T, page, heading string) string {
	t.Helper()
	blocks, err := documents.Read(filepath.Join("../../docs", page))
	if err != nil {
		t.Fatal(err)
	}
	all := documents.Commands(blocks, heading)
	if len(all) != 1 {
		t.Fatalf("%s has %d blocks of commands below %q, want one", page, len(all), heading)
	}
	return all[0]
}

// The commands of docs/gateway-install.md install a gateway on a machine, which then answers to the commands of docs/gateway-operation.md.
func TestMachineByItsPage(t *testing.T) {
	m := newMachine(t)
	own := filepath.Join(m.folder, "certs")
	if _, err := (certs.Folder{Path: own}).Update(certs.Order{Identities: []string{certs.Controller, "gateway-1"}, Life: time.Hour}, time.Now()); err != nil {
		t.Fatal(err)
	}
	m.program("systemctl", standIn)
	m.program("apt-get", "#!/bin/sh\n")
	address := netip.MustParseAddr("192.0.2.11")
	if err := m.Own(address); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if text, err := os.ReadFile(filepath.Join(m.folder, "pid")); err == nil {
			if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	// The machine has the archive of a release (see tools/release), and what scp copies.
	m.run(".", fmt.Sprintf("tar -czf isthmus-gateway-linux-amd64.tar.gz -C %s isthmus-gateway -C %s/deploy/systemd isthmus-gateway.service -C %s LICENSE && cp -r certs/gateway-1 .", programs, root, root))
	private := fmt.Sprintf("cp -a /etc %[1]s/etc && mount --bind %[1]s/etc /etc && for d in /usr/local/bin /var/lib /run; do mount -t tmpfs isthmus $d; done\n", m.folder)
	install := filepath.Join(m.folder, "install")
	if err := os.WriteFile(install, []byte(private+commands(t, "gateway-install.md", "A virtual machine")), 0o600); err != nil {
		t.Fatal(err)
	}
	m.run(".", "unshare --mount bash -eux "+install)

	asking := strings.NewReplacer("NAME", "gateway-1", "PORT", fmt.Sprint(agentPort), "ADDRESS", address.String()).Replace(commands(t, "gateway-operation.md", "Drills"))
	var said string
	await.True(t, "the gateway answers", func() bool {
		cmd := "cd certs/" + certs.Controller + " && { " + strings.TrimSpace(asking) + " || true; }"
		said = m.run(".", cmd)
		return said != ""
	})
	if !strings.Contains(said, `"generation"`) {
		log, _ := os.ReadFile(filepath.Join(m.folder, "log"))
		t.Errorf("the gateway says %s\n%s", said, log)
	}

	// A client that asks again and again, here another server of the machine.
	server := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Second}
	if err := m.Do(func() error {
		l, err := net.Listen("tcp", net.JoinHostPort(address.String(), "80"))
		if err == nil {
			go func() { _ = server.Serve(l) }() // a failure also fails at the client
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	loop := strings.Replace(commands(t, "gateway-operation.md", "Operate gateways"), "VIP", address.String(), 1)
	said = m.run(".", "timeout 1 bash -c "+quote(loop)+" || true")
	lines := strings.Fields(said)
	if len(lines) < 3 || strings.Count(said, "404\n") != len(lines) {
		t.Errorf("the loop prints %q", lines[:min(5, len(lines))])
	}
}

// quote makes one word of text for a shell.
func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

// The router's commands of docs/gateway-operation.md lead replies to clients through the gateway that has the VIP, and drop them when none
// has.
func TestWayBackByItsPage(t *testing.T) {
	m := newMachine(t)
	m.run(".", "ip link add eth2 type veth peer name backends && ip link set eth2 up && ip link set backends up && ip address add 10.96.0.1/24 dev eth2")
	router, err := frr.Start(t.Context(), m.Namespace, frr.Config{
		ASN: routerASN, RouterID: netip.MustParseAddr("10.96.0.1"),
		Followers: []frr.Follower{{To: netip.MustParsePrefix("10.97.0.0/24"), VIP: netip.MustParseAddr("203.0.113.99"), Table: wayBack - 1}}, // staticd runs
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := router.Close(); err != nil {
			t.Error(err)
		}
	})
	m.program("vtysh", "#!/bin/sh\nexec /usr/bin/vtysh --vty_socket "+router.Sockets()+" \"$@\"\n")
	m.run(".", commands(t, "gateway-operation.md", "BGP to a router"))
	if rules := m.run(".", "ip rule"); !strings.Contains(rules, "iif eth2 lookup 100") {
		t.Errorf("rules:\n%s", rules)
	}
	leads := func(want string) {
		t.Helper()
		await.NoError(t, want, func() error {
			if routes := m.run(".", "ip route show table 100 || true"); !strings.Contains(routes, want) {
				return fmt.Errorf("table 100 has\n%s", routes)
			}
			return nil
		})
	}
	leads("blackhole 10.98.0.0/24")
	m.run(".", "vtysh -c 'configure' -c 'ip route 203.0.113.10/32 10.96.0.9'") // as a gateway announces it
	leads("via 10.96.0.9")
}
