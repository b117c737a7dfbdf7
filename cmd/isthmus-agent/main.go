// Command isthmus-agent runs on every node: it turns the ServiceImports and EndpointSlices of its
// cluster into the node's eBPF dataplane and into the answers of the node's own name server.
//
// It needs the API server to learn of changes and nothing else. When it stops or crashes, what it put
// into the kernel goes on working; only the subcommand cleanup takes that away.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
)

// gcPercent keeps the heap near to what lives: the agent is on every node, and has little to do between changes.
const gcPercent = 25

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := newCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "isthmus-agent: %v\n", err)
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	cfg := defaults()
	root := &cobra.Command{
		Use:   "isthmus-agent",
		Short: "Program a node's dataplane and answer its DNS for a ClusterSet",
		Example: `  # In a pod, as the DaemonSet runs it:
  isthmus-agent --cgroup-root=/host/sys/fs/cgroup

  # On a machine, against some cluster, answering DNS on one more address:
  isthmus-agent --kubeconfig=$HOME/.kube/config --dns-listen=169.254.20.53 --dns-listen=192.0.2.7:5353

  # Without any API server, from manifests on disk:
  isthmus-agent --source=dir:/etc/isthmus/world --clusterset-ip-range=243.0.0.0/8`,
		Version:       version.String(),
		Args:          usage.NoArgs,
		SilenceErrors: true, // main prints the error, once
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return start(cmd.Context(), cfg) },
	}
	usage.Explain(root)
	cfg.bind(root.PersistentFlags())
	root.AddCommand(
		showCommand(cfg),
		&cobra.Command{
			Use:     "run",
			Short:   "Run the agent (the default)",
			Example: "  isthmus-agent run --node-name=node-1",
			Args:    usage.NoArgs,
			RunE:    func(cmd *cobra.Command, _ []string) error { return start(cmd.Context(), cfg) },
		},
		&cobra.Command{
			Use:   "cleanup",
			Short: "Remove the dataplane and the DNS addresses from this node",
			Long: `Remove programs, maps, links and the DNS interface that agents left on this node.
Connections to pods stay; new ones to a ClusterSetIP fail from then on. Stop the agent first.`,
			Example: "  isthmus-agent cleanup --bpffs=/sys/fs/bpf",
			Args:    usage.NoArgs,
			RunE:    func(*cobra.Command, []string) error { return cleanup(cfg) },
		},
		&cobra.Command{
			Use:   "mount-bpffs PATH",
			Short: "Mount a BPF file system, unless one stands there",
			Long: `Mount a BPF file system at PATH, unless one stands there already. It is the only part that needs
a privileged container, so it is a command of its own for an init container, which ends.`,
			Example: "  isthmus-agent mount-bpffs /sys/fs/bpf",
			Args:    cobra.ExactArgs(1),
			RunE:    func(_ *cobra.Command, args []string) error { return mountBPFFS(args[0], logger(cfg)) },
		},
	)
	return root
}

// start validates, sets up logging and runs the agent until a signal asks it to end.
func start(ctx context.Context, cfg *Config) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	log := logger(cfg)
	klog.SetSlogLogger(log.With("component", "client-go"))
	return run(ctx, *cfg, log)
}
