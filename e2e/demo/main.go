// Demo is the main job of Isthmus on two real clusters: a Service exported from both becomes one VIP
// and one name, which a pod curls. It then kills the agent under the pod, and withdraws one cluster.
//
//	go run ./e2e/demo         # ends with "demo: ok", exit 0; a failing step says which and why
//	go run ./e2e/demo down    # removes it
//
// It lives in a lab called demo. A second demo beside it takes another name: --name demo2, for both.
package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/tools/testbed"
)

//go:embed hello.yaml
var hello string

//go:embed client.yaml
var client string

const (
	service = "hello.demo"
	url     = "http://hello.demo.svc.clusterset.local"
	pins    = "/sys/fs/bpf/isthmus/maps-v4"

	// clientNode is where client.yaml puts the curling pod, in cluster a.
	clientNode = "a2"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	cfg := testbed.Config{Release: true, Progress: os.Stdout}
	flag.StringVar(&cfg.Name, "name", "demo", "the `lab` to use; what already stands there is brought up to date")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "usage: demo [--name LAB] [down]\nexample: go run ./e2e/demo --name demo2\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	var err error
	switch {
	case flag.NArg() == 0:
		err = demo(ctx, cfg)
	case flag.NArg() == 1 && flag.Arg(0) == "down":
		err = testbed.Down(ctx, cfg)
	default:
		err = fmt.Errorf("want no argument, or down, not %q; see --help", flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo: FAILED:", err)
		os.Exit(1)
	}
}

// demo runs all steps. The error says which one failed.
func demo(ctx context.Context, cfg testbed.Config) error {
	tb, err := testbed.Up(ctx, cfg)
	if err != nil {
		return err
	}
	d := &demonstration{tb}
	for _, step := range []struct {
		title string
		run   func(context.Context) error
	}{
		{"deploy hello.demo in both clusters, and a client pod in a", d.deploy},
		{"export hello.demo from both clusters", d.export},
		{"curl " + url + " from the pod in a", d.bothAnswer},
		{"look at the pinned maps of " + clientNode + " with bpftool", d.showMaps},
		{"stop the kubelet of " + clientNode + ", kill its agent, and curl again", d.withoutAgent},
		{"start the kubelet again: the agent comes back and finds its maps", d.reviveAgent},
		{"unexport hello.demo in b: traffic moves to a", d.unexport},
	} {
		tb.Step("%s", step.title)
		if err := step.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.title, err)
		}
	}
	fmt.Fprintln(os.Stdout, "demo: ok")
	return nil
}

type demonstration struct{ *testbed.Testbed }

func (d *demonstration) deploy(ctx context.Context) error {
	for _, member := range testbed.Members() {
		if err := d.Apply(ctx, member, strings.ReplaceAll(hello, "CLUSTER_ID", member)); err != nil {
			return err
		}
	}
	if err := d.Apply(ctx, "a", client); err != nil {
		return err
	}
	for _, member := range testbed.Members() {
		if _, err := d.Kubectl(ctx, member, "rollout", "status", "deployment/hello", "--namespace", "demo", "--timeout", "60s"); err != nil {
			return err
		}
	}
	_, err := d.Kubectl(ctx, "a", "wait", "pod/client", "--namespace", "demo", "--for", "condition=Ready", "--timeout", "60s")
	return err
}

func (d *demonstration) export(ctx context.Context) error {
	for _, member := range testbed.Members() {
		if _, err := d.Isthmusctl(ctx, member, "export", "service", "hello", "--namespace", "demo"); err != nil {
			return err
		}
	}
	return testbed.Eventually(ctx, 30*time.Second, func(ctx context.Context) error {
		said, err := d.Kubectl(ctx, "a", "get", "serviceimport", "hello", "--namespace", "demo",
			"--output", "jsonpath={.spec.ips[*]} of {.status.clusters[*].cluster}")
		if err != nil {
			return err
		}
		ips, clusters, _ := strings.Cut(said, " of ")
		if ips == "" || clusters != "a b" {
			return fmt.Errorf("the ServiceImport has IPs %q of clusters %q", ips, clusters)
		}
		fmt.Fprintf(os.Stdout, "  VIP of %s, the same in every cluster: %s\n", service, ips)
		return nil
	})
}

// curl asks the VIP by name n times from the client pod, one new connection each, and counts the answers
// by cluster. Any failed request is an error.
func (d *demonstration) curl(ctx context.Context, n int) (map[string]int, error) {
	script := fmt.Sprintf("i=0; while [ $i -lt %d ]; do curl -sS --max-time 5 %s || exit 1; i=$((i+1)); done", n, url)
	out, err := d.Exec(ctx, "a", "demo", "client", "sh", "-c", script)
	if err != nil {
		return nil, err
	}
	answers := map[string]int{}
	for line := range strings.Lines(out) {
		for field := range strings.FieldsSeq(line) {
			if cluster, ok := strings.CutPrefix(field, "cluster="); ok {
				answers[cluster]++
			}
		}
	}
	return answers, nil
}

func (d *demonstration) bothAnswer(ctx context.Context) error {
	return testbed.Eventually(ctx, 30*time.Second, func(ctx context.Context) error {
		answers, err := d.curl(ctx, 40)
		if err != nil {
			return err
		}
		if answers["a"] == 0 || answers["b"] == 0 {
			return fmt.Errorf("want answers of a and b, got %v", answers)
		}
		fmt.Fprintf(os.Stdout, "  40 requests: %d answered by pods of a, %d by pods of b\n", answers["a"], answers["b"])
		return nil
	})
}

// showMaps prints what bpftool prints, an entry a line: its own layout takes a screen for each.
func (d *demonstration) showMaps(ctx context.Context) error {
	for _, name := range []string{"frontends", "slots", "backends"} {
		out, err := d.Node(ctx, clientNode, "bpftool", "map", "dump", "pinned", pins+"/"+name)
		if err != nil {
			return err
		}
		var entries []struct{ Key, Value json.RawMessage }
		if err := json.Unmarshal([]byte(out), &entries); err != nil {
			return fmt.Errorf("read what bpftool says of %s: %w", name, err)
		}
		fmt.Fprintf(os.Stdout, "  bpftool map dump pinned %s/%s\n", pins, name)
		for _, e := range entries {
			fmt.Fprintf(os.Stdout, "    %s -> %s\n", compact(e.Key), compact(e.Value))
		}
	}
	return nil
}

// compact is JSON without spaces and lines. What is not JSON stays as it is.
func compact(raw json.RawMessage) string {
	var out bytes.Buffer
	if json.Compact(&out, raw) != nil {
		return string(raw)
	}
	return out.String()
}

func (d *demonstration) withoutAgent(ctx context.Context) error {
	if err := d.KillAgent(ctx, "a", clientNode); err != nil {
		return err
	}
	answers, err := d.curl(ctx, 40)
	if err != nil {
		return fmt.Errorf("with the agent down: %w", err)
	}
	if answers["a"] == 0 || answers["b"] == 0 {
		return fmt.Errorf("with the agent down: want answers of a and b, got %v", answers)
	}
	fmt.Fprintf(os.Stdout, "  no agent on %s, 40 new connections by name: %d to a, %d to b, 0 failed\n", clientNode, answers["a"], answers["b"])
	return nil
}

func (d *demonstration) reviveAgent(ctx context.Context) error {
	if err := d.ReviveAgent(ctx, "a", clientNode); err != nil {
		return err
	}
	said, err := d.AgentStatus(ctx, "a", clientNode)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "  the new agent is ready and has written %d map entries\n", said.Dataplane.Writes)
	return nil
}

func (d *demonstration) unexport(ctx context.Context) error {
	if _, err := d.Isthmusctl(ctx, "b", "unexport", "service", "hello", "--namespace", "demo"); err != nil {
		return err
	}
	return testbed.Eventually(ctx, 30*time.Second, func(ctx context.Context) error {
		answers, err := d.curl(ctx, 40)
		if err != nil {
			return err
		}
		if answers["b"] != 0 {
			return fmt.Errorf("b still answers: %v", answers)
		}
		fmt.Fprintf(os.Stdout, "  40 requests: %d answered by pods of a, none by b\n", answers["a"])
		return nil
	})
}
