package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/cmd/internal/cli"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/gateway/controller"
)

// sweep is the command that deletes unused objects in Neutron.
func sweep(s *settings) *cobra.Command {
	var dryRun bool
	var output string
	cmd := &cobra.Command{
		Use:   "sweep",
		Short: "Delete the objects of this cluster in Neutron that no Service uses",
		Long: `sweep lists the ports and floating IPs in Neutron that belong to this cluster and that no
Service uses, and deletes them. The controller does so by itself. Use sweep to see them, or
after you have uninstalled the controller. It may run beside the controller.`,
		Example: `  isthmus-gateway-controller sweep --dry-run --kubeconfig=$HOME/.kube/east --config=gateways.yaml --cloud=lbaas`,
		Args:    usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(output); err != nil {
				return err
			}
			found, err := swept(cmd, *s, dryRun)
			return errors.Join(tables.Write(cmd.OutOrStdout(), found, output), err)
		},
	}
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "list the objects, and delete nothing")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

func swept(cmd *cobra.Command, s settings, dryRun bool) (orphans, error) {
	none := orphans{}
	local, err := cli.Cluster(s.kubeconfig)
	if err != nil {
		return none, err
	}
	c, err := readSettings(s.config)
	if err != nil {
		return none, err
	}
	cloud, err := cloudOf(s, c)
	if err != nil || cloud == nil {
		return none, err
	}
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return none, err
	}
	live, err := client.New(local, client.Options{Scheme: scheme})
	if err != nil {
		return none, fmt.Errorf("prepare a client of %s: %w", local.Host, err)
	}
	found, err := controller.Sweep(cmd.Context(), live, cloud, dryRun)
	return append(none, found...), err
}

// orphans are the rows of sweep.
type orphans []controller.Orphan

// Header implements tables.Table.
func (orphans) Header() []string { return []string{"KIND", "ID", "ADDRESSES", "MADE FOR", "DELETED"} }

// Rows implements tables.Table.
func (o orphans) Rows() (rows [][]string) {
	for _, is := range o {
		deleted := "no"
		if is.Deleted {
			deleted = "yes"
		}
		rows = append(rows, []string{is.Kind, is.ID, texts(is.Addrs), is.Purpose, deleted})
	}
	return rows
}

// Nothing implements tables.Table.
func (orphans) Nothing() string { return "this cluster has no unused objects in Neutron" }

func texts(addrs []netip.Addr) string {
	all := make([]string, len(addrs))
	for i, a := range addrs {
		all[i] = a.String()
	}
	return strings.Join(all, ",")
}
