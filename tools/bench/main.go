// Bench runs one of the product's benchmarks:
//
//	go run ./tools/bench NAME [-o text|json] [-enforce] [-rounds N]
//
// Standard output carries the result alone; progress goes to standard error. With -enforce a missed bar makes it exit with 1.
// Every row of the result is one metric with its bar.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/isthmus-net/isthmus/tools/bench/controlplane"
	"github.com/isthmus-net/isthmus/tools/bench/dataplane"
	"github.com/isthmus-net/isthmus/tools/bench/dns"
	"github.com/isthmus-net/isthmus/tools/bench/federation"
	"github.com/isthmus-net/isthmus/tools/bench/gateway"
	"github.com/isthmus-net/isthmus/tools/bench/metric"
	"github.com/isthmus-net/isthmus/tools/bench/result"
)

// bench runs the given number of interleaved rounds, reports its progress, and returns the rows of the result.
type bench func(ctx context.Context, rounds int, progress io.Writer) ([]metric.Metric, error)

// benches maps names to benchmarks.
var benches = map[string]bench{"controlplane": controlplane.Run, "dataplane": dataplane.Run, "dns": dns.Run, "federation": federation.Run, "gateway": gateway.Run}

func main() {
	for _, phase := range gateway.Phases {
		benches["gateway-"+phase.Name] = phase.Run
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, benches, os.Args[1:], os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1)
	}
}

// run executes a command line. With -enforce its error names the missed bars.
func run(ctx context.Context, benches map[string]bench, args []string, stdout, stderr io.Writer) error {
	name, format, enforce, rounds, err := parse(args, stderr)
	if err != nil {
		return err
	}
	measure, ok := benches[name]
	if !ok {
		return fmt.Errorf("no benchmark is named %q; available: %s", name, strings.Join(slices.Sorted(maps.Keys(benches)), ", "))
	}
	undo, err := prioritize(autogroup)
	if err != nil {
		fmt.Fprintln(stderr, "cannot prioritize the benchmark over other sessions on this machine:", err)
	}
	metrics, err := measure(ctx, rounds, stderr)
	if err := errors.Join(err, undo()); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	r := result.Result{Bench: name, Machine: result.Machine(), Rounds: rounds, Metrics: metrics}
	write := r.WriteTable
	if format == "json" {
		write = r.WriteJSON
	}
	if err := write(stdout); err != nil {
		return err
	}
	if missed := r.Missed(); enforce && len(missed) > 0 {
		return fmt.Errorf("%s: bars missed: %s", name, strings.Join(missed, ", "))
	}
	return nil
}

// parse parses the command line. NAME may precede or follow the flags.
func parse(args []string, stderr io.Writer) (name, format string, enforce bool, rounds int, err error) {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		_, _ = fmt.Fprint(stderr, "usage: bench NAME [-o text|json] [-enforce] [-rounds N]\nexample: go run ./tools/bench dns -rounds 2\n")
		flags.PrintDefaults()
	}
	flags.StringVar(&format, "o", "text", "`format` of the result: text or json")
	flags.BoolVar(&enforce, "enforce", false, "exit with 1 if a bar is missed")
	flags.IntVar(&rounds, "rounds", 6, "interleaved rounds; the result is their median")
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		name, args = args[0], args[1:]
	}
	if err := flags.Parse(args); err != nil {
		return "", "", false, 0, err
	}
	rest := flags.Args()
	if name == "" && len(rest) > 0 {
		name, rest = rest[0], rest[1:]
	}
	var faults []error
	if name == "" {
		faults = append(faults, errors.New("the benchmark's name is missing; usage: go run ./tools/bench NAME"))
	}
	if len(rest) > 0 {
		faults = append(faults, fmt.Errorf("unexpected %q", rest))
	}
	if format != "text" && format != "json" {
		faults = append(faults, fmt.Errorf("-o %s: the formats are text and json", format))
	}
	if rounds < 1 {
		faults = append(faults, fmt.Errorf("-rounds %d: at least one is needed", rounds))
	}
	return name, format, enforce, rounds, errors.Join(faults...)
}
