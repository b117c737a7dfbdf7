// Scale measures the control plane of a large ClusterSet on this machine: a real broker, simulated members with changing
// exports, and a real importing member. The documentation of package simulation lists the real parts.
//
//	go run ./tools/scale --members 9 --exports 1000 --endpoints 20 --churn 50/s --duration 60s
//
// The result goes to standard output, progress to standard error.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/isthmus-net/isthmus/tools/bench/result"
	"github.com/isthmus-net/isthmus/tools/scale/report"
	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		stop()
		os.Exit(1)
	}
}

// settings are the values of the flags.
type settings struct {
	set      simulation.Config
	real     []string
	churn    rate
	duration time.Duration
	steady   time.Duration
	log      string
	format   string
}

func command() *cobra.Command {
	s := settings{churn: 50}
	cmd := &cobra.Command{
		Use:   "scale",
		Short: "Measure the control plane of a large ClusterSet on this machine",
		Long: `scale starts a broker (kube-apiserver and etcd), simulates members that export Services
and change their endpoints, and lets a real member "a" (kube-apiserver, etcd and
isthmus-controller) import them. It reports how long changes take to arrive in a, and what
broker and controller spend: CPU, memory, bytes and requests. It needs no root, about
3 GiB of memory, and a machine that does nothing else.`,
		Example: `  # Nine members with the same 1,000 Services, 20 endpoints each, 50 changes a second
  go run ./tools/scale --members 9 --exports 1000 --endpoints 20 --churn 50/s

  # 10,000 Services of ten members, 10 endpoints each, as JSON
  go run ./tools/scale --members 10 --exports 1000 --endpoints 10 --distinct -o json

  # From a real exporter to a real importer
  go run ./tools/scale --members 0 --real a,b --exports 100 --endpoints 10 --churn 20/s`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(cmd.Context(), s, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.IntVar(&s.set.Members, "members", 9, "number of simulated members")
	f.IntVar(&s.set.Exports, "exports", 1000, "number of Services that each member exports")
	f.IntVar(&s.set.Endpoints, "endpoints", 20, "number of endpoints of each Service in each member")
	f.BoolVar(&s.set.Distinct, "distinct", false, "every member exports its own Services; otherwise all export the same ones")
	f.StringSliceVar(&s.real, "real", []string{"a"}, "real members: a, which imports, and if wanted b, which exports too")
	f.Var(&s.churn, "churn", "how many endpoints change, such as 50/s")
	f.DurationVar(&s.duration, "duration", time.Minute, "duration of the changes")
	f.DurationVar(&s.steady, "steady", 30*time.Second, "duration of the measurement without changes")
	f.StringVar(&s.set.Storage, "storage", simulation.DefaultStorage(), "folder for etcd's files")
	f.StringVar(&s.set.Controller, "controller", "", "isthmus-controller to measure; default: built from this checkout")
	f.StringVar(&s.log, "log", "", "file for the log of a's controller")
	f.StringVarP(&s.format, "output", "o", "text", "output `format`: text or json")
	return cmd
}

// validate reports all invalid flags, except those that simulation.Config checks.
func (s *settings) validate() error {
	var errs []error
	if s.format != "text" && s.format != "json" {
		errs = append(errs, fmt.Errorf("-o %s: the formats are text and json", s.format))
	}
	s.set.Exporter = false
	imports := false
	for _, id := range s.real {
		switch id {
		case "a":
			imports = true
		case "b":
			s.set.Exporter = true
		default:
			errs = append(errs, fmt.Errorf("--real %s: only a and b can be real", id))
		}
	}
	if !imports {
		errs = append(errs, errors.New("--real must name a, in which arrivals are measured"))
	}
	for name, d := range map[string]time.Duration{"--duration": s.duration, "--steady": s.steady} {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("%s %s: it must be longer", name, d))
		}
	}
	return errors.Join(errs...)
}

// run simulates the ClusterSet that s describes, measures it and writes the report.
func run(ctx context.Context, s settings, stdout, stderr io.Writer) (err error) {
	if err := s.validate(); err != nil {
		return err
	}
	s.set.Progress = stderr
	if s.set.Assets, err = simulation.Assets(ctx, stderr); err != nil {
		return err
	}
	if s.set.Controller == "" {
		dir, err := os.MkdirTemp("", "isthmus-scale-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		if s.set.Controller, err = simulation.BuildController(ctx, dir); err != nil {
			return err
		}
	}
	w, err := simulation.NewClusterSet(ctx, s.set)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	r, err := measure(ctx, w, s)
	if s.log != "" {
		err = errors.Join(err, w.Log(s.log))
	}
	if err != nil {
		return err
	}
	if s.format == "json" {
		return r.WriteJSON(stdout)
	}
	return r.WriteText(stdout)
}

// measure follows the importing member: the first import, at rest, under changes, and a restart.
func measure(ctx context.Context, w *simulation.ClusterSet, s settings) (report.Report, error) {
	r := report.Report{
		Machine: result.Machine(), Storage: simulation.DescribeStorage(s.set.Storage),
		Members: s.set.Members, Real: s.real, Exports: s.set.Exports, Endpoints: s.set.Endpoints, Distinct: s.set.Distinct,
		Services: s.set.Services(), RemoteEndpoints: s.set.RemoteEndpoints(),
	}
	first, err := w.FirstImport(ctx)
	if err != nil {
		return r, err
	}
	r.FirstImport = report.FirstImport{Seconds: first.Usable.Seconds(), Reported: first.Reported.Seconds(), Load: report.OfLoad(first.Load)}
	load, err := w.Rest(ctx, s.steady)
	if err != nil {
		return r, err
	}
	r.Steady = report.OfLoad(load)
	var p simulation.Propagation
	load, err = w.Load(ctx, func(ctx context.Context) error {
		p, err = w.Churn(ctx, float64(s.churn), s.duration)
		return err
	})
	if err != nil {
		return r, err
	}
	r.Churn, r.Propagation = report.OfLoad(load), report.OfPropagation(p)
	again, err := w.Restart(ctx)
	r.Restart = report.OfRestart(again)
	return r, err
}

// rate is a number of changes per second (see [pflag.Value]).
type rate float64

// String formats r as Set accepts it.
func (r *rate) String() string { return strconv.FormatFloat(float64(*r), 'f', -1, 64) + "/s" }

// Type returns the name of the type in the help.
func (r *rate) Type() string { return "number/s" }

// Set accepts 50/s and 50.
func (r *rate) Set(text string) error {
	v, err := strconv.ParseFloat(strings.TrimSuffix(text, "/s"), 64)
	if err != nil || !(v > 0 && v <= 10_000) {
		return fmt.Errorf("%q is not a number of changes per second between 0 and 10000, such as 50/s", text)
	}
	*r = rate(v)
	return nil
}
