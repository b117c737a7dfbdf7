package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"

	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/compile"
	"github.com/isthmus-net/isthmus/tools/documents"
)

// docs/gateway-operation.md has the output of gateway show and gateway explain that TestAgainstAPIServer compares.
func TestGatewayDocs(t *testing.T) {
	page, err := os.ReadFile("../../docs/gateway-operation.md")
	if err != nil {
		t.Fatal(err)
	}
	script, err := txtar.ParseFile("testdata/server/gateway_explain.txtar")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"show.txt", "web.txt", "late.txt"} {
		i := slices.IndexFunc(script.Files, func(f txtar.File) bool { return f.Name == name })
		if i < 0 {
			t.Fatalf("the script has no %s", name)
		}
		if !strings.Contains(string(page), "\n"+string(script.Files[i].Data)+"```") {
			t.Errorf("docs/gateway-operation.md does not have the output in %s:\n%s", name, script.Files[i].Data)
		}
	}
}

// elsewhere are commands of the pages of gateways that run on other machines than an administrator's, by heading, with the test that runs
// them, or the reason why none does.
var elsewhere = map[string]string{
	"A virtual machine": "TestMachineByItsPage in e2e/gateways",
	"Operate gateways":  "TestMachineByItsPage in e2e/gateways",
	"Drills":            "TestMachineByItsPage in e2e/gateways",
	"BGP to a router":   "TestWayBackByItsPage in e2e/gateways",
	"Restarts":          "none: it needs OpenStack and the controller's pod; TestNeutron/cycles in tools/neutron sweeps without kubectl",
}

// administration runs an administrator's commands on an API server.
type administration struct {
	t    *testing.T
	dir  string // where they run
	page map[string][]documents.Block
	ran  map[string]bool // headings
}

// run runs the commands below a heading of a page whose lines begin with one of the programs, or all if there are none. The output must
// have some texts.
func (a *administration) run(page, heading string, programs []string, want ...string) {
	a.t.Helper()
	all := documents.Commands(a.page[page], heading)
	if len(all) == 0 {
		a.t.Fatalf("%s has no commands below %q", page, heading)
	}
	a.ran[heading] = true
	for _, text := range all {
		if len(programs) > 0 {
			text = regexp.MustCompile(`(?m)^(` + strings.Join(programs, "|") + `)( .*\\\n)* .*\n`).FindString(text)
		}
		a.shell(text, want...)
	}
}

func (a *administration) shell(text string, want ...string) {
	a.t.Helper()
	cmd := exec.CommandContext(a.t.Context(), "bash", "-euo", "pipefail", "-c", text)
	cmd.Dir = a.dir
	cmd.Env = append(os.Environ(), "KUBECONFIG="+filepath.Join(a.dir, "kubeconfig"), "PATH="+a.dir+":"+os.Getenv("KUBEBUILDER_ASSETS")+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		a.t.Fatalf("%v\n%s\n%s", err, text, out)
	}
	for _, w := range want {
		if !strings.Contains(string(out), w) {
			a.t.Errorf("the output lacks %q:\n%s\n%s", w, text, out)
		}
	}
}

// yaml returns the objects or values that a page shows below a heading.
func (a *administration) yaml(page, heading string) string {
	a.t.Helper()
	i := slices.IndexFunc(a.page[page], func(b documents.Block) bool { return b.Heading == heading && b.Language == "yaml" })
	if i < 0 {
		a.t.Fatalf("%s has no YAML below %q", page, heading)
	}
	return a.page[page][i].Text
}

func (a *administration) write(name, text string) {
	a.t.Helper()
	if err := os.WriteFile(filepath.Join(a.dir, name), []byte(text), 0o700); err != nil {
		a.t.Fatal(err)
	}
}

// newAdministration starts an API server with two nodes. Its commands take Helm and the chart from the repository.
func newAdministration(t *testing.T) *administration {
	t.Helper()
	apitest.Require(t)
	ctx := context.WithoutCancel(t.Context())
	cfg, stop, err := apitest.Empty(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	if err := awaitServiceCIDR(cfg); err != nil {
		t.Fatal(err)
	}
	a := &administration{t: t, dir: t.TempDir(), page: map[string][]documents.Block{}, ran: map[string]bool{}}
	if err := writeKubeconfig(cfg, filepath.Join(a.dir, "kubeconfig")); err != nil {
		t.Fatal(err)
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"gateway-install", "gateway-operation", "gateway"} {
		if a.page[name], err = documents.Read(filepath.Join(root, "docs", name+".md")); err != nil {
			t.Fatal(err)
		}
		for i := range a.page[name] {
			b := &a.page[name][i]
			b.Text = strings.ReplaceAll(b.Text, "oci://registry.example.org/team/charts/isthmus --version 0.1.0", filepath.Join(root, "deploy/helm/isthmus"))
		}
	}
	helm, err := compile.Helm(ctx, root)
	if err != nil {
		t.Fatal(err)
	}
	a.write("helm", "#!/bin/sh\nexec "+helm+" \"$@\"\n")
	for _, node := range []string{"node-1", "node-2"} {
		a.shell("kubectl create -f - <<< '" + `{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "` + node + `"}}` + "'")
	}
	return a
}

// An administrator's commands of the pages of gateways succeed, in the order in which a reader comes to them.
func TestGatewayPages(t *testing.T) {
	a := newAdministration(t)
	a.run("gateway-install", "1. Certificates", nil)
	a.run("gateway-install", "Renewal by the controller", nil)
	a.write("values.yaml", a.yaml("gateway-install", "2. The controller"))
	a.run("gateway-install", "2. The controller", nil, "STATUS: deployed")
	a.run("gateway-install", "A node of the cluster", nil, "node/node-2 tainted", "STATUS: deployed")
	a.shell("kubectl -n isthmus-system get deployment/isthmus-gateway-controller daemonset/isthmus-gateway")
	a.shell("kubectl apply -f - <<'EOF'\n" + a.yaml("gateway-install", "4. GatewayNodes") + "EOF\n")
	a.run("gateway-install", "4. GatewayNodes", nil, "gateway-1", "https://192.0.2.11:9479")
	a.shell("kubectl apply -f - <<'EOF'\n" + a.yaml("gateway-install", "5. A Service") + "EOF\n")
	a.run("gateway-install", "Install gateways", []string{"kubectl"}, "web", "LoadBalancer") // TestGateways in e2e has a client outside

	a.run("gateway", "Edit the settings", nil, "these settings take nothing from any Service")
	a.write("clouds.yaml", "clouds: {NAME: {}}\n")
	a.run("gateway", "Credentials and firewalls", []string{"kubectl create"})
	a.run("gateway", "Credentials and firewalls", []string{"helm upgrade"})

	drills := 0
	page, err := os.ReadFile("../../docs/gateway-operation.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, match := range regexp.MustCompile("`(kubectl [^`]* [^`]*)`").FindAllStringSubmatch(string(page), -1) {
		if strings.Contains(match[1], " -n ") || strings.Contains(match[1], "NAME") {
			drills++
			a.shell(strings.Replace(match[1], "NAME", "gateway-1", 1))
		}
	}
	if drills != 3 {
		t.Errorf("the drills have %d commands of kubectl, want 3", drills)
	}
	for name, page := range a.page {
		for _, b := range page {
			if b.Language == "sh" && !a.ran[b.Heading] && elsewhere[b.Heading] == "" {
				t.Errorf("docs/%s.md: no test runs the commands below %q:\n%s", name, b.Heading, b.Text)
			}
		}
	}
}
