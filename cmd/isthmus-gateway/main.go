// Command isthmus-gateway runs on every gateway. It balances the VIPs of its controller and announces them to neighbours.
// At start it applies the state on disk, so it needs no controller for what it already has. When it stops or crashes, the
// kernel keeps balancing until the subcommand cleanup removes that.
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
	"github.com/isthmus-net/isthmus/gateway/vrrp"
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

SIGTERM drains the gateway: neighbours stop sending here first, then it ends. SIGHUP ends it without
notice, for a restart: traffic stays in place, and the next process takes over.`,
		Example: `  # As the systemd unit runs it:
  isthmus-gateway run --cluster=a

  # With other certificates, on one address:
  isthmus-gateway run --cluster=a --listen=10.0.0.11:9479 --cert=gw-1/tls.crt --key=gw-1/tls.key --ca=gw-1/ca.crt`,
		Version:       version.Long(),
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
			Short: "Remove VIPs and the balancer from this machine",
			Long: `Remove what a gateway that was killed leaves on this machine: keepalived and its VIPs, the nftables table, and the
eBPF program. Traffic to its VIPs stops. Stop the gateway first: a running one creates them again.`,
			Example: "  isthmus-gateway cleanup",
			Args:    usage.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				return errors.Join(vrrp.Cleanup(cmd.Context(), cfg.vrrpDir()), nft.Remove(), ebpf.Remove(cfg.BPFFS))
			},
		},
	)
	return root
}
