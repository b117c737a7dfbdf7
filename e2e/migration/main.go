// Migration moves a ClusterSet of Submariner to Isthmus on three real clusters with the real Lighthouse, and back, by the commands of
// docs/migration-lighthouse.md. Meanwhile a pod of each cluster uses every name ten times a second.
//
//	git clone https://github.com/submariner-io/lighthouse ../lighthouse
//	go run ./e2e/migration --lighthouse ../lighthouse    # ends with "migration: N questions, 0 wrong answers", exit 0
//
// Lighthouse is not a part of this repository. East moves first, goes back, and moves again. West moves second. North runs Lighthouse
// until the last steps. Both brokers are in a cluster of their own.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/tools/documents"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

// clusters are those of the ClusterSet, broker is that of both brokers.
var clusters = []string{"east", "west", "north"}

const broker = "broker"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	m := migration{cfg: testbed.Config{Topology: "east:1 west:1 north:1 broker:1", Progress: os.Stdout}}
	flag.StringVar(&m.lighthouse, "lighthouse", "../lighthouse", "the `folder` of a clone of github.com/submariner-io/lighthouse")
	flag.StringVar(&m.cfg.Name, "name", "migration", "the `lab` to use; it must not exist")
	flag.BoolVar(&m.keep, "keep", false, "leave the lab up")
	flag.DurationVar(&m.pause, "pause", 10*time.Second, "how `long` to go on asking after each step")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "usage: migration [--lighthouse DIR] [--name LAB] [--pause TIME] [--keep]\nexample: go run ./e2e/migration --lighthouse ../lighthouse\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	if err := m.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "migration: FAILED:", err)
		os.Exit(1)
	}
}

// migration is one run.
type migration struct {
	lighthouse string
	cfg        testbed.Config
	keep       bool
	pause      time.Duration

	*testbed.Testbed

	dir       string // where the document's commands run
	doc       []documents.Block
	questions []*question
}

func (m *migration) run(ctx context.Context) (err error) {
	if err := checkClone(m.lighthouse); err != nil {
		return err
	}
	if m.dir, err = os.MkdirTemp("", "isthmus-migration-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(m.dir)) }()
	archives, err := buildLighthouse(ctx, m.lighthouse, m.dir)
	if err != nil {
		return err
	}
	if m.Testbed, err = testbed.Prepare(ctx, m.cfg); err != nil {
		return err
	}
	if !m.keep {
		defer func() { err = errors.Join(err, testbed.Down(context.WithoutCancel(ctx), m.cfg)) }()
	}
	if err := m.Lab.LoadImages(ctx, archives...); err != nil {
		return fmt.Errorf("load Lighthouse's images: %w", err)
	}
	if err := m.prepare(); err != nil {
		return err
	}
	if err := m.routeServices(ctx); err != nil {
		return err
	}
	if err := m.deploySubmariner(ctx); err != nil {
		return err
	}
	return m.ask(ctx, m.steps)
}

// prepare gives the document's commands what they name: kubeconfig files, programs, and the chart.
func (m *migration) prepare() (err error) {
	links := map[string]string{
		"broker.kubeconfig": m.Lab.Kubeconfig(broker),
		"kubectl":           m.Lab.KubectlPath(),
		"isthmusctl":        m.Program("isthmusctl"),
		"helm":              m.Program("helm"),
		"deploy":            filepath.Join(m.Root(), "deploy"),
	}
	for _, c := range clusters {
		links[c+".kubeconfig"] = m.Lab.Kubeconfig(c)
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(m.dir, name)); err != nil {
			return err
		}
	}
	m.doc, err = documents.Read(filepath.Join(m.Root(), "docs", "migration-lighthouse.md"))
	return err
}

// routeServices routes the ClusterIPs of each cluster through its node, as Submariner's gateways do.
func (m *migration) routeServices(ctx context.Context) error {
	m.Step("route the ClusterIPs of each cluster from the others")
	for _, to := range m.Lab.Topology() {
		via := map[bool]netip.Addr{true: to.Nodes[0].IPv4, false: to.Nodes[0].IPv6}
		for _, cidr := range to.ServiceCIDRs() {
			for _, from := range m.Lab.Topology() {
				if from.Name == to.Name {
					continue
				}
				if _, err := m.Node(ctx, from.Nodes[0].Name, "ip", "route", "replace", cidr.String(), "via", via[cidr.Addr().Is4()].String()); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// steps are the document's, in the order in which a reader takes them. The last cluster runs Lighthouse until the others have moved.
func (m *migration) steps(ctx context.Context) error {
	east, west, north := clusters[0], clusters[1], clusters[2]
	const each, addresses = "2. Each cluster", "4. ClusterSetIPs"
	for _, s := range []step{
		{what: "the broker and the bridge", section: "1. The broker and the bridge"},
		{what: "east moves", section: each, cluster: east, last: -1},
		{what: "west moves", section: each, cluster: west},
		{what: "east goes back", section: "Back", cluster: east},
		{what: "east moves again", section: each, cluster: east},
		{what: "north moves", section: each, cluster: north},
		{what: "the end of Lighthouse", section: "3. The end"},
		{what: "the broker has ClusterSetIPs", section: addresses, last: 1, before: m.endNamesOfClusters},
		{what: "east has ClusterSetIPs", section: addresses, cluster: east, first: 1},
		{what: "west has ClusterSetIPs", section: addresses, cluster: west, first: 1},
		{what: "north has ClusterSetIPs", section: addresses, cluster: north, first: 1},
	} {
		if err := m.take(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// step is a section of the document, for a cluster unless that is "".
type step struct {
	what, section, cluster string
	// first and last are the blocks of the section from first to before last, which is counted from the end unless it is positive.
	first, last int
	before      func() // runs first, if there is one
}

// blocks returns the commands of a step.
func (m *migration) blocks(s step) ([]string, error) {
	all := documents.Commands(m.doc, s.section)
	last := s.last
	if last <= 0 {
		last += len(all)
	}
	if s.first >= last || last > len(all) {
		return nil, fmt.Errorf("docs/migration-lighthouse.md has %d blocks of commands in section %q, too few", len(all), s.section)
	}
	return all[s.first:last], nil
}

// take runs the commands of a step.
func (m *migration) take(ctx context.Context, s step) error {
	blocks, err := m.blocks(s)
	if err != nil {
		return err
	}
	if s.before != nil {
		s.before()
	}
	what, cluster := s.what, s.cluster
	for i, block := range blocks {
		m.Step("%s: block %d of %d", what, i+1, len(blocks))
		cmd := m.Lab.FabricCommand(ctx, "sh", "-euxc", forLab(block, cluster))
		cmd.Dir = m.dir
		cmd.Env = append(cmd.Environ(), "PATH="+m.dir+string(os.PathListSeparator)+os.Getenv("PATH"))
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stdout
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s: %w in\n%s", what, err, block)
		}
		select {
		case <-time.After(m.pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
