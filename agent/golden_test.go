package agent

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/bpf/lb"
	cs "github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

var update = flag.Bool("update", false, "rewrite the maps in testdata/*.txtar with their current content")

// TestGolden runs the whole data flow without a kernel, from Kubernetes objects to the content of the maps. Each
// testdata/*.txtar has a script before its first file:
//
//	apply FILE...    create the objects of these files
//	delete FILE...   delete them
//	replace OLD NEW  replace the objects of one file by those of another, in one step
//	topology CLUSTER NODE ZONE [region=REGION] [spans] [regions-span] [RANGE...] [own=RANGE...]
//	                 set the node's topology; with "spans", zones span clusters, with "regions-span" regions do; "own" are the
//	                 cluster's own addresses
//	drain CLUSTER... drain these members, and no others
//	restart          start a new agent on the same maps
//	writes N         assert the number of map writes of the last command
//	maps FILE        assert the content of the maps
//	problems FILE    assert the Problems
//	any-order        assert that every order of arrival of the objects leads to the same content, except for numbers
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			a, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			s := &script{T: t, archive: a, fake: datapath.NewFake(withRanges())}
			s.agent = mustNew(t, s.fake)
			for i, line := range strings.Split(string(a.Comment), "\n") {
				if f := strings.Fields(line); len(f) > 0 && !strings.HasPrefix(f[0], "#") {
					s.run(fmt.Sprintf("%s:%d", file, i+1), f[0], f[1:])
				}
			}
			if *update {
				if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// script is one run of a txtar.
type script struct {
	*testing.T
	archive  *txtar.Archive
	fake     *datapath.Fake
	agent    *Agent
	applied  []string // files, in their order
	topology Topology
	before   uint64 // writes before the last command that may write
}

func (s *script) run(where, command string, args []string) {
	s.Helper()
	switch command {
	case "apply":
		s.applied = append(s.applied, args...)
		s.sync()
	case "delete":
		s.applied = slices.DeleteFunc(s.applied, func(f string) bool { return slices.Contains(args, f) })
		s.sync()
	case "replace":
		s.applied[slices.Index(s.applied, args[0])] = args[1]
		s.sync()
	case "topology":
		s.topology = Topology{Node: lb.Node{Cluster: cs.ClusterID(args[0]), Name: args[1], Zone: args[2]}}
		for _, a := range args[3:] {
			if a == "spans" {
				s.topology.ZonesSpanClusters = true
				continue
			}
			if region, is := strings.CutPrefix(a, "region="); is {
				s.topology.Node.Region = region
				continue
			}
			if a == "regions-span" {
				s.topology.RegionsSpanClusters = true
				continue
			}
			if own, is := strings.CutPrefix(a, "own="); is {
				s.topology.Own = append(s.topology.Own, lb.Own{Prefix: netip.MustParsePrefix(own), Use: "Services"})
				continue
			}
			s.topology.Ranges = append(s.topology.Ranges, netip.MustParsePrefix(a))
		}
		s.before = s.fake.Writes()
		if err := s.agent.SetTopology(s.Context(), s.topology); err != nil {
			s.Fatalf("%s: %v", where, err)
		}
	case "drain":
		drained := map[cs.ClusterID]bool{}
		for _, a := range args {
			drained[cs.ClusterID(a)] = true
		}
		s.before = s.fake.Writes()
		if err := s.agent.drain(s.Context(), drained); err != nil {
			s.Fatalf("%s: %v", where, err)
		}
	case "restart":
		s.agent = s.newAgent(s.fake)
		s.sync()
	case "writes":
		if have := s.fake.Writes() - s.before; strconv.FormatUint(have, 10) != args[0] {
			s.Errorf("%s: %d writes, want %s", where, have, args[0])
		}
	case "maps":
		s.compare(where, args[0], text(s.T, s.fake))
	case "problems":
		var lines strings.Builder
		for _, p := range s.agent.Status().Problems {
			fmt.Fprintln(&lines, p)
		}
		s.compare(where, args[0], lines.String())
	case "any-order":
		s.anyOrder(where)
	default:
		s.Fatalf("%s: unknown command %q", where, command)
	}
}

// newAgent returns an agent with the topology of the last one.
func (s *script) newAgent(f *datapath.Fake) *Agent {
	s.Helper()
	a, err := newAgent(s.Context(), Config{Topology: s.topology}, f, discard)
	if err != nil {
		s.Fatal(err)
	}
	return a
}

func (s *script) sync() {
	s.Helper()
	s.before = s.fake.Writes()
	mustSync(s.T, s.agent, s.snapshot(s.applied))
}

func (s *script) compare(where, name, have string) {
	s.Helper()
	i := slices.IndexFunc(s.archive.Files, func(f txtar.File) bool { return f.Name == name })
	if i < 0 {
		s.Fatalf("%s: file %s does not exist", where, name)
	}
	if *update {
		s.archive.Files[i].Data = []byte(have)
		return
	}
	if diff := cmp.Diff(string(s.archive.Files[i].Data), have); diff != "" {
		s.Errorf("%s: %s (-want +got):\n%s", where, name, diff)
	}
}

func (s *script) anyOrder(where string) {
	s.Helper()
	want := withoutIDs(text(s.T, s.fake))
	for order := range permutations(s.applied) {
		f := datapath.NewFake(withRanges())
		a := s.newAgent(f)
		for i := range order {
			mustSync(s.T, a, s.snapshot(order[:i+1]))
		}
		if diff := cmp.Diff(want, withoutIDs(text(s.T, f))); diff != "" {
			s.Errorf("%s: after %v (-want +got):\n%s", where, order, diff)
		}
	}
}

// snapshot returns the snapshot that the view would build of the objects in files.
func (s *script) snapshot(files []string) *cs.Snapshot {
	s.Helper()
	snap, members := &cs.Snapshot{}, map[cs.ServiceName][]cs.Slice{}
	for _, f := range s.archive.Files {
		if !slices.Contains(files, f.Name) {
			continue
		}
		for doc := range strings.SplitSeq(string(f.Data), "\n---\n") {
			s.read(f.Name, []byte(doc), snap, members)
		}
	}
	for i := range snap.Services {
		snap.Services[i].Slices = members[snap.Services[i].Service]
	}
	return snap
}

// read adds one object to the snapshot.
func (s *script) read(file string, doc []byte, snap *cs.Snapshot, members map[cs.ServiceName][]cs.Slice) {
	s.Helper()
	var kind struct{ Kind string }
	if err := yaml.Unmarshal(doc, &kind); err != nil {
		s.Fatalf("%s: %v", file, err)
	}
	switch kind.Kind {
	case "ServiceImport":
		var si v1beta1.ServiceImport
		if err := yaml.UnmarshalStrict(doc, &si); err != nil {
			s.Fatalf("%s: %v", file, err)
		}
		imp, err := mcs.Import(&si)
		if err != nil {
			s.Fatalf("%s: %v", file, err)
		}
		snap.Services = append(snap.Services, cs.Service{Import: imp})
	case "EndpointSlice":
		var es discoveryv1.EndpointSlice
		if err := yaml.UnmarshalStrict(doc, &es); err != nil {
			s.Fatalf("%s: %v", file, err)
		}
		slice, name, err := mcs.Slice(&es)
		if err != nil {
			s.Fatalf("%s: %v", file, err)
		}
		members[name] = append(members[name], slice)
	default:
		s.Fatalf("%s: kind %q", file, kind.Kind)
	}
}

var ids = regexp.MustCompile(`id=\d+ `)

// withoutIDs returns the text of a state without its numbers and their order.
func withoutIDs(text string) string {
	lines := strings.Split(ids.ReplaceAllString(text, ""), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// permutations yields s in every order.
func permutations(s []string) func(yield func([]string) bool) {
	return func(yield func([]string) bool) {
		var walk func(k int) bool
		p := slices.Clone(s)
		walk = func(k int) bool {
			if k == len(p) {
				return yield(slices.Clone(p))
			}
			for i := k; i < len(p); i++ {
				p[k], p[i] = p[i], p[k]
				if !walk(k + 1) {
					return false
				}
				p[k], p[i] = p[i], p[k]
			}
			return true
		}
		walk(0)
	}
}
