// Command isthmus-agent runs on every node. It programs the node's eBPF dataplane and answers its DNS questions, from the
// ServiceImports and EndpointSlices of its cluster.
//
// It needs the API server only to learn of changes. Programs and maps in the kernel keep working when the agent stops or
// crashes; only the subcommand cleanup removes them.
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

// gcPercent keeps the heap close to the live data: the agent runs on every node and is idle between changes.
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
		Short: "Run the dataplane and the name server of a node in a ClusterSet",
		Example: `  # In a pod, as the DaemonSet runs it:
  isthmus-agent --cgroup-root=/host/sys/fs/cgroup

  # On a machine, for a remote cluster, with DNS on one more address:
  isthmus-agent --kubeconfig=$HOME/.kube/config --dns-listen=169.254.20.53 --dns-listen=192.0.2.7:5353

  # Without an API server, from manifests on disk:
  isthmus-agent --source=dir:/etc/isthmus/manifests --clusterset-ip-range=243.0.0.0/8`,
		Version:       version.Long(),
		Args:          usage.NoArgs,
		SilenceErrors: true, // main prints the error
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
			Long: `Remove the programs, maps, links and the DNS interface of the agent from this node. Stop the agent first.
Existing connections to pods continue; new connections to a ClusterSetIP fail.`,
			Example: "  isthmus-agent cleanup --bpffs=/sys/fs/bpf",
			Args:    usage.NoArgs,
			RunE:    func(*cobra.Command, []string) error { return cleanup(cfg) },
		},
		&cobra.Command{
			Use:   "mount-bpffs PATH",
			Short: "Mount a BPF file system",
			Long: `Mount a BPF file system at PATH, unless one is mounted there. Only this step needs a privileged container, so it
is a separate command for an init container.`,
			Example: "  isthmus-agent mount-bpffs /sys/fs/bpf",
			Args:    cobra.ExactArgs(1),
			RunE:    func(_ *cobra.Command, args []string) error { return mountBPFFS(args[0], logger(cfg)) },
		},
	)
	return root
}

// start validates the settings, sets up logging and runs the agent until ctx is done.
func start(ctx context.Context, cfg *Config) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	log := logger(cfg)
	klog.SetSlogLogger(log.With("component", "client-go"))
	return run(ctx, *cfg, log)
}
