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

// listed is what `go list` says about one package.
type listed struct {
	ImportPath string
	Dir        string
	Name       string
	Imports    []string // of its non-test files
	Deps       []string // everything that they need
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

// matches reports whether path is one of patterns or lies below one that ends in "/...". A pattern whose
// first element has no dot is relative to the module, or to the standard library after "std:".
func matches(path string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		host, _, _ := strings.Cut(pattern, "/")
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

// product is every folder whose code is part of what users run.
var product = []string{"agent/...", "bpf/...", "cmd/...", "controlplane/...", "dns/...", "gateway/..."}

// rule bans packages from the dependencies of others.
type rule struct {
	who    []string // the packages that are bound
	except []string // those that are not
	ban    []string
	allow  []string // exceptions from ban
	direct bool     // look at imports alone, not at what these need in turn
	why    string
}

var rules = map[string]rule{
	"the domain stands alone": {
		who: []string{"controlplane/clusterset/..."}, ban: []string{"k8s.io/...", "sigs.k8s.io/...", "github.com/...", "golang.org/..."},
		why: "everybody speaks its language, so it must cost nobody a dependency; foreign types are translated at its border",
	},
	"agent, dns and gateway know the domain and no other control plane": {
		who: []string{"agent/...", "dns/...", "gateway", "gateway/internal/announce", "bpf/..."},
		// clusterset/signal is standard library only: one way to wake a goroutine for all components.
		ban: []string{"controlplane/..."}, allow: []string{"controlplane/clusterset", "controlplane/clusterset/signal"},
		why: "they must work against any MCS implementation, or none; cmd joins them to the world",
	},
	"agent needs no Kubernetes": {
		who: []string{"agent/...", "bpf/...", "dns/..."}, ban: []string{"k8s.io/...", "sigs.k8s.io/..."},
		why: "a snapshot is all they take; a Kubernetes type in here would tie the dataplane to its releases",
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
		why: "components meet in cmd; what it shares with the agent stands in bpf/lb and bpf/datapath",
	},
	"the control plane does not know the components": {
		who: []string{"controlplane/..."}, ban: []string{"agent/...", "bpf/...", "dns/...", "gateway/...", "cmd/..."},
		why: "dependencies point inwards",
	},
	"balancing is pure": {
		who: []string{"bpf/lb"}, ban: []string{"github.com/cilium/ebpf/...", "github.com/vishvananda/...", "bpf/datapath", "std:net", "std:os"}, direct: true,
		why: "Build and Diff are proved by property tests, which need functions without a kernel behind them",
	},
	"cilium/ebpf stops at the datapath": {
		who: product, except: []string{"bpf", "bpf/datapath/...", "gateway/ebpf"}, ban: []string{"github.com/cilium/ebpf/..."}, direct: true,
		why: "map layouts and generated types have one reader, so a changed ABI has one place to change",
	},
	"miekg/dns stops at the server": {
		who: product, except: []string{"dns/internal/server"}, ban: []string{"github.com/miekg/dns"}, direct: true,
		why: "the library will be replaced on the hot path; the zone must not notice",
	},
	"gobgp stops at the speaker": {
		who: product, except: []string{"gateway/bgp"}, ban: []string{"github.com/osrg/gobgp/..."}, direct: true,
		why: "its types change with its majors, and another speaker may take its place",
	},
	"zones are pure": {
		who: []string{"dns/internal/zone"}, ban: []string{"std:net", "std:os", "std:time", "github.com/miekg/..."}, direct: true,
		why: "what a name answers is decided without sockets, clocks or a DNS library, and tested as zone-file lines",
	},
	"translation has no client": {
		who: []string{"controlplane/mcs"}, ban: []string{"k8s.io/client-go/...", "sigs.k8s.io/controller-runtime/..."}, direct: true,
		why: "mcs turns types into types; whoever reads or writes objects does so elsewhere",
	},
	"clients stay at the edge": {
		who: product,
		except: []string{
			"cmd/...", "controlplane/broker/...", "controlplane/view", "controlplane/internal/...", "controlplane/federation/...", "gateway/controller", "gateway/api/...",
			"controlplane/api/...", // its scheme
		},
		ban: []string{"k8s.io/client-go/...", "sigs.k8s.io/controller-runtime/..."}, direct: true,
		why: "a package without a client can be tested without an API server",
	},
	"the product does not carry its tools": {
		who: product, ban: []string{"tools/...", "e2e/..."},
		why: "what users run must not depend on how we build and test it",
	},
	"rigs stand below the scenarios": {
		who: []string{"tools/..."}, ban: []string{"e2e/..."},
		why: "labs, clouds and gateways under test are tools that scenarios, demos and benchmarks share; a scenario is used by nobody",
	},
	"mains are wiring": {
		who: []string{"agent/...", "bpf/...", "controlplane/...", "dns/...", "gateway/...", "tools/...", "e2e/..."},
		ban: []string{"cmd/..."}, allow: []string{"cmd/internal/..."},
		why: "flags and wiring stand in cmd; whatever else wants to be used is a library",
	},
	"libraries do not parse flags": {
		who: []string{"agent/...", "bpf/...", "controlplane/...", "dns/...", "gateway/..."},
		ban: []string{"github.com/spf13/cobra", "std:flag"}, direct: true,
		why: "a component is configured by its Config; main alone reads flags and environment",
	},
}

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

// through returns the import of p that brings dep along.
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
