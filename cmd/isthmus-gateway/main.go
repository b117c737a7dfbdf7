// Command isthmus-gateway runs on every gateway: it balances the VIPs that its controller gives it, and tells neighbours of
// them. It serves from disk when it starts, so it needs no controller for what it knows already. When it stops or crashes
// the kernel goes on to balance; only the subcommand cleanup takes that away.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/gateway/ebpf"
	"github.com/isthmus-net/isthmus/gateway/nft"
)

func main() {
	if err := newCommand().ExecuteContext(context.Background()); err != nil {
		fmt.Fprintf(os.Stderr, "isthmus-gateway: %v\n", err)
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	cfg := defaults()
	start := func(cmd *cobra.Command, _ []string) error {
		if err := cfg.Validate(); err != nil {
			return err
		}
		return run(cmd.Context(), *cfg, logger(cfg))
	}
	root := &cobra.Command{
		Use:   "isthmus-gateway",
		Short: "Balance and announce VIPs of a Kubernetes cluster on a gateway",
		Long: `Balance and announce VIPs of a Kubernetes cluster on a gateway.

SIGTERM takes the gateway out of service: neighbours are told first, then it ends. SIGHUP ends it without a
word, for a restart: traffic stays where it is, and what starts next takes over.`,
		Example: `  # As the systemd unit runs it:
  isthmus-gateway run --cluster=a

  # With certificates of its own, reachable on one address:
  isthmus-gateway run --cluster=a --listen=10.0.0.11:9479 --cert=gw-1/tls.crt --key=gw-1/tls.key --ca=gw-1/ca.crt`,
		Version:       version.String(),
		Args:          usage.NoArgs,
		SilenceErrors: true, // main prints the error, once
		SilenceUsage:  true,
		RunE:          start,
	}
	usage.Explain(root)
	cfg.bind(root.PersistentFlags())
	root.AddCommand(
		&cobra.Command{
			Use: "run", Short: "Run the gateway (the default)", Example: "  isthmus-gateway run --cluster=a",
			Args: usage.NoArgs, RunE: start,
		},
		showCommand(cfg),
		&cobra.Command{
			Use:   "cleanup",
			Short: "Remove the balancer from this machine",
			Long: `Remove what a gateway balances with: its table of nftables, and its eBPF program. Traffic to its VIPs
ends. Stop the gateway first: a running one makes it again.`,
			Example: "  isthmus-gateway cleanup",
			Args:    usage.NoArgs,
			RunE:    func(*cobra.Command, []string) error { return errors.Join(nft.Remove(), ebpf.Remove(cfg.BPFFS)) },
		},
	)
	return root
}
