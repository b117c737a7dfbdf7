package kube_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/tools/lab/internal/kube"
	"github.com/isthmus-net/isthmus/tools/lab/internal/supervisor"
	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

var update = flag.Bool("update", false, "rewrite testdata")

// TestPlan compares a complete plan with a golden file, for one cluster with nodes and one without.
func TestPlan(t *testing.T) {
	top, err := topology.Parse(topology.Default)
	if err != nil {
		t.Fatal(err)
	}
	bin := map[string]string{}
	for _, name := range []string{kube.Etcd, kube.APIServer, kube.ControllerManager, kube.Scheduler, kube.Containerd, kube.Kubelet, kube.KubeProxy} {
		bin[name] = "/bin/" + name
	}
	for _, c := range top {
		if c.Name == "b" {
			continue // like cluster a, but with one node
		}
		t.Run(c.Name, func(t *testing.T) {
			p := kube.Plan{Cluster: c, Options: kube.Options{ProxyMode: "nftables", CNI: "ptp"}, Bin: bin, PKI: "/pki"}
			golden(t, c.Name, describe(t, p))
		})
	}
}

func describe(t *testing.T, p kube.Plan) []byte {
	t.Helper()
	texts := map[string]string{
		"store":       commands(p.Store()),
		"controllers": commands(p.Controllers()),
	}
	for _, n := range p.Cluster.Nodes {
		texts[n.Name+"/runtime"] = commands(p.Runtime(n))
		texts[n.Name+"/agents"] = commands(p.Agents(n))
		files, err := p.NodeFiles(n, "pause")
		if err != nil {
			t.Fatal(err)
		}
		for path, text := range files {
			texts[n.Name+"/etc/"+path] = text
		}
	}
	if len(p.Cluster.Nodes) > 0 {
		var err error
		if texts["addons"], err = p.Addons(); err != nil {
			t.Fatal(err)
		}
	}
	var out txtar.Archive
	for name, text := range texts {
		out.Files = append(out.Files, txtar.File{Name: name, Data: []byte(text)})
	}
	sort.Slice(out.Files, func(i, j int) bool { return out.Files[i].Name < out.Files[j].Name })
	return txtar.Format(&out)
}

func commands(components []supervisor.Component) string {
	var out strings.Builder
	for _, c := range components {
		fmt.Fprintf(&out, "%s\n\n", strings.Join(c.Argv, "\n  "))
	}
	return out.String()
}

func golden(t *testing.T, name string, have []byte) {
	t.Helper()
	file := filepath.Join("testdata", name+".txtar")
	if *update {
		if err := os.WriteFile(file, have, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(have)); diff != "" {
		t.Errorf("%s (-want +have); go test -update accepts it:\n%s", file, diff)
	}
}

// With all options, each configuration file is valid TOML, YAML or JSON.
func TestFilesParse(t *testing.T) {
	top, err := topology.Parse("a:4 b:1/ipv6-first c:1/ipv4-only")
	if err != nil {
		t.Fatal(err)
	}
	test := func(c topology.Cluster, cni, mode string) {
		t.Run(c.Name+" "+cni+" "+mode, func(t *testing.T) {
			p := kube.Plan{Cluster: c, Options: kube.Options{ProxyMode: mode, CNI: cni}}
			files, err := p.NodeFiles(c.Nodes[0], "pause")
			if err != nil {
				t.Fatal(err)
			}
			var conflist struct{ Plugins []map[string]any }
			if err := json.Unmarshal([]byte(files["cni/net.d/10-lab.conflist"]), &conflist); err != nil || conflist.Plugins[0]["type"] != cni {
				t.Errorf("CNI configuration: %v, %v", conflist, err)
			}
			var proxy map[string]any
			if err := yaml.Unmarshal([]byte(files["kubernetes/kube-proxy.yaml"]), &proxy); err != nil || proxy["mode"] != mode {
				t.Errorf("kube-proxy configuration: %v, %v", proxy, err)
			}
			addons, err := p.Addons()
			if err != nil {
				t.Fatal(err)
			}
			for object := range strings.SplitSeq(addons, "\n---\n") {
				if err := yaml.Unmarshal([]byte(object), &map[string]any{}); err != nil {
					t.Errorf("%v in\n%s", err, object)
				}
			}
			if strings.Contains(addons, "clusterset.local:") {
				t.Error("the Corefile has a block for clusterset.local, which isthmusctl dns install adds")
			}
		})
	}
	for _, cni := range kube.CNIs {
		for _, mode := range kube.ProxyModes {
			for _, c := range top {
				test(c, cni, mode)
			}
		}
	}
}
