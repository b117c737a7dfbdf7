// Command gateway demonstrates the gateways on a real cluster with a real Neutron: a Service gets a floating IP, which a
// client behind a router curls. Then the gateway with the traffic dies, during a download and many short connections.
//
//	go run ./e2e/demo/gateway         # ends with "demo-gateway: ok", exit 0; a failing step says which and why
//	go run ./e2e/demo/gateway down    # removes the cluster, which the demo leaves; it removes the rest itself
//
// This Neutron has no agents to translate floating IPs. The lab's router does it instead, from what it reads from
// Neutron, and refuses addresses without an allowed address pair.
package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/gateways"
	"github.com/isthmus-net/isthmus/tools/lab/cluster"
	"github.com/isthmus-net/isthmus/tools/testbed"
)

//go:embed web.yaml
var web string

const (
	// download is the duration of the client's download, and death the time within it at which the gateway dies.
	download = 60 * time.Second
	death    = 20 * time.Second
	// rate is the number of short connections per second.
	rate = 200
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	name := flag.String("name", "gateway", "the `lab` to use; what already stands there is brought up to date")
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), "usage: gateway [--name LAB] [down]\nexample: go run ./e2e/demo/gateway --name gateway2\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	lab, err := cluster.Open(cluster.Config{Name: *name, Topology: "a:1", Progress: os.Stdout})
	switch {
	case err != nil:
	case flag.NArg() == 0:
		err = demo(ctx, lab)
	case flag.NArg() == 1 && flag.Arg(0) == "down":
		err = lab.Down(ctx)
	default:
		err = fmt.Errorf("want no argument, or down, not %q; see --help", flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo-gateway: FAILED:", err)
		os.Exit(1)
	}
}

// demonstration is a running demo.
type demonstration struct {
	*gateways.Installation

	begin    time.Time
	client   string // program that opens connections
	floating netip.Addr
}

func (d *demonstration) step(format string, args ...any) {
	fmt.Fprintf(os.Stdout, "[%4.0fs] %s\n", time.Since(d.begin).Seconds(), fmt.Sprintf(format, args...))
}

// demo runs all steps. The error names the failed one.
func demo(ctx context.Context, lab *cluster.Lab) (err error) {
	d := &demonstration{begin: time.Now()}
	d.step("a Kubernetes cluster with one node; at the same time, packages, programs and the cloud are prepared")
	dir := filepath.Join(lab.Dir(), "edge")
	cfg := gateways.Config{Lab: lab, Dir: dir, Progress: os.Stdout}
	preparing, preparingCtx := errgroup.WithContext(ctx)
	preparing.Go(func() error { return lab.Up(preparingCtx) })
	preparing.Go(func() error { return gateways.Prepare(preparingCtx, cfg) })
	if err := preparing.Wait(); err != nil {
		return err
	}
	d.client = lab.EchoProgram()
	d.step("before it: a client, a router (FRR), two gateways; and a real Keystone and Neutron")
	d.step("Neutron has no agents here: the lab's router applies the L3 agent's NAT, and refuses addresses without an allowed pair")
	edge, err := gateways.Up(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, edge.Close(context.WithoutCancel(ctx))) }()
	d.step("isthmus-gateway on both gateways, isthmus-gateway-controller beside the cluster")
	d.Installation, err = gateways.Install(ctx, edge, lab, "a", dir, desired.NFTables)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	for _, step := range []struct {
		title string
		run   func(context.Context) error
	}{
		{"a Service of type LoadBalancer, with three pods, that asks for a floating IP", d.deploy},
		{"curl it from the client behind the router", d.curl},
		{fmt.Sprintf("a gateway dies %s into a download of %s, beside %d connections a second", death, download, rate), d.kill},
		{"delete the Service: its port and its floating IP are deleted", d.clean},
	} {
		d.step("%s", step.title)
		if err := step.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.title, err)
		}
	}
	d.step("done")
	fmt.Fprintln(os.Stdout, "demo-gateway: ok")
	return nil
}

func (d *demonstration) deploy(ctx context.Context) error {
	// A failed demo leaves a Service with addresses of a cloud that no longer exists.
	if _, err := d.Kubectl(ctx, "delete", "service", "web", "--namespace", "demo", "--ignore-not-found", "--timeout", "60s"); err != nil {
		return err
	}
	if err := d.Apply(ctx, web); err != nil {
		return err
	}
	if _, err := d.Kubectl(ctx, "rollout", "status", "deployment/web", "--namespace", "demo", "--timeout", "60s"); err != nil {
		return err
	}
	return testbed.Eventually(ctx, time.Minute, func(ctx context.Context) error {
		said, err := d.Kubectl(ctx, "get", "service", "web", "--namespace", "demo", "--output", "jsonpath={.status.loadBalancer.ingress[0].ip}")
		if err != nil {
			return err
		}
		if d.floating, err = netip.ParseAddr(said); err != nil {
			return fmt.Errorf("the Service's status has no address yet: %w", err)
		}
		if !gateways.External[0].Contains(d.floating) {
			return fmt.Errorf("%s is not of %s, where floating IPs come from", d.floating, gateways.External[0])
		}
		fmt.Fprintf(os.Stdout, "  kubectl get service web: %s\n", d.floating)
		return nil
	})
}

func (d *demonstration) url() string { return "http://" + d.floating.String() }

func (d *demonstration) curl(ctx context.Context) error {
	return testbed.Eventually(ctx, time.Minute, func(ctx context.Context) error {
		out, err := d.FromClient(ctx, "curl", "-sS", "--max-time", "2", d.url())
		if err == nil {
			fmt.Fprintf(os.Stdout, "  curl %s: %s", d.url(), out)
		}
		return err
	})
}

// report is the part of the echo client's output that the demo reads.
type report struct {
	Connections, Failures     int
	Errors                    map[string]int
	FirstFailure, LastFailure time.Time // when the failed ones began
}

// kill kills the gateway that the router prefers, agent and cable, while the client is busy.
func (d *demonstration) kill(ctx context.Context) error {
	type result struct {
		said string
		err  error
	}
	run := func(argv ...string) <-chan result {
		done := make(chan result, 1)
		go func() {
			said, err := d.FromClient(ctx, argv...)
			done <- result{said, err}
		}()
		return done
	}
	url := fmt.Sprintf("%s/stream?seconds=%.0f", d.url(), download.Seconds())
	whole := run("curl", "-sS", "--max-time", "90", "--output", os.DevNull, "--write-out", "%{size_download} bytes in %{time_total} s", url)
	short := run(d.client, "client", "--url", d.url(), "--rate", fmt.Sprint(rate), "--concurrency", "50", "--timeout", "5s", "--duration", download.String())
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(death):
	}
	if err := d.Cut(0); err != nil {
		return err
	}
	died := time.Now()
	if err := d.Agents[0].Kill(); err != nil {
		return err
	}
	d.step("%s is dead: cable cut, agent killed", gateways.Name(0))
	r := <-whole
	if r.err != nil {
		return fmt.Errorf("the download: %w", r.err)
	}
	fmt.Fprintf(os.Stdout, "  download: %s, one connection from beginning to end\n", r.said)
	r = <-short
	if r.err != nil {
		return fmt.Errorf("short connections: %w", r.err)
	}
	var c report
	if err := json.Unmarshal([]byte(r.said), &c); err != nil {
		return fmt.Errorf("read the client's report: %w", err)
	}
	fmt.Fprintf(os.Stdout, "  %d short connections, %d failed %v\n", c.Connections, c.Failures, c.Errors)
	if err := gateways.OnlyYoung(c.Failures, c.FirstFailure, c.LastFailure, died); err != nil {
		return fmt.Errorf("short connections: %w", err)
	}
	if c.Failures > 0 {
		fmt.Fprintf(os.Stdout, "  the first of these began %s before the death, the last %s: the other gateway did not know such young connections yet\n",
			died.Sub(c.FirstFailure).Round(time.Millisecond), died.Sub(c.LastFailure).Round(time.Millisecond))
	}
	return nil
}

// clean deletes the Service and waits until its address no longer answers. Then Neutron has no object of it left.
func (d *demonstration) clean(ctx context.Context) error {
	had, err := d.Objects(ctx)
	if err != nil {
		return err
	}
	if _, err := d.Kubectl(ctx, "delete", "service", "web", "--namespace", "demo", "--timeout", "60s"); err != nil {
		return err
	}
	if err := testbed.Eventually(ctx, time.Minute, func(ctx context.Context) error {
		if _, err := d.FromClient(ctx, "curl", "-sS", "--max-time", "1", d.url()); err == nil {
			return errors.New("it still answers")
		}
		return nil
	}); err != nil {
		return err
	}
	has, err := d.Objects(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "  Neutron had %d port and %d floating IP of it, and has %d and %d\n", had.Ports, had.FloatingIPs, has.Ports, has.FloatingIPs)
	if want := (gateways.Objects{Ports: 1, FloatingIPs: 1}); had != want || has != (gateways.Objects{}) {
		return fmt.Errorf("a Neutron that had %+v, want %+v, and has %+v, want none", had, want, has)
	}
	return nil
}
