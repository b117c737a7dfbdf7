// Command isthmusctl sets up a ClusterSet, adds clusters, exports Services and reports the state of all of them. Installed
// as kubectl-isthmus it is also `kubectl isthmus`.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	// The logs of the client libraries are of no use at a shell; errors carry what matters.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	ctrllog.SetLogger(klog.Background())

	root := newCommand()
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s\n", root.DisplayName(), sentence(err))
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "isthmusctl",
		Short: "Join clusters to a ClusterSet and export Services to it",
		Long: `Join clusters to a ClusterSet and export Services to it.

A ClusterSet starts with a broker, a Kubernetes API server that all clusters reach. Clusters join it, and a
Service that one of them exports is reachable in all of them as NAME.NAMESPACE.svc.clusterset.local.`,
		Example: `  isthmusctl deploy-broker --kubeconfig broker.kubeconfig
  isthmusctl invite a --kubeconfig broker.kubeconfig
  isthmusctl join invitation-a.yaml --kubeconfig a.kubeconfig
  isthmusctl export service hello -n demo --kubeconfig a.kubeconfig
  isthmusctl status --wait --kubeconfig a.kubeconfig`,
		Version:       version.Long(),
		SilenceErrors: true, // main prints the error, once
		SilenceUsage:  true,
		Args:          usage.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	if strings.HasPrefix(filepath.Base(os.Args[0]), "kubectl-") {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl isthmus"}
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	usage.Explain(root)
	root.AddCommand(
		deployBrokerCommand(), inviteCommand(), joinCommand(), leaveCommand(), memberCommand(), rotateCommand(), revokeCommand(),
		exportCommand(), unexportCommand(), statusCommand(), dnsCommand(), showCommand(), explainCommand(), observeCommand(), releaseHoldCommand(), gatewayCommand(), federationCommand(), lighthouseCommand(), imagesCommand(), upgradeCommand(), uninstallCommand(), versionCommand(),
	)
	return root
}
