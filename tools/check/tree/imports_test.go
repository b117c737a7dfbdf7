package tree

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/isthmus-net/isthmus/"

// listed is one package as `go list` describes it.
type listed struct {
	ImportPath string
	Dir        string
	Name       string
	Imports    []string // of its non-test files
	Deps       []string // all dependencies of these
	GoFiles    []string
}

// packages returns all packages of the module.
var packages = sync.OnceValues(func() ([]listed, error) {
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Dir,Name,Imports,Deps,GoFiles", module+"...")
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	var all []listed
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
})

// matches reports whether path is one of patterns or lies below one that ends in "/...". A pattern whose first element
// has no dot is relative to the module, or to the standard library after "std:". The pattern "module" stands for all of
// this module, "foreign" for every package outside of it and of the standard library.
func matches(path string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		host, _, _ := strings.Cut(path, "/")
		switch pattern {
		case "module":
			return strings.HasPrefix(path, module)
		case "foreign":
			return strings.Contains(host, ".") && !strings.HasPrefix(path, module)
		}
		host, _, _ = strings.Cut(pattern, "/")
		if std, ok := strings.CutPrefix(pattern, "std:"); ok {
			pattern = std
		} else if !strings.Contains(host, ".") {
			pattern = module + pattern
		}
		if prefix, ok := strings.CutSuffix(pattern, "/..."); ok {
			return path == prefix || strings.HasPrefix(path, prefix+"/")
		}
		return path == pattern
	})
}

// product names every folder whose code users run.
var product = []string{"agent/...", "bpf/...", "cmd/...", "controlplane/...", "dns/...", "gateway/..."}

// rule bans packages from the dependencies of others.
type rule struct {
	who    []string // the packages that the rule binds
	except []string // exceptions from who
	ban    []string
	allow  []string // exceptions from ban
	direct bool     // look at imports alone, not at their dependencies
	why    string
}

var rules = map[string]rule{
	// Layers of the whole.
	"the domain stands alone": {
		who: []string{"controlplane/clusterset/..."}, ban: []string{"foreign", "module"}, allow: []string{"controlplane/clusterset/..."},
		why: "every component speaks its language, so it must cost none of them a dependency; foreign types are translated at its border",
	},
	"agent, dns and gateway know the domain and no other part of the control plane": {
		who: []string{"agent/...", "dns/...", "gateway/...", "bpf/..."}, ban: []string{"controlplane/..."}, allow: []string{"controlplane/clusterset/..."},
		why: "they must work against any MCS implementation, or none; cmd joins them to an API server",
	},
	"agent and dns need no Kubernetes": {
		who: []string{"agent/...", "bpf/...", "dns/..."}, ban: []string{"k8s.io/...", "sigs.k8s.io/..."},
		why: "their only input is a snapshot; a Kubernetes type would tie the dataplane to Kubernetes' releases",
	},
	"agent does not know dns or gateway": {
		who: []string{"agent/..."}, ban: []string{"dns/...", "gateway/..."},
		why: "components meet in cmd; each works without the others",
	},
	"dns does not know agent, bpf or gateway": {
		who: []string{"dns/..."}, ban: []string{"agent/...", "bpf/...", "gateway/..."},
		why: "components meet in cmd; each works without the others",
	},
	"gateway does not know agent or dns": {
		who: []string{"gateway/..."}, ban: []string{"agent/...", "dns/..."},
		why: "components meet in cmd; gateway and agent share bpf/lb and bpf/datapath",
	},
	"the control plane does not know the components": {
		who: []string{"controlplane/..."}, ban: []string{"agent/...", "bpf/...", "dns/...", "gateway/...", "cmd/..."},
		why: "dependencies point inwards",
	},
	"the product does not carry its tools": {
		who: product, ban: []string{"tools/...", "e2e/..."},
		why: "the programs that users run must not depend on how we build and test them",
	},
	"rigs stand below the scenarios": {
		who: []string{"tools/..."}, ban: []string{"e2e/..."},
		why: "labs, clouds and gateways under test are tools that scenarios, demos and benchmarks share; nothing uses a scenario",
	},
	"mains are wiring": {
		who: []string{"agent/...", "bpf/...", "controlplane/...", "dns/...", "gateway/...", "tools/...", "e2e/..."},
		ban: []string{"cmd/..."},
		why: "flags and wiring stand in cmd; code for several callers is a library",
	},
	"libraries do not parse flags": {
		who: []string{"agent/...", "bpf/...", "controlplane/...", "dns/...", "gateway/..."},
		ban: []string{"github.com/spf13/cobra", "std:flag"}, direct: true,
		why: "a component is configured by its Config; main alone reads flags and environment",
	},

	// Layers of the control plane.
	"view knows the API and the domain alone": {
		who: []string{"controlplane/view"}, ban: []string{"controlplane/..."},
		allow: []string{"controlplane/api/...", "controlplane/clusterset/...", "controlplane/mcs"},
		why:   "every agent runs it, against the objects of any MCS implementation",
	},
	"translation knows the API and the domain alone": {
		who: []string{"controlplane/mcs"}, ban: []string{"controlplane/..."}, allow: []string{"controlplane/api/...", "controlplane/clusterset/..."},
		why: "both control planes, the agent and the tests translate with it",
	},
	"translation has no client": {
		who: []string{"controlplane/mcs"}, ban: []string{"k8s.io/client-go/...", "sigs.k8s.io/controller-runtime/..."}, direct: true,
		why: "mcs turns types into types; other packages read and write objects",
	},
	"kinds know the domain alone": {
		who: []string{"controlplane/api/..."}, ban: []string{"controlplane/..."}, allow: []string{"controlplane/api/...", "controlplane/clusterset/..."},
		why: "clients outside of this repository import them",
	},
	"shared writers know neither control plane": {
		who: []string{"controlplane/internal/..."}, ban: []string{"controlplane/..."},
		allow: []string{"controlplane/api/...", "controlplane/clusterset/...", "controlplane/internal/...", "controlplane/mcs"},
		why:   "broker, federation and workloads read and write with the same caches and writers, which must fit all of them",
	},
	"the broker's controller does not know the others": {
		who: []string{"controlplane/broker/..."}, ban: []string{"controlplane/federation/...", "controlplane/workloads/...", "controlplane/view"},
		why: "a member of a ClusterSet runs without a Federation; shared code stands in controlplane/internal",
	},
	"federation does not know the others": {
		who: []string{"controlplane/federation/..."}, ban: []string{"controlplane/broker/...", "controlplane/workloads/...", "controlplane/view"},
		why: "a Federation runs without a broker; shared code stands in controlplane/internal",
	},
	"workloads do not know the others": {
		who: []string{"controlplane/workloads/..."}, ban: []string{"controlplane/broker/...", "controlplane/federation/...", "controlplane/view"},
		why: "Services of machines outside of the clusters work without a broker and without a Federation",
	},
	"the broker's steps point inwards": {
		who: []string{"controlplane/broker/internal/..."}, ban: []string{"controlplane/broker", "controlplane/broker/membership"},
		why: "the controller joins the steps; a step knows only those before it",
	},
	"exports do not know the broker's client": {
		who: []string{"controlplane/broker/internal/export"}, ban: []string{"controlplane/broker/internal/..."},
		allow: []string{"controlplane/broker/internal/export/...", "controlplane/broker/internal/propagation", "controlplane/broker/internal/quota", "controlplane/broker/internal/statement"},
		why:   "export turns a Service into a record; the controller hands the record to client",
	},
	"the broker's client does not know its callers": {
		who: []string{"controlplane/broker/internal/client"}, ban: []string{"controlplane/broker/internal/..."},
		allow: []string{"controlplane/broker/internal/client/...", "controlplane/broker/internal/propagation", "controlplane/broker/internal/quota", "controlplane/broker/internal/statement"},
		why:   "a record travels export -> client -> imports",
	},
	"quotas stand alone": {
		who: []string{"controlplane/broker/internal/quota"}, ban: []string{"controlplane/broker/internal/..."},
		allow: []string{"controlplane/broker/internal/quota/..."},
		why:   "every member and isthmusctl judge alike, from what is on the broker",
	},
	"statements stand alone": {
		who: []string{"controlplane/broker/internal/statement"}, ban: []string{"controlplane/broker/internal/..."},
		allow: []string{"controlplane/broker/internal/statement/..."},
		why:   "exporters make statements and importers compare them, each from what it has",
	},
	"the quota controller knows quotas alone": {
		who: []string{"controlplane/broker/quotacontroller"}, ban: []string{"controlplane/broker/..."},
		allow: []string{"controlplane/broker/quotacontroller/...", "controlplane/broker/internal/quota"},
		why:   "it runs beside the broker, without a member's caches and writers",
	},
	"liveness stands alone": {
		who: []string{"controlplane/internal/liveness"}, ban: []string{"controlplane/broker/...", "controlplane/federation/..."},
		why: "evidence of dead members is judged without regard to their exports",
	},
	"reconcilers of a federation write through its engine": {
		who: []string{"controlplane/federation/reconcile", "controlplane/federation/policies", "controlplane/federation/services/..."},
		ban: []string{"controlplane/federation/internal/...", "controlplane/federation/engine", "controlplane/internal/kube/admin", "controlplane/internal/kube/apply"},
		why: "every write of a leader carries its epoch; a reconciler with a writer of its own could write after its term",
	},
	"a federation's engine does not know its reconcilers": {
		who: []string{"controlplane/federation/engine", "controlplane/federation/reconcile", "controlplane/federation/internal/..."},
		ban: []string{"controlplane/federation/services/...", "controlplane/federation/policies", "controlplane/federation/bootstrap", "controlplane/federation"},
		why: "another reconciler is one new package and one line of controlplane/federation",
	},

	// Layers of a gateway.
	"the gateway's agent does not know announcers or balancers": {
		who: []string{"gateway/agent"}, ban: []string{"gateway/..."}, allow: []string{"gateway/certs", "gateway/desired", "gateway/flows"},
		why: "a third announcer is one new package and one line of wiring in cmd",
	},
	"announcers and balancers do not know each other": {
		who: []string{"gateway/bgp", "gateway/ebpf", "gateway/nft", "gateway/vrrp"}, ban: []string{"gateway/..."},
		allow: []string{"gateway/certs", "gateway/desired", "gateway/flows"},
		why:   "a gateway runs any one of each kind",
	},

	// Pure packages.
	"balancing is pure": {
		who: []string{"bpf/lb"}, ban: []string{"github.com/cilium/ebpf/...", "github.com/vishvananda/...", "bpf/datapath", "std:net", "std:os"}, direct: true,
		why: "property tests prove the plans of a Planner, and need functions without a kernel behind them",
	},
	"zones are pure": {
		who: []string{"dns/internal/zone"}, ban: []string{"std:net", "std:os", "std:time", "github.com/miekg/..."}, direct: true,
		why: "the records of a name are decided without sockets, clocks or a DNS library, and tested as lines of a zone file",
	},

	// Foreign libraries.
	"cilium/ebpf stops at the datapath": {
		who: product, except: []string{"bpf", "bpf/datapath/...", "gateway/ebpf"}, ban: []string{"github.com/cilium/ebpf/..."}, direct: true,
		why: "map layouts and generated types have one reader, so a changed ABI has one place to change",
	},
	"miekg/dns stops at the server": {
		who: product, except: []string{"dns/internal/server"}, ban: []string{"github.com/miekg/dns"}, direct: true,
		why: "another library may replace it on the hot path; the zone must not notice",
	},
	"gobgp stops at the speaker": {
		who: product, except: []string{"gateway/bgp"}, ban: []string{"github.com/osrg/gobgp/..."}, direct: true,
		why: "its types change with its majors, and another speaker may take its place",
	},
	"gophercloud stops at the clouds' adapters": {
		who: product,
		except: []string{
			"controlplane/workloads/nova", "controlplane/workloads/octavia", "controlplane/workloads/neutron", "controlplane/workloads/neutron/neutrontest",
			"controlplane/workloads/internal/openstack", "gateway/openstack",
		},
		ban: []string{"github.com/gophercloud/gophercloud/..."}, direct: true,
		why: "nova and octavia read machines and load balancers, neutron writes security groups, gateway/openstack manages addresses; the rest must work with any cloud",
	},
	"clients stay at the edge": {
		who: product,
		except: []string{
			"cmd/...", "controlplane/broker/...", "controlplane/view", "controlplane/internal/...", "controlplane/federation/...",
			"controlplane/workloads/...", "gateway/controller", "gateway/api/...",
			"controlplane/api/...", // its scheme
		},
		ban: []string{"k8s.io/client-go/...", "sigs.k8s.io/controller-runtime/..."}, direct: true,
		why: "a package without a client can be tested without an API server",
	},
}

// patterns returns all patterns of r.
func (r rule) patterns() []string { return slices.Concat(r.who, r.except, r.ban, r.allow) }

func TestImports(t *testing.T) {
	t.Parallel()
	all, err := packages()
	if err != nil {
		t.Fatalf("list packages: %v", err)
	}
	for name, r := range rules {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, p := range all {
				if !matches(p.ImportPath, r.who) || matches(p.ImportPath, r.except) {
					continue
				}
				imports := p.Deps
				if r.direct {
					imports = p.Imports
				}
				banned := slices.DeleteFunc(slices.Clone(imports), func(dep string) bool {
					return dep == p.ImportPath || !matches(dep, r.ban) || matches(dep, r.allow)
				})
				if len(banned) > 0 {
					t.Errorf("%s must not depend on %s, but imports %s: %s", p.ImportPath, banned[0], through(all, p, banned[0]), r.why)
				}
			}
		})
	}
}

// A pattern that matches nothing is a typo, or names a package that has moved.
func TestRulesNamePackages(t *testing.T) {
	t.Parallel()
	all, err := packages()
	if err != nil {
		t.Fatalf("list packages: %v", err)
	}
	var paths []string
	for _, p := range all {
		paths = append(append(paths, p.ImportPath), p.Deps...)
	}
	slices.Sort(paths)
	for name, unmatched := range unmatched(rules, slices.Compact(paths)) {
		t.Errorf("rule %q: no package matches %q", name, unmatched)
	}
}

// unmatched returns the patterns that match none of paths, by the name of their rule.
func unmatched(rules map[string]rule, paths []string) map[string][]string {
	found := map[string][]string{}
	for name, r := range rules {
		for _, pattern := range r.patterns() {
			if !slices.ContainsFunc(paths, func(path string) bool { return matches(path, []string{pattern}) }) {
				found[name] = append(found[name], pattern)
			}
		}
	}
	return found
}

func TestUnmatched(t *testing.T) {
	t.Parallel()
	have := unmatched(map[string]rule{
		"good":  {who: []string{"dns/..."}, ban: []string{"foreign", "std:net"}},
		"moved": {who: []string{"dns"}, except: []string{"dns/zone"}, ban: []string{"example.org/old/..."}, allow: []string{"module"}},
	}, []string{module + "dns", module + "dns/internal/zone", "example.org/new", "net"})
	if want := []string{"dns/zone", "example.org/old/..."}; len(have) != 1 || !slices.Equal(have["moved"], want) {
		t.Errorf("unmatched: %v, want %v of moved", have, want)
	}
}

// through returns the import of p that leads to dep.
func through(all []listed, p listed, dep string) string {
	for _, q := range all {
		if slices.Contains(p.Imports, q.ImportPath) && slices.Contains(q.Deps, dep) {
			return q.ImportPath
		}
	}
	return dep
}

func TestMatches(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		path, pattern string
		want          bool
	}{
		"ours":                     {module + "dns", "dns", true},
		"below ours":               {module + "dns/internal/zone", "dns/...", true},
		"the folder itself":        {module + "dns", "dns/...", true},
		"same letters":             {module + "dnsx", "dns/...", false},
		"below, without the dots":  {module + "dns/internal/zone", "dns", false},
		"foreign":                  {"k8s.io/client-go/rest", "k8s.io/client-go/...", true},
		"standard library":         {"net", "std:net", true},
		"below it":                 {"net/netip", "std:net", false},
		"a name of ours elsewhere": {"example.org/dns", "dns", false},
		"all of ours":              {module + "dns", "module", true},
		"theirs is not ours":       {"example.org/dns", "module", false},
		"any foreign one":          {"example.org/dns", "foreign", true},
		"ours is not foreign":      {module + "dns", "foreign", false},
		"nor the standard library": {"net/netip", "foreign", false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if have := matches(tc.path, []string{tc.pattern}); have != tc.want {
				t.Errorf("matches(%q, %q) = %t", tc.path, tc.pattern, have)
			}
		})
	}
}
